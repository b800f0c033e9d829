"""Several ranks decode one stage: the text of one process, the same from run to run, whatever guesses and whatever is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from shard.crew import Crew
from shared import settings_of

from hispec_ray import LLM, SamplingParams
from hispec_ray.grammar import json_schema
from hispec_ray.model.weights import open_model

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


def with_ranks(folder: Path, ranks: int, *method: Any, kernels: str = "auto", **others: Any) -> LLM:
    settings = settings_of({"path": str(folder), "dtype": "float32", "threads": 1, "kernels": kernels}, *method, **others)
    source = open_model(str(folder))
    with patch("hispec_ray.engine.engine.InlineExecutor", lambda *_: Crew(settings, source, ranks)):
        return LLM(settings)


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[tuple[int, ...]]:
    return texts(LLM(settings_of({"path": str(tiny_folder), "dtype": "float32", "threads": 1})))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_of_one_process(method: str, ranks: int, tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    assert texts(with_ranks(tiny_folder, ranks, *METHODS[method])) == expected


def test_the_pace_takes_every_rank_along(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    """Ranks measure different times and go by the same ones; `Crew` holds their tokens against each other in every round."""
    llm = with_ranks(tiny_folder, 2, "hispec", 1, 3, 2, 4, pace="auto", branches=2)
    assert texts(llm) == expected
    levels = [result.levels for result in llm.engine.executor.results]
    assert levels[0] == levels[1], "they did the same work"


def test_trained_exits_with_layers_of_their_own(tiny_folder: Path, block_heads: Path, expected: list[tuple[int, ...]]) -> None:
    assert texts(with_ranks(tiny_folder, 2, "hispec", 2, 4, 3, 6, heads=block_heads)) == expected


def test_the_torch_decoder(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    assert texts(with_ranks(tiny_folder, 2, "hispec", 1, 3, 2, 4, kernels="torch")) == expected


def test_few_blocks_and_preemption(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    llm = with_ranks(tiny_folder, 2, "hispec", 1, 3, 2, 4, blocks=12)
    assert texts(llm) == expected
    assert llm.engine.scheduler.preemptions > 0
