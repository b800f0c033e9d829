"""Promises of the lookup: it says what followed the same words, when it is confident, and learns when to be."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hispec_ray.core.plan import SequencePlan, StepPlan
from hispec_ray.speculation.drafters import MOST_NEW, Lookup, LookupDrafter, grams_of
from hispec_ray.speculation.native_lookup import NativeLookup
from hispec_ray.speculation.phrases import LENGTHS, Phrases, packed


def plan_of(id: int, tokens: Sequence[int], start: int, history: Sequence[int] | None, ended: Sequence[int] = ()) -> StepPlan:
    told = None if history is None else tuple(history)
    return StepPlan((SequencePlan(id, tuple(tokens), start, (0,), True, 4, 0.0, 0, told),), tuple(ended))


def read(drafter: Lookup, id: int, tokens: Sequence[int]) -> None:
    drafter.begin(plan_of(id, tokens, 0, ()))


def write(drafter: Lookup, id: int, tokens: Sequence[int]) -> None:
    drafter.committed(id, tokens, [0] * len(tokens))


def said(drafter: LookupDrafter, id: int, tentative: Sequence[int] = (), most: int = 4, least: float = 0.01) -> list[int]:
    return [guess.token for guess in drafter.propose(id, tentative, most, least)]


def phrases_of(follows: Mapping[tuple[int, ...], int], after: Mapping[int, tuple[int, int]]) -> Phrases:
    grams: dict[int, list[tuple[int, ...]]] = {length: [] for length in LENGTHS}
    for gram, token in follows.items():
        grams[len(gram)].append((*gram, token))
    arrays = {length: np.array(rows, dtype=np.int32).reshape(-1, length + 1) for length, rows in grams.items()}
    return Phrases(arrays, np.array([(token, *pair) for token, pair in after.items()], dtype=np.int32).reshape(-1, 3))


def packed_all(*tokens: int) -> bytes:
    return b"".join(map(packed, tokens))


def candidates(drafter: LookupDrafter, id: int, *last: int) -> dict[int, int]:
    tail = packed_all(*last)
    return drafter._candidates(drafter._texts[id], tail, grams_of(tail))


def test_a_text_that_repeats_is_foretold() -> None:
    drafter = LookupDrafter()
    read(drafter, 1, [1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert said(drafter, 1) == [4, 5, 6, 1]
    assert said(drafter, 1, most=2) == [4, 5]
    assert said(drafter, 1, [4, 5]) == [6, 1, 2, 3], "tentative tokens are part of the text"
    assert said(drafter, 1, [9]) == [], "nothing ever followed a 9"


def test_nothing_follows_an_end() -> None:
    drafter = LookupDrafter()
    (plan,) = plan_of(1, [1, 2, 3, 4, 5, 6, 1, 2, 3], 0, ()).sequences
    drafter.begin(StepPlan((replace(plan, ends=frozenset((5, 9))),)))
    assert said(drafter, 1) == [4, 5]


def test_what_follows_last_counts() -> None:
    drafter = LookupDrafter()
    read(drafter, 1, [1, 2, 3, 1, 2, 4, 0, 1, 2])
    assert said(drafter, 1, most=1) == [4]


def test_other_texts_are_remembered_and_its_own_prompt_goes_before() -> None:
    drafter = LookupDrafter()
    read(drafter, 1, [1])
    said(drafter, 1)
    write(drafter, 1, [2, 3, 4, 5])
    drafter.begin(plan_of(4, [1], 0, (), ended=[1]))
    read(drafter, 2, [2, 3])
    assert said(drafter, 2, most=2) == [4, 5]
    drafter.begin(plan_of(3, [7, 2, 3, 8, 9, 2, 3], 0, (), ended=[2, 4]))
    assert said(drafter, 3, most=1) == [8]
    assert 1 not in drafter._texts


def test_prompts_of_others_are_not_shown_around() -> None:
    """What stands in a prompt is looked up for that prompt's own sequence alone: only what the model wrote is shared."""
    drafter = LookupDrafter()
    read(drafter, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    read(drafter, 2, [1, 2, 3])
    assert said(drafter, 2) == []


def test_a_history_that_the_cache_spared_is_known_too() -> None:
    drafter = LookupDrafter()
    drafter.begin(plan_of(1, [1, 2], 4, [1, 2, 3, 4]))
    assert said(drafter, 1, most=2) == [3, 4]
    drafter.begin(plan_of(1, [1, 2, 9], 4, [1, 2, 3, 4]))  # preempted, and admitted again
    said(drafter, 1, most=2)
    assert (drafter._news[1].length, drafter._texts[1].tail) == (7, packed_all(2, 3, 4, 1, 2, 9))


def test_a_source_that_fails_falls_silent_and_comes_back() -> None:
    """Confidence is earned at every token, guessed or not."""
    drafter = LookupDrafter()
    period = [1, 2, 3, 4, 5]
    read(drafter, 1, period * 2)
    write(drafter, 1, period * 6)
    assert said(drafter, 1, least=0.5) == [1, 2, 3, 4]
    dice = random.Random(0)
    write(drafter, 1, [dice.randrange(1, 6) for _ in range(200)])
    assert said(drafter, 1, [1, 2, 3], least=0.5) == []
    write(drafter, 1, period * 12)
    assert said(drafter, 1, least=0.5)[:2] == [1, 2]


def test_the_full_depths_second_choice_is_the_second_candidate() -> None:
    drafter = LookupDrafter()
    read(drafter, 1, [5, 6])
    drafter.committed(1, [7, 5, 6], [8, 9, 9])
    (guess,) = drafter.propose(1, [], 1, 0.05)
    assert (guess.token, guess.second) == (7, 8)


def test_memory_is_bounded() -> None:
    drafter = LookupDrafter(entries=100)
    read(drafter, 1, [0])
    write(drafter, 1, list(range(1, 2000)))
    assert not drafter._follows, "nobody has asked yet"
    said(drafter, 1)
    assert len(drafter._follows) == 100
    assert packed_all(*range(2000 - 1 - LENGTHS[-1], 2000 - 1)) in drafter._follows, "the oldest go first"


def test_phrases_speak_where_no_text_does_and_give_way_to_this_process() -> None:
    drafter = LookupDrafter(phrases_of({(1, 2): 3, (2, 3): 4}, {4: (5, 6)}))
    read(drafter, 1, [1, 2])
    assert said(drafter, 1, least=0.001) == [3, 4, 5]
    (guess,) = drafter.propose(1, [3, 4], 1, 0.01)
    assert (guess.token, guess.second) == (5, 6)
    write(drafter, 1, [9, 1, 2])
    assert said(drafter, 1, most=1) == [9]
    write(drafter, 1, [8, 5, 2, 7])
    drafter.begin(plan_of(2, [7, 1, 2], 0, (), ended=[1]))
    assert 8 in said(drafter, 2, most=1), "what this process wrote goes before a file"
    assert 3 not in candidates(drafter, 2, 1, 2)


def test_a_token_that_only_one_followed_is_its_first_choice() -> None:
    drafter = LookupDrafter(phrases_of({}, {4: (5, 5)}))
    read(drafter, 1, [4])
    first = candidates(drafter, 1, 4)
    drafter = LookupDrafter(phrases_of({}, {4: (5, 6)}))
    read(drafter, 1, [4])
    assert first[5] == candidates(drafter, 1, 4)[5]


def both(phrases: Phrases, entries: int) -> tuple[LookupDrafter, NativeLookup]:
    return LookupDrafter(phrases, entries), NativeLookup(phrases, entries)


@pytest.mark.parametrize("seed", range(4))
def test_the_native_lookup_makes_the_same_guesses(seed: int) -> None:
    """Over texts that begin, are replayed, go unasked for long, and end; of few words, so that everything is met again."""
    dice = random.Random(seed)
    words = (3, 8, 30, 5)[seed]
    grams = {tuple(dice.randrange(words) for _ in range(length)): dice.randrange(words) for length in LENGTHS for _ in range(20)}
    phrases = phrases_of(grams, {token: (dice.randrange(words), dice.randrange(words)) for token in range(0, words, 2)})
    pair = both(phrases, (50, 1000, 300, 10)[seed])
    texts: dict[int, list[int]] = {}
    made = 0
    for _ in range(1500):
        act = dice.random()
        if not texts or act < 0.05:
            ended = [id for id in texts if dice.random() < 0.3]
            id = max(texts, default=0) + 1
            tokens = [dice.randrange(words) for _ in range(dice.randint(1, 40))]
            start = dice.randrange(len(tokens))
            (sequence,) = plan_of(id, tokens[start:], start, tokens[:start]).sequences
            plan = StepPlan((replace(sequence, ends=frozenset((words - 1,))),), tuple(ended))
            for gone in ended:
                del texts[gone]
            texts[id] = tokens
        elif act < 0.07:  # preempted, and admitted again
            id = dice.choice(list(texts))
            plan = plan_of(id, texts[id], 0, ())
        else:
            plan = StepPlan(())
        for drafter in pair:
            drafter.begin(plan)
        id = dice.choice(list(texts))
        tentative = [dice.randrange(words) for _ in range(dice.choice((0, 0, 1, 3, 9)))]
        asked = id, tentative, dice.choice((0, 1, 4, 12)), dice.choice((0.0, 0.05, 0.3, 0.6)), dice.choice((0.0, 0.2))
        if dice.random() < 0.8:
            python, native = (drafter.propose(*asked) for drafter in pair)
            assert native == python
            made += len(python)
        tokens = [dice.randrange(words) if dice.random() < 0.4 else len(texts[id]) % words]
        tokens *= dice.choice((1, 1, 2, 5, MOST_NEW + 3))
        seconds = [dice.randrange(words) for _ in tokens]
        texts[id] += tokens
        for drafter in pair:
            drafter.committed(id, tokens, seconds)
    assert made > 1000


def test_a_process_may_end_while_a_thread_looks_up() -> None:
    script = Path(__file__).with_name("exit_while_looking_up.py")
    assert [subprocess.run([sys.executable, script], check=False, timeout=60).returncode for _ in range(2)] == [0, 0]
