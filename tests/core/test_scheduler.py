"""The scheduler's promises: whatever is run when, every sequence gets its own text, and everybody gets on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hispec_ray.core.block_pool import BlockPool, IntegrityError
from hispec_ray.core.plan import SequencePlan, StepPlan
from hispec_ray.core.scheduler import Scheduler
from hispec_ray.core.sequence import Sequence, Status
from hispec_ray.request import QueueFullError, RequestError

SIZE = 4
END = 0  # the fake model's end-of-sequence token
GARBAGE = -1  # a guess that nobody accepted


def choose(seed: int, context: Items[int]) -> int:
    """The fake model: the next token is a hash of the seed and of everything before, as read from the cache."""
    return hashlib.blake2b(repr((seed, list(context))).encode(), digest_size=1).digest()[0] % 24


def alone(prompt: list[int], limit: int, seed: int) -> list[int]:
    """The whole text of a sequence that nobody disturbs."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(choose(seed, tokens))
        if tokens[-1] == END:
            break
    return tokens


class Simulation:
    """A scheduler, a cache that holds token ids for keys and values, and an engine that stops at END and at the limit."""

    def __init__(
        self,
        rng: random.Random,
        *,
        blocks: int = 12,
        caching: bool = True,
        sequences: int = 4,
        rows: int = 8,
        window: int = 3,
        branches: int = 0,
    ) -> None:
        self.rng = rng
        self.pool = BlockPool(blocks, SIZE, caching)
        self.scheduler = Scheduler(self.pool, sequences, rows, 1000, window, branches)
        self.cache: dict[int, int] = {}
        self.live: dict[int, Sequence] = {}
        self.expected: dict[int, list[int]] = {}
        self.told: dict[int, list[int]] = {}
        self.count = 0
        self.steps = 0

    def add(self, prompt: list[int], limit: int, seed: int = 0, tells: bool = False, speculates: bool = True) -> Sequence:
        count = 2 if tells else None
        sequence = Sequence(
            self.count, f"request-{self.count}", list(prompt), limit, 0.0, seed, prompt_logprobs=count, speculates=speculates
        )
        self.told[sequence.id] = []
        self.count += 1
        self.scheduler.add(sequence)
        self.live[sequence.id] = sequence
        self.expected[sequence.id] = alone(prompt, limit, seed)
        return sequence

    def add_any(self) -> None:
        """A prompt of few words, so that many share a beginning."""
        prompt = [self.rng.choice((1, 2))] * self.rng.randrange(1, 10) + [self.rng.randrange(1, 4) for _ in range(self.rng.randrange(12))]
        capacity = self.pool.blocks * SIZE + 1
        limit = self.rng.randint(min(len(prompt), capacity - 1) + 1, capacity)
        self.add(prompt[: capacity - 1], limit, self.rng.randrange(3), self.rng.random() < 0.3, self.rng.random() < 0.8)

    def abort(self, sequence: Sequence) -> None:
        assert self.scheduler.abort(sequence.request_id) == [sequence]
        del self.live[sequence.id]

    def step(self) -> StepPlan | None:
        self.steps += 1
        assert self.steps < 5000, "livelock"
        plan = self.scheduler.schedule()
        assert (plan is not None) == bool(self.live), "a scheduler with work always plans some"
        for part in plan.sequences if plan else ():
            self.run(part)
        self.check()
        return plan

    def run(self, part: SequencePlan) -> None:
        sequence = self.live[part.id]
        rows = len(part.tokens) + part.room
        assert rows
        assert part.start == sequence.full
        assert part.room == 0 or (len(part.tokens) == 1 and sequence.speculates)
        if part.told:
            first = part.start + part.told.first + 1
            assert first + len(part.told.tokens) <= part.start + len(part.tokens) + 1, "only what the rows can tell"
            assert list(part.told.tokens) == sequence.tokens[first : first + len(part.told.tokens)]
            self.told[part.id] += part.told.tokens
        assert len(part.blocks) * SIZE >= part.start + rows
        slots = [part.blocks[position // SIZE] * SIZE + position % SIZE for position in range(part.start + rows)]
        self.cache.update(zip(slots[part.start :], part.tokens, strict=False))
        known = part.start + len(part.tokens)
        new: list[int] = []
        if part.samples:
            for _ in range(self.rng.randint(1, part.room + 1)):
                new.append(choose(part.seed, [self.cache[slot] for slot in slots[: known + len(new)]]))
                if known + len(new) - 1 < len(slots):
                    self.cache[slots[known + len(new) - 1]] = new[-1]
            for position in range(known + len(new) - 1, len(slots)):
                self.cache[slots[position]] = GARBAGE
            if END in new:
                new = new[: new.index(END) + 1]
        total = len(sequence.tokens) + len(new)
        assert total <= sequence.limit
        finished = total == sequence.limit or new[-1:] == [END]
        self.scheduler.update(part.id, new, finished)
        if finished:
            assert sequence.tokens == self.expected[part.id]
            assert self.told[part.id] == ([] if sequence.prompt_logprobs is None else sequence.tokens[1 : sequence.prompt_len])
            assert sequence.status is Status.FINISHED
            del self.live[part.id]

    def check(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.live.values():
            held = [self.cache[sequence.blocks[position // SIZE] * SIZE + position % SIZE] for position in range(sequence.full)]
            assert held == sequence.tokens[: sequence.full], "rows below the watermark are final"

    def drain(self) -> None:
        while self.step() is not None:
            pass
        assert not self.scheduler.has_work
        assert self.pool.used == 0
        self.pool.check_integrity([])


def parts(plan: StepPlan | None) -> dict[int, SequencePlan]:
    return {part.id: part for part in plan.sequences} if plan else {}


def simulation(**options: int | bool) -> Simulation:
    return Simulation(random.Random(0), **options)  # type: ignore[arg-type]


def words(count: int, first: int = 100) -> list[int]:
    return list(range(first, first + count))


def test_spare_blocks_of_branches_preempt_nobody() -> None:
    """They are taken while blocks are plenty, and given back before anybody who needs one goes without."""
    done = []
    for branches in (0, 4):
        sim = simulation(blocks=64, sequences=8, window=3, branches=branches, caching=False)
        for number in range(8):
            sim.add(words(2, 100 + number), 30, seed=number)
        spare = 0
        while sim.live:
            plan = sim.step()
            for part in plan.sequences if plan else ():
                spare += len(part.blocks) - sim.pool.blocks_for(part.start + len(part.tokens) + part.room)
        done.append((sim.steps, sim.scheduler.preemptions))
        assert (spare > 0) == (branches > 0)
    assert done[0] == done[1]


def test_after_a_failed_step_the_shards_are_told_again() -> None:
    """Of endings, and of every token behind a full block: what they keep of rows from step to step may be lost."""
    scheduler = Scheduler(BlockPool(16, SIZE, True), 4, 8, 10, 3)
    scheduler.add(Sequence(1, "a", words(3), 20, 0.0, 0))
    scheduler.add(Sequence(2, "b", words(5, 200), 20, 0.0, 0))
    assert scheduler.schedule() is not None
    for id in (1, 2):
        scheduler.update(id, [5], id == 1)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.ended == (1,)
    scheduler.forget_plan()
    plan = scheduler.schedule()
    assert plan is not None
    assert 1 in plan.ended
    (part,) = plan.sequences
    assert (part.history, part.start, part.tokens) == (tuple(words(4, 200)), 4, (204, 5))


def test_a_prompt_is_read_in_chunks_and_then_decoded_with_a_window() -> None:
    scheduler = Scheduler(BlockPool(16, SIZE, True), 4, 8, 10, 3)
    scheduler.add(Sequence(5, "a", words(18), 40, 0.5, 77))
    seen = []
    for new in ([], [], [1], [2, 3, 4], [5]):
        plan = scheduler.schedule()
        assert plan is not None
        (part,) = plan.sequences
        assert (part.id, part.temperature, part.seed) == (5, 0.5, 77)
        seen.append((part.start, part.tokens, part.samples, part.room))
        scheduler.update(5, new, False)
    assert seen == [
        (0, tuple(words(8)), False, 0),
        (8, tuple(words(8, 108)), False, 0),
        (16, (116, 117), True, 0),
        (18, (1,), True, 3),
        (21, (4,), True, 3),
    ]


def test_the_window_never_leads_past_the_limit() -> None:
    scheduler = Scheduler(BlockPool(16, SIZE, True), 4, 8, 10, 3)
    scheduler.add(Sequence(0, "a", [1], 5, 0.0, 0))
    rooms = []
    for new, finished in (([2, 3], False), ([4], False), ([5], True)):
        rooms.append(parts(scheduler.schedule())[0].room)
        scheduler.update(0, new, finished)
    assert rooms == [3, 1, 0]
    assert not scheduler.has_work


def test_chunks_of_one_step_share_the_row_budget_and_decoding_costs_none_of_it() -> None:
    sim = simulation(blocks=32, rows=8)
    first = sim.add(words(3), 30)
    sim.step()
    sim.add(words(5, 200), 30)
    sim.add(words(9, 300), 30)
    plan = parts(sim.step())
    assert len(plan[first.id].tokens) == 1
    assert [len(plan[i].tokens) for i in (1, 2)] == [5, 3]
    assert [plan[i].samples for i in (1, 2)] == [True, False]


def test_a_shared_prompt_is_run_once() -> None:
    sim = simulation(blocks=16, rows=32)
    first = sim.add(words(13), 20)
    sim.step()
    second = sim.add([*words(12), 1], 20)
    part = parts(sim.step())[second.id]
    assert (part.start, len(part.tokens)) == (12, 1)
    assert part.blocks[:3] == first.blocks[:3]
    assert (first.cached, second.cached) == (0, 12)
    sim.drain()


def test_generated_text_is_found_by_the_request_that_continues_it() -> None:
    sim = simulation(blocks=16, rows=32)
    first = sim.add(words(5), 24)
    sim.drain()
    second = sim.add([*first.tokens, 1], len(first.tokens) + 4)
    sim.step()
    assert second.cached == (len(first.tokens) - 1) // SIZE * SIZE
    sim.drain()


def test_first_come_first_served_and_no_overtaking() -> None:
    sim = simulation(blocks=6, rows=32)
    sim.add(words(12), 20)
    sim.add(words(16, 200), 20)  # does not fit beside the first
    sim.add(words(1, 300), 4)  # would
    assert set(parts(sim.step())) == {0}
    assert (sim.scheduler.running, sim.scheduler.waiting) == (1, 2)
    sim.drain()


def test_no_more_than_max_sequences_run() -> None:
    sim = simulation(blocks=32, sequences=2)
    for index in range(4):
        sim.add([index + 1], 10)
    assert len(parts(sim.step())) == 2
    sim.drain()


def test_short_of_blocks_the_window_shrinks_before_anybody_is_preempted() -> None:
    scheduler = Scheduler(BlockPool(2, SIZE, True), 2, 8, 10, 3)
    scheduler.add(Sequence(0, "a", [1, 2, 3], 6, 0.0, 0))
    scheduler.schedule()
    scheduler.update(0, [9], False)
    scheduler.pool.allocate(1)  # nothing is left
    assert parts(scheduler.schedule())[0].room == 0
    assert scheduler.preemptions == 0


def test_the_last_arrived_gives_way_and_goes_to_the_queues_front_with_its_tokens() -> None:
    sim = simulation(blocks=6, rows=32, window=0)
    old = sim.add(words(7), 25, seed=1)
    young = sim.add(words(6, 200), 25, seed=1)
    later = sim.add(words(16, 300), 25, seed=1)
    while not sim.scheduler.preemptions:
        tokens = list(young.tokens)
        assert set(parts(sim.step())) <= {0, 1}
    assert old.status is Status.RUNNING
    assert (young.status, young.full, young.blocks, young.tokens) == (Status.WAITING, 0, (), tokens)
    assert len(tokens) > young.prompt_len
    assert sim.scheduler.waiting == 2
    while later.status is Status.WAITING:
        sim.step()
        assert young.status is not Status.WAITING or later.status is Status.WAITING
    sim.drain()


def test_a_newcomer_preempts_nobody() -> None:
    sim = simulation(blocks=5, rows=32)
    sim.add(words(8), 20)
    sim.step()
    sim.add(words(11, 200), 12)
    while 1 not in parts(sim.step()):
        assert sim.scheduler.preemptions == 0
    sim.drain()


def test_a_newcomer_leaves_a_block_for_each_sequence_that_runs() -> None:
    scheduler = Scheduler(BlockPool(2, SIZE, True), 2, 8, 10, 0)
    scheduler.add(Sequence(0, "old", [1, 2, 3], 7, 0.0, 0))
    scheduler.schedule()
    scheduler.update(0, [4], False)
    scheduler.add(Sequence(1, "new", [9], 4, 0.0, 0))
    for token in (5, 6):
        assert set(parts(scheduler.schedule())) == {0}, "the free block is the old one's next"
        scheduler.update(0, [token], False)
    scheduler.schedule()
    scheduler.update(0, [7], True)
    assert set(parts(scheduler.schedule())) == {1}
    assert scheduler.preemptions == 0


def test_the_last_arrived_sits_out_with_its_blocks_where_there_is_nobody_to_preempt() -> None:
    sim = simulation(blocks=7, rows=8, window=0)
    sim.add(words(8), 24)
    young = sim.add(words(17, 200), 20)
    steps = [parts(sim.step()) for _ in range(5)]
    assert sum(young.id not in plan for plan in steps[1:]) > 0
    sim.drain()


@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_oldest_sequence_always_progresses(blocks: int) -> None:
    sim = simulation(blocks=blocks, rows=3)
    for index in range(8):
        sim.add([index + 1] * (2 + index), blocks * SIZE + 1, seed=index)
    while sim.live:
        oldest = min(sim.live)
        part = parts(sim.step())[oldest]
        assert part.tokens
    assert sim.scheduler.preemptions > 0
    sim.drain()


def test_what_the_pool_could_never_hold_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(BlockPool(4, SIZE, True), 2, 8, 10, 3)
    scheduler.add(Sequence(0, "fits", [1], 17, 0.0, 0))  # the last token's row is never run
    with pytest.raises(
        RequestError, match=r"a prompt of 1 tokens and an answer of 17 need 5 cache blocks.*has 4.*at most 17 tokens"
    ) as error:
        scheduler.add(Sequence(1, "long", [1], 18, 0.0, 0))
    assert error.value.field == "max_tokens"
    with pytest.raises(RequestError) as error:
        scheduler.add(Sequence(1, "long", [1] * 17, 18, 0.0, 0))
    assert error.value.field == "prompt"
    assert scheduler.waiting == 1


def test_a_full_queue_refuses() -> None:
    scheduler = Scheduler(BlockPool(4, SIZE, True), 1, 8, 2, 0)
    for index in range(2):
        scheduler.add(Sequence(index, "a", [1], 4, 0.0, 0))
    with pytest.raises(QueueFullError, match="at most 2"):
        scheduler.add(Sequence(2, "a", [1], 4, 0.0, 0))
    scheduler.schedule()
    scheduler.add(Sequence(2, "a", [1], 4, 0.0, 0))


def test_an_abort_frees_at_once_wherever_the_sequence_is() -> None:
    sim = simulation(blocks=8, sequences=1)
    running, waiting = sim.add(words(6), 20), sim.add(words(6, 200), 20)
    sim.step()
    sim.abort(waiting)
    assert sim.pool.used > 0
    sim.abort(running)
    assert sim.pool.used == 0
    assert sim.scheduler.abort("unknown") == []
    assert not sim.scheduler.has_work
    sim.scheduler.check_integrity()


def test_an_abort_drops_every_choice_of_its_request() -> None:
    scheduler = Scheduler(BlockPool(8, SIZE, True), 1, 8, 9, 0)
    for index in range(3):
        scheduler.add(Sequence(index, "other" if index == 1 else "request", [1], 4, 0.0, index))
    scheduler.schedule()
    assert [sequence.id for sequence in scheduler.abort("request")] == [0, 2]
    scheduler.update(0, [7], False)
    assert set(parts(scheduler.schedule())) == {1}


def test_who_is_aborted_in_flight_holds_its_blocks_until_the_plan_is_done() -> None:
    scheduler = Scheduler(BlockPool(8, SIZE, True), 4, 8, 9, 0)
    scheduler.add(Sequence(0, "a", [1], 4, 0.0, 0))
    scheduler.schedule()
    assert [sequence.id for sequence in scheduler.abort("a")] == [0]
    assert scheduler.abort("a") == []
    assert scheduler.pool.used == 1
    scheduler.update(0, [7], False)
    assert scheduler.pool.used == 0
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_plans_in_flight_share_the_sequences() -> None:
    """Two lanes: each takes half, a sequence is in one at a time, and comes in again once its plan is done."""
    scheduler = Scheduler(BlockPool(40, SIZE, True), 8, 8, 9, 2)
    for index in range(5):
        scheduler.add(Sequence(index, "a", [1 + index], 30, 0.0, index))
    one, other = parts(scheduler.schedule(2)), parts(scheduler.schedule(2))
    assert (set(one), set(other)) == ({0, 1, 2}, {3, 4})
    assert scheduler.schedule(2) is None
    for index in one:
        scheduler.update(index, [7], False)
    assert set(parts(scheduler.schedule(2))) == {0, 1, 2}
    scheduler.check_integrity()


def test_nobody_in_flight_gives_way() -> None:
    """The pool is full and the younger one in flight: the older waits a turn, and then takes what it needs."""
    scheduler = Scheduler(BlockPool(4, SIZE, True), 2, 16, 9, 0)
    scheduler.add(Sequence(0, "old", words(2 * SIZE - 1), 3 * SIZE + 1, 0.0, 0))
    scheduler.add(Sequence(1, "young", words(SIZE, 100), 2 * SIZE, 0.0, 0))
    scheduler.schedule(2)
    scheduler.schedule(2)
    scheduler.update(0, [1], False)
    for token in range(2):
        plan = scheduler.schedule(2)
        assert plan is None or set(parts(plan)) == {0}
        if plan:
            scheduler.update(0, [token], False)
    assert scheduler.preemptions == 0
    scheduler.update(1, [5], False)
    scheduler.check_integrity()


def test_blocks_of_a_plan_in_flight_stay_its_own_where_blocks_are_scarce() -> None:
    """Its window's rows may lie in blocks behind the known tokens, which nobody else may be given before they are committed."""
    scheduler = Scheduler(BlockPool(8, 16, True), 4, 64, 9, 4, branches=1)
    scheduler.add(Sequence(0, "a", words(15), 100, 0.0, 0))
    scheduler.add(Sequence(1, "b", words(30, 100), 100, 0.0, 0))
    for _ in range(8):
        flying = [plan for _ in range(2) if (plan := scheduler.schedule(2))]
        scheduler.check_integrity()
        blocks = [block for plan in flying for part in plan.sequences for block in part.blocks]
        assert len(blocks) == len(set(blocks))
        for plan in flying:
            for part in plan.sequences:
                scheduler.update(part.id, list(range(part.room + 1)) if part.samples else [], False)
                scheduler.check_integrity()


def test_starting_over_replays_everybody_in_order() -> None:
    sim = simulation(blocks=20, sequences=3)
    requests = [sim.add(words(6, 50 * index), 12) for index in range(4)]
    sim.step()
    sim.step()
    sim.scheduler.start_over()
    assert (sim.scheduler.running, sim.scheduler.waiting, sim.pool.used) == (0, 4, 0)
    sim.scheduler.check_integrity()
    plan = sim.scheduler.schedule()
    assert plan is not None
    assert plan.ended == ()
    assert all(part.start == 0 and part.history == () for part in plan.sequences), "nothing is found in the cache, and all is told again"
    assert len(requests) == 4


def test_a_stop_inside_a_round_keeps_what_was_run() -> None:
    scheduler = Scheduler(BlockPool(8, SIZE, True), 1, 8, 9, 7)
    scheduler.add(Sequence(0, "a", [1], 20, 0.0, 0))
    scheduler.schedule()
    scheduler.update(0, [2, 3, 4, 5, 6], True)  # the shards had committed more
    scheduler.add(Sequence(1, "b", [1, 2, 3, 4, 5, 6], 20, 0.0, 0))
    assert parts(scheduler.schedule())[1].start == SIZE


def test_a_result_that_does_not_fit_its_plan_is_refused() -> None:
    scheduler = Scheduler(BlockPool(8, SIZE, True), 1, 8, 9, 2)
    scheduler.add(Sequence(0, "a", words(9), 12, 0.0, 0))
    scheduler.schedule()
    with pytest.raises(ValueError, match="not in the step"):
        scheduler.update(1, [], False)
    with pytest.raises(ValueError, match="its plan allows 0"):
        scheduler.update(0, [1], False)
    assert scheduler.schedule() is None, "its plan is in flight"
    scheduler.update(0, [], False)
    scheduler.schedule()
    for wrong in ([], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="allows 1 to"):
            scheduler.update(0, wrong, False)
    with pytest.raises(ValueError, match="must be finished"):
        scheduler.update(0, [1, 2, 3], False)
    scheduler.update(0, [1, 2, 3], True)


@pytest.mark.parametrize(("prompt", "limit"), [(0, 5), (5, 5)])
def test_a_sequence_has_a_prompt_and_a_token_to_choose(prompt: int, limit: int) -> None:
    with pytest.raises(ValueError, match="prompt tokens"):
        Sequence(0, "a", words(prompt), limit, 0.0, 0)


def test_an_id_is_taken_once() -> None:
    scheduler = Scheduler(BlockPool(8, SIZE, True), 1, 8, 9, 2)
    scheduler.add(Sequence(0, "a", [1], 4, 0.0, 0))
    with pytest.raises(ValueError, match="known already"):
        scheduler.add(Sequence(0, "b", [1], 4, 0.0, 0))


def test_check_integrity_sees_a_block_that_two_may_write() -> None:
    sim = simulation()
    one, other = sim.add(words(3), 20), sim.add(words(3, 200), 20)
    sim.step()
    sim.pool.release(other.blocks)
    other.blocks = one.blocks
    sim.pool._references[one.blocks[0]] += 1
    sim.pool._free.pop(one.blocks[0], None)
    with pytest.raises(IntegrityError, match="may write into block"):
        sim.scheduler.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_same_text_whatever_runs_beside_it(seed: int, caching: bool) -> None:
    rng = random.Random(seed)
    sim = Simulation(
        rng,
        blocks=rng.randint(3, 14),
        caching=caching,
        sequences=rng.randint(1, 6),
        rows=rng.choice((1, 3, 8, 64)),
        window=rng.randint(0, 5),
        branches=rng.choice((0, 0, 2)),
    )
    for _ in range(300):
        if rng.random() < 0.25:
            sim.add_any()
        if sim.live and rng.random() < 0.04:
            sim.abort(rng.choice(list(sim.live.values())))
        sim.step()
    sim.drain()


class AnyOrder(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order, on any small pool."""

    @initialize(
        blocks=st.integers(1, 8),
        caching=st.booleans(),
        sequences=st.integers(1, 5),
        rows=st.integers(1, 12),
        window=st.integers(0, 6),
        branches=st.integers(0, 2),
        seed=st.integers(0, 2**16),
    )
    def start(self, *, seed: int, **options: Any) -> None:
        self.sim = Simulation(random.Random(seed), **options)

    @rule()
    def add(self) -> None:
        self.sim.add_any()

    @rule()
    def step(self) -> None:
        self.sim.step()

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.sim.abort(self.sim.live[data.draw(st.sampled_from(sorted(self.sim.live)))])

    @invariant()
    def whole(self) -> None:
        self.sim.check()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(derandomize=True, max_examples=60, stateful_step_count=40, deadline=None, database=None)
