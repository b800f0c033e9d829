"""Promises of a contest: every engine decodes everything, beside the others, and only steps count in which all places decode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hispec_ray import LLM, SamplingParams, Settings
from hispec_ray.abacus.problems import stream
from hispec_ray.config import SpeculationSettings
from hispec_ray.tuning import contest as module
from hispec_ray.tuning.contest import contest, engine_for
from hispec_ray.tuning.planner import PLAIN

TOKENS = 24


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(Settings.model_validate({"model": {"path": "abacus", "threads": 1}, "cache": {"blocks": 64}}))


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.encode(problem.question) for problem in itertools.islice(stream(5, "held_out"), 6)]


@pytest.mark.parametrize("batch", [1, 3])
def test_all_write_everything_and_full_places_count(batch: int, llm: LLM, prompts: list[tuple[int, ...]], monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_SLICE", 0.0)  # one step each
    params = [SamplingParams(max_tokens=TOKENS + number, seed=0, ignore_eos=True) for number in range(len(prompts))]
    expected = [completion.choices[0].token_ids for completion in llm.generate(prompts, params)]
    guessing = SpeculationSettings(method="single", draft_tokens=4, pace="fixed")
    longest = max(map(len, prompts)) + TOKENS + len(prompts)
    engines = [engine_for(llm.settings, plan, batch, longest, llm) for plan in (PLAIN, guessing)]
    steps: list[int] = []
    for number, engine in enumerate(engines):
        step = engine.engine.step
        monkeypatch.setattr(engine.engine, "step", lambda step=step, number=number: (steps.append(number), step())[1])
    ended: list[int] = []
    plain, guessed = contest(engines, prompts, params, ended.append)
    assert plain.answers == guessed.answers == expected
    assert sum(ended) == 2 * len(prompts)
    first = min(steps.count(0), steps.count(1))
    assert {0, 1} <= set(steps[: first // 2]), "beside each other"
    plainly = [(number, rows) for number, rows, *_ in plain.passes]
    assert plainly == [(0, batch), (1, batch)] * (plain.tokens // batch), "the passes of the steps that count: all layers, the head"
    assert 0 < sum(seconds * times for *_, seconds, times in guessed.passes) < guessed.seconds
    if batch == 1:
        assert plain.tokens == guessed.tokens == sum(map(len, expected)) - len(prompts), "all but each one's first"
    else:  # three begin and write on alone until the first of them ends, then each of the others comes in for one
        assert plain.tokens % batch == 0
        assert TOKENS - 2 <= plain.tokens / batch <= 2 * TOKENS
    assert plain.speed == plain.tokens / plain.seconds > 0


def test_a_step_in_which_a_place_is_empty_counts_for_nothing(llm: LLM, prompts: list[tuple[int, ...]]) -> None:
    engines = [engine_for(llm.settings, PLAIN, 2, 200, llm)]
    params = [SamplingParams(max_tokens=2, seed=0, ignore_eos=True), SamplingParams(max_tokens=40, seed=0, ignore_eos=True)]
    (found,) = contest(engines, prompts[:2], params)
    assert [len(answer) for answer in found.answers] == [2, 40]
    assert found.tokens <= 2
