"""The block pool's promises: counts that never lie, contents found exactly as long as they are there."""

from __future__ import annotations

import random

import pytest

from hispec_ray.core.block_pool import BlockPool, IntegrityError, OutOfBlocksError

SIZE = 4


def pool_of(blocks: int, prefix_caching: bool = True) -> BlockPool:
    return BlockPool(blocks, SIZE, prefix_caching)


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Run these tokens as a sequence would: take what is found, allocate the rest, register what is full."""
    table = pool.match(tokens)
    table += pool.allocate(pool.blocks_for(len(tokens)) - len(table))
    pool.register(table, tokens, len(tokens))
    return table


def test_shared_prefix_is_found_and_counted() -> None:
    pool = pool_of(8)
    first = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = pool.match([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert second == first[:2]
    assert pool.used == 3
    pool.check_integrity([first, second])
    pool.release(first)
    assert pool.used == 2, "the second reader still holds the shared blocks"
    pool.release(second)
    assert pool.used == 0
    pool.check_integrity([])


@pytest.mark.parametrize(("count", "found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_a_match_leaves_at_least_one_token_to_run(count: int, found: int) -> None:
    pool = pool_of(8)
    tokens = list(range(8))
    fill(pool, tokens)
    assert len(pool.match((tokens + [50] * 4)[:count])) == found


def test_a_block_is_found_only_behind_its_own_prefix() -> None:
    pool = pool_of(8)
    fill(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert pool.match([2, 2, 2, 2, 0]) == []
    assert pool.match([9, 1, 1, 1, 2, 2, 2, 2, 0]) == []


def test_only_blocks_wholly_below_the_watermark_become_findable() -> None:
    pool = pool_of(8)
    tokens = list(range(12))
    table = pool.allocate(3)
    pool.register(table, tokens, 7)
    assert [pool.findable(block) for block in table] == [True, False, False]
    pool.register(table, tokens, 8)
    assert [pool.findable(block) for block in table] == [True, True, False]
    assert pool.match(tokens) == table[:2]


@pytest.mark.parametrize("full", [9, 13])
def test_a_watermark_beyond_tokens_or_blocks_is_refused(full: int) -> None:
    pool = pool_of(8)
    with pytest.raises(ValueError, match="watermark"):
        pool.register(pool.allocate(2), list(range(full if full > 12 else 8)), full)


def test_freed_blocks_stay_findable_until_they_are_reused() -> None:
    pool = pool_of(3)
    tokens = list(range(9))
    table = fill(pool, tokens)
    pool.release(table)
    assert pool.free_count == 3
    again = pool.match(tokens)
    assert again == table[:2]
    assert pool.used == 2
    pool.release(again)
    pool.allocate(3)
    assert pool.match(tokens) == []
    pool.check_integrity()


def test_the_longest_free_contents_are_evicted_first_and_blank_blocks_before_them() -> None:
    pool = pool_of(4)
    old, new = [1] * 5, [2] * 5  # a full block and a partial one each
    old_table, new_table = fill(pool, old), fill(pool, new)
    pool.release(old_table)
    pool.release(new_table)
    assert set(pool.allocate(2)) == {old_table[1], new_table[1]}, "the partial blocks hold nothing that can be found"
    assert pool.allocate(1) == [old_table[0]]
    assert pool.match(new) == [new_table[0]]


def test_a_table_is_evicted_from_its_end() -> None:
    pool = pool_of(3)
    tokens = list(range(13))
    table = fill(pool, tokens[:12])
    pool.release(table)
    pool.allocate(1)
    assert pool.match(tokens) == table[:2]


def test_allocation_is_all_or_nothing() -> None:
    pool = pool_of(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks were asked for; 1 of 3"):
        pool.allocate(2)
    assert pool.free_count == 1
    assert pool.usage == pytest.approx(2 / 3)


def test_equal_contents_made_twice_are_found_once_and_outlive_either_copy() -> None:
    pool = pool_of(4)
    tokens = [7] * 5
    one, other = pool.allocate(2), pool.allocate(2)
    pool.register(one, tokens, 4)
    pool.register(other, tokens, 4)
    assert pool.findable(one[0])
    assert not pool.findable(other[0])
    pool.release(one)
    pool.allocate(2)  # overwrites the copy that was found
    assert pool.match(tokens) == []
    pool.release(other)
    assert pool.match(tokens) == [other[0]]
    pool.check_integrity()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = pool_of(4, prefix_caching=False)
    tokens = list(range(9))
    pool.release(fill(pool, tokens))
    assert pool.match(tokens) == []
    pool.check_integrity([])


def test_a_double_release_is_refused() -> None:
    pool = pool_of(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="nobody references"):
        pool.release(table)


def test_check_integrity_sees_a_leak_and_a_foreign_table() -> None:
    pool = pool_of(4)
    table = pool.allocate(2)
    with pytest.raises(IntegrityError, match="counted and held differ"):
        pool.check_integrity([])
    with pytest.raises(IntegrityError, match="counted and held differ"):
        pool.check_integrity([table, table])


@pytest.mark.parametrize("breakage", ["freed", "leaked", "negative", "renamed", "stale"])
def test_check_integrity_sees_broken_books(breakage: str) -> None:
    pool = pool_of(4)
    table = fill(pool, list(range(9)))
    if breakage == "freed":
        pool._free[table[0]] = None
    elif breakage == "leaked":
        pool._free.popitem()
    elif breakage == "negative":
        pool._references[table[0]] = -1
    elif breakage == "renamed":
        pool._digests[table[0]] = b"other"
    else:
        pool._digests[next(iter(pool._free))] = b"other"
    with pytest.raises(IntegrityError):
        pool.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_is_what_was_written(seed: int) -> None:
    """Against a model: contents written into blocks, read back through every match."""
    rng = random.Random(seed)
    pool = pool_of(12)
    written: dict[int, list[int]] = {}
    held: list[list[int]] = []
    hits = 0
    for _ in range(400):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            tokens = [rng.randrange(2)] * SIZE + [rng.randrange(2)] * SIZE + [rng.randrange(3)] * rng.randrange(1, 6)
            hit = pool.match(tokens)
            hits += len(hit)
            assert [token for block in hit for token in written[block]] == tokens[: len(hit) * SIZE]
            missing = pool.blocks_for(len(tokens)) - len(hit)
            if missing > pool.free_count:
                pool.release(hit)
                continue
            table = hit + pool.allocate(missing)
            for index in range(len(hit), len(table)):
                written[table[index]] = tokens[index * SIZE : (index + 1) * SIZE]
            pool.register(table, tokens, len(tokens))
            held.append(table)
        pool.check_integrity(held)
    assert hits > 50
