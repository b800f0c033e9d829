"""Several ranks decode one stage: the text of one process, the same from run to run, whatever guesses and whatever is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from shard.crew import Crew
from shared import settings_of

from hispec_ray import LLM, SamplingParams
from hispec_ray.grammar import json_schema
from hispec_ray.model.weights import open_model
from hispec_ray.speculation.ahead import Ahead

PROMPTS = [list(range(3 + i, 40 + 7 * i)) for i in range(5)]
ASKED = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, top_p=0.8, top_k=40, max_tokens=30, frequency_penalty=0.5, logit_bias={5: 3.0}),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.7, seed=3, max_tokens=25, grammar=json_schema({"type": "array", "items": {"type": "integer"}})),
]
METHODS: dict[str, tuple[Any, ...]] = {
    "plain": (), "single": ("single", 2, None, 4), "hispec": ("hispec", 1, 3, 2, 4), "wide": ("hispec", 2, 2, 3, 8),
}  # fmt: skip


def texts(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(done.choices[0].token_ids) for done in llm.generate(PROMPTS, ASKED)]


def with_crew(
    folder: Path, ranks: Sequence[int], *method: Any, layers: Sequence[int] = (), lanes: int = 1, kernels: str = "auto", **others: Any
) -> LLM:
    settings = settings_of({"path": str(folder), "dtype": "float32", "threads": 1, "kernels": kernels}, *method, **others)
    source = open_model(str(folder))
    with patch("hispec_ray.engine.engine.InlineExecutor", lambda *_: Crew(settings, source, *ranks, layers=layers, lanes=lanes)):
        return LLM(settings)


def crew_of(llm: LLM) -> Crew:
    assert isinstance(llm.engine.executor, Crew)
    return llm.engine.executor


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[tuple[int, ...]]:
    return texts(LLM(settings_of({"path": str(tiny_folder), "dtype": "float32", "threads": 1})))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_of_one_process(method: str, ranks: int, tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    assert texts(with_crew(tiny_folder, [ranks], *METHODS[method])) == expected


def test_the_pace_takes_every_rank_along(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    """Ranks measure different times and go by the same ones; `Crew` holds their tokens against each other in every round."""
    llm = with_crew(tiny_folder, [2], "hispec", 1, 3, 2, 4, pace="auto", branches=2)
    assert texts(llm) == expected
    one, other = (result.levels for result in crew_of(llm).results[0])
    assert one == other, "they did the same work"


def test_trained_exits_with_layers_of_their_own(tiny_folder: Path, block_heads: Path, expected: list[tuple[int, ...]]) -> None:
    assert texts(with_crew(tiny_folder, [2], "hispec", 2, 4, 3, 6, heads=block_heads)) == expected


def test_the_torch_decoder(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    assert texts(with_crew(tiny_folder, [2], "hispec", 1, 3, 2, 4, kernels="torch")) == expected


def test_few_blocks_and_preemption(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    llm = with_crew(tiny_folder, [2], "hispec", 1, 3, 2, 4, blocks=12)
    assert texts(llm) == expected
    assert llm.engine.scheduler.preemptions > 0


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "two stages": ((1, 1), (3, 5)), "three stages": ((1, 1, 1), (4, 2, 2)), "two ranks, two stages": ((2, 2), (5, 3)),
    "two ranks, then one": ((2, 1), (3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_stages_write_the_text_of_one_process(
    method: str, layout: str, lanes: int, tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    ranks, layers = LAYOUTS[layout]
    llm = with_crew(tiny_folder, ranks, *METHODS[method], layers=layers, lanes=lanes)
    assert texts(llm) == expected
    assert crew_of(llm).most_in_flight == lanes
    assert llm.engine.pool.used == 0


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stages_with_branches_a_lookup_and_the_pace(lanes: int, tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    for layout in ("two stages", "three stages"):
        ranks, layers = LAYOUTS[layout]
        for pace in ("fixed", "auto"):
            llm = with_crew(tiny_folder, ranks, "hispec", 1, 3, 2, 5, layers=layers, lanes=lanes, branches=3, pace=pace)
            assert texts(llm) == expected


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stages_short_of_blocks(lanes: int, tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    ranks, layers = LAYOUTS["two stages"]
    llm = with_crew(tiny_folder, ranks, "hispec", 1, 3, 2, 4, layers=layers, lanes=lanes, blocks=12)
    assert texts(llm) == expected
    assert llm.engine.scheduler.preemptions > 0
    llm.engine.scheduler.check_integrity()


def test_stages_do_the_work_of_one_process(tiny_folder: Path) -> None:
    """Levels, rows and passes are those of one process: no layer runs twice because others have it."""
    whole = LLM(settings_of({"path": str(tiny_folder), "dtype": "float32", "threads": 1}, "hispec", 1, 3, 2, 4))
    ranks, layers = LAYOUTS["three stages"]
    parts = with_crew(tiny_folder, ranks, "hispec", 1, 3, 2, 4, layers=layers)
    assert texts(whole) == texts(parts)
    assert whole.engine.counts == parts.engine.counts


@pytest.mark.parametrize("method", ["single", "hispec", "wide"])
def test_a_sequence_alone_is_guessed_on_while_the_others_look(method: str, tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    """Where all of a window comes true the next round begins with what was guessed ahead; the text is the same in any case."""
    ranks, layers = LAYOUTS["two stages"]
    given: list[int] = []
    give = Ahead._give

    def counted(self: Ahead, a: Any, s: Any, state: Any) -> None:
        give(self, a, s, state)
        given.append(len(s.tokens) - s.first)

    with patch.object(Ahead, "_give", counted):
        llm = with_crew(tiny_folder, ranks, *METHODS[method], layers=layers, lanes=2)
        for prompt, params, text in zip(PROMPTS, ASKED, expected, strict=True):
            assert tuple(llm.generate([prompt], [params])[0].choices[0].token_ids) == text
    assert given
    assert max(given) > 0, "guesses were of use"
    llm.engine.scheduler.check_integrity()
    assert llm.engine.pool.used == 0
