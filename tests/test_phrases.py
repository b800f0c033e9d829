"""Promises of phrases: counted as the texts say, read back as they were written, and one line for what cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shared import Run

from hispec_ray import LLM, SamplingParams
from hispec_ray.config import DEFAULT_MODEL, Settings
from hispec_ray.phrases import count
from hispec_ray.speculation.phrases import AFTER, LENGTHS, VOCABULARY, load_phrases, name_of
from hispec_ray.training.data import Line

OWN = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2, 6]


def counted(lines: list[Line], most: int = 1000, vocabulary: int = 100) -> dict[str, list[list[int]]]:
    return {name: sorted(tensor.tolist()) for name, tensor in count(lines, most, vocabulary).items()}


def test_what_follows_most_often_is_kept_where_it_does_so_more_than_once() -> None:
    found = counted([Line(tuple(OWN), 0)])
    assert found[name_of(2)] == [[1, 2, 3], [2, 3, 4], [3, 4, 1], [4, 1, 2]]
    assert found[name_of(3)] == [[1, 2, 3, 4], [2, 3, 4, 1], [3, 4, 1, 2]]
    assert found[name_of(6)] == []
    assert found[AFTER] == [[1, 2, 2], [2, 3, 6], [3, 4, 5], [4, 1, 1], [5, 1, 1]]


def test_only_what_is_to_be_learned_is_counted_and_a_prompt_may_come_before_it() -> None:
    found = counted([Line((8, 9, 7, 7), 2), Line((8, 9, 7, 6), 2), Line((8,), 0)])
    assert found[name_of(2)] == [[8, 9, 7]]
    assert found[AFTER] == [[7, 6, 7], [9, 7, 7]]


def test_the_most_frequent_are_kept_where_not_all_may() -> None:
    often = [Line((1, 2, 3), 0)] * 5 + [Line((4, 5, 6), 0)] * 3 + [Line((7, 8, 9), 0)] * 3
    assert counted(often, most=3)[name_of(2)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert counted(often, most=2)[name_of(2)] == [[1, 2, 3], [4, 5, 6]]
    assert counted([Line((1, 2, 3, 4), 0)] * 2, most=2) | {AFTER: []} == {
        AFTER: [], name_of(2): [[1, 2, 3], [2, 3, 4]], name_of(3): [], name_of(4): [], name_of(6): [],
    }, "of equally frequent ones the shorter"  # fmt: skip


def test_rare_continuations_are_left_out() -> None:
    lines = [Line((1, 2, token), 0) for token in range(3, 10) for _ in range(2)]
    assert counted(lines)[name_of(2)] == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(count([Line(tuple(OWN), 0)], 1000, 2**17), path := tmp_path / "phrases.safetensors", {VOCABULARY: "7"})
    return path


def test_a_file_is_read_as_it_was_written_and_again_where_it_changes(file: Path) -> None:
    phrases = load_phrases(str(file), 7)
    assert [1, 2, 3] in phrases.grams[2].tolist()
    assert [2, 3, 6] in phrases.after.tolist()
    assert load_phrases(str(file)) is phrases, "an engine that starts anew shares them"
    save_file(count([Line((1, 2, 6, 1, 2, 6), 0)], 1000, 100), file, {VOCABULARY: "100"})
    os.utime(file, ns=(1, 1))
    assert [1, 2, 6] in load_phrases(str(file)).grams[2].tolist()


def test_what_is_no_file_of_phrases_is_one_line(file: Path, tmp_path: Path) -> None:
    tensors = count([Line(tuple(OWN), 0)], 1000, 100)
    broken = {
        "it has no after": {name: tensor for name, tensor in tensors.items() if name != AFTER},
        "grams.2 is torch.float32": tensors | {name_of(2): torch.ones(2, 3)},
        "in 4 columns": tensors | {name_of(3): torch.ones(2, 5, dtype=torch.int32)},
        "after has ids outside 0 to 6": tensors | {AFTER: torch.full((1, 3), -1, dtype=torch.int32)},
        "after has ids outside 0 to 6$": tensors | {AFTER: torch.full((1, 3), 7, dtype=torch.int32)},
    }
    for words, content in broken.items():
        save_file(dict(content), path := tmp_path / f"{len(words)}.safetensors", {VOCABULARY: "7"})
        with pytest.raises(ValueError, match=words) as caught:
            load_phrases(str(path))
        assert str(caught.value).startswith(f"speculation.phrases is '{path}', which is no file of phrases: ")
    save_file(tensors, tmp_path / "unnamed.safetensors")
    with pytest.raises(ValueError, match="its vocabulary is ''; it must be a number of ids"):
        load_phrases(str(tmp_path / "unnamed.safetensors"))
    with pytest.raises(ValueError, match="made for another model: one with 7 ids; this one has 6"):
        load_phrases(str(file), 6)
    (tmp_path / "text").write_text("not tensors")
    for path in (tmp_path / "none", tmp_path / "text", tmp_path, "~nobody/none"):
        with pytest.raises(ValueError, match=r"^speculation\.phrases is '[^\n]*$"):
            load_phrases(str(path))


def test_those_of_the_package_fit_its_model() -> None:
    phrases = load_phrases(DEFAULT_MODEL, 49152)
    assert sum(map(len, phrases.grams.values())) > 100_000
    assert all(phrases.grams[length].shape[1] == length + 1 for length in LENGTHS)


def test_texts_become_a_file_that_an_engine_looks_up_in(tiny_folder: Path, tmp_path: Path, hispec: Run) -> None:
    """Of the model's own greedy answers: the second time it answers, a lookup knows them, and the text is the same."""
    tree = {"model": {"path": str(tiny_folder), "dtype": "float32", "threads": 1}, "cache": {"prefix_caching": False}}
    prompts, params = ["ab cd", "the tt"], SamplingParams(temperature=0, max_tokens=40)
    plain = LLM(Settings.model_validate(tree | {"speculation": {"method": "plain"}}))
    asked = [plain.encode(prompt) for prompt in prompts]
    answers = [done.choices[0].token_ids for done in plain.generate(asked, params)]
    own = tmp_path / "own.jsonl"
    lines = [json.dumps({"ids": [*prompt, *answer], "learn_from": len(prompt)}) for prompt, answer in zip(asked, answers, strict=True)]
    own.write_text("\n".join(lines * 2))
    out = tmp_path / "phrases.safetensors"
    status, printed, _ = hispec("phrases", "--model", tiny_folder, "--data", own, "--out", out)
    assert status == 0
    assert printed.endswith(f" n-grams of {2 * sum(map(len, answers))} tokens in {out}\n")
    assert not list(tmp_path.glob("*.writing"))
    speculation = {"method": "single", "drafter": "lookup", "draft_tokens": 4, "pace": "fixed", "lookup_confidence": 0.3}
    passes = {}
    for phrases in (None, str(out)):
        llm = LLM(Settings.model_validate(tree | {"speculation": {**speculation, "phrases": phrases}}))
        (done,) = llm.generate([asked[0]], params)
        assert done.choices[0].token_ids == answers[0]
        passes[phrases] = llm.engine.counts[-1].passes
    assert passes[str(out)] < 0.8 * passes[None]


def test_what_cannot_be_counted_or_written_is_one_line(tiny_folder: Path, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "own.jsonl").write_text('{"ids": [1, 2, 3, 2, 3, 2, 3]}\n')
    (tmp_path / "wrong.jsonl").write_text('{"ids": [1, 1000000]}\n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "once.jsonl").write_text('{"ids": [1, 2, 3, 4]}\n')
    os.mkfifo(tmp_path / "pipe")
    for data, out, words in (
        ("none.jsonl", "out", "none.jsonl does not exist"),
        ("wrong.jsonl", "out", "wrong.jsonl, line 1: ids has 1000000"),
        ("empty.txt", "out", "no text to learn from"),
        ("once.jsonl", "out", "once.jsonl: nothing is said twice there"),
        ("own.jsonl", "nowhere/out", "nowhere/out'; it must be a file in a folder that exists"),
        ("own.jsonl", ".", "it must be a file in a folder that exists"),
        ("own.jsonl", "own.jsonl", "own.jsonl', which is data; name another file"),
        ("own.jsonl", "pipe", "it must be a file in a folder that exists"),
    ):
        status, printed, errors = hispec("phrases", "--model", tiny_folder, "--data", tmp_path / data, "--out", tmp_path / out)
        assert (status, printed, len(errors.splitlines())) == (2, "", 1), errors
        assert words in errors
    tree = {"model": {"path": str(tiny_folder)}, "speculation": {"drafter": "lookup", "phrases": str(tmp_path / "none")}}
    with pytest.raises(ValueError, match=r"speculation\.phrases is"):
        LLM(Settings.model_validate(tree))
