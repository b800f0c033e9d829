"""Promises of `hispec tune`: a table, a block that a deployment takes, a figure; and one line for what cannot be used."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from hispec_ray.abacus.problems import stream
from hispec_ray.commands.tuning import _doubt
from hispec_ray.config import Settings, SpeculationSettings
from hispec_ray.tuning.costs import Costs
from hispec_ray.tuning.planner import PLAIN, Plan, describe
from hispec_ray.tuning.tune import Tuning


def test_tune_writes_a_block_and_a_figure(hispec: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "problems.txt"
    prompts.write_text("".join(f"{problem.question}\n" for problem in itertools.islice(stream(4, "held_out"), 4)))
    out = tmp_path / "tuned"
    options = ["--count", "2", "--max-tokens", "24", "--checks", "1", "--runs", "1", "--threads", "1"]
    status, printed, _ = hispec("tune", "--model", "abacus", "--prompts", prompts, "--out", out, *options)
    assert status == 0
    assert "plain" in printed
    block = yaml.safe_load((out / "tune.yaml").read_text())
    chosen = Settings.model_validate(block).speculation
    assert describe(chosen) in printed, "the block is one of the plans that were shown"
    assert (out / "tune.yaml").read_text() in printed
    assert (out / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_used_is_one_line(hispec: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "problems.txt"
    prompts.write_text("What is 1 + 1?\n")
    calls = tmp_path / "calls.jsonl"
    calls.write_text('{"messages": [{"role": "user", "content": "a", "tool_calls": 5}]}\n')
    for options, words in (
        (("--prompts", tmp_path / "none.txt"), "none.txt"),
        (("--prompts", prompts, "--heads", tmp_path / "none.safetensors"), "speculation.exits.heads is"),
        (("--prompts", calls), f"{calls}, line 1: messages has calls of tools that are not written as OpenAI writes them"),
        (("--prompts", prompts, "--dtype", "float8"), "model.dtype is 'float8'"),
        (("--prompts", prompts, "--max-tokens", "100000"), "max_tokens is 100000; it must be from 1 to "),
    ):
        status, _, errors = hispec("tune", "--model", "abacus", *options)
        assert status == 2
        assert words in errors
        assert len(errors.strip().splitlines()) == 1


def test_a_file_for_out_is_refused_before_anything_is_tuned(hispec: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "problems.txt"
    prompts.write_text("What is 1 + 1?\n")
    status, printed, errors = hispec("tune", "--model", "abacus", "--prompts", prompts, "--out", prompts)
    assert (status, printed, errors) == (2, "", f"hispec: error: out is '{prompts}', which is a file; it must be a folder\n")


@pytest.mark.parametrize(("turns", "busy"), [((1.45, 1.5, 1.55), False), ((1.1, 1.5, 1.9), True)])
def test_a_busy_machine_is_named(turns: tuple[float, ...], busy: bool) -> None:
    guesses = Plan(SpeculationSettings(method="single", drafter="lookup", draft_tokens=4), 100.0, 150.0, turns)
    checked = [guesses, Plan(PLAIN, 100.0, 100.0, (1.0, 1.0, 1.0))]
    said = _doubt(Tuning([], {}, Costs(), 16, checked, checked, guesses.speculation))
    assert (said is not None) == busy
    if said:
        assert "single lookup 4 ran at 1.10 to 1.90 times plain decoding's speed" in said
