"""`hispec distill`: the model's own answers, the same whether written at once or in several goes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from shared import Run

from hispec_ray import LLM, SamplingParams
from hispec_ray.config import Settings
from hispec_ray.model.weights import open_model

Words = list[object]


@pytest.fixture
def words(tiny_folder: Path, tmp_path: Path) -> Words:
    """A command that has 3 prompts answered until 300 tokens are there."""
    (tmp_path / "prompts.txt").write_text("ab cd\n\nthe tt\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "zz\\nzz", "id": 3}\n')
    words: Words = ["distill", "--model", tiny_folder, "--prompts", tmp_path / "prompts.txt", "--prompts", tmp_path / "prompts.jsonl"]
    return [*words, "--out", tmp_path / "own.jsonl", "--tokens", 300, "--max-tokens", 20, "--dtype", "float32", "--threads", 1]


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]


def test_every_line_is_a_prompt_and_the_models_answer(words: Words, tiny_folder: Path, tmp_path: Path, hispec: Run) -> None:
    status, out, _ = hispec(*words, "--temperature", 0)
    written = lines(tmp_path)
    count = sum(len(line["ids"]) - line["learn_from"] for line in written)
    assert (status, out) == (0, f"{count} tokens in {tmp_path / 'own.jsonl'}\n")
    llm = LLM(Settings.model_validate({"model": {"path": str(tiny_folder), "dtype": "float32", "threads": 1}}))
    prompts = [llm.encode(prompt) for prompt in ("ab cd", "the tt", "zz\nzz")]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    assert written == [
        {"ids": [*prompt, *answer.choices[0].token_ids], "learn_from": len(prompt)} for prompt, answer in zip(prompts, answers, strict=True)
    ]


def test_prompts_come_again_with_other_seeds_until_there_is_enough(words: Words, tmp_path: Path, hispec: Run) -> None:
    assert hispec(*words)[0] == 0
    written = lines(tmp_path)
    assert sum(len(line["ids"]) - line["learn_from"] for line in written) >= 300
    assert len({tuple(line["ids"]) for line in written}) > 6  # of 3 prompts
    hispec(*words, "--seed", 1, "--out", tmp_path / "other.jsonl")
    assert (tmp_path / "other.jsonl").read_text() != (tmp_path / "own.jsonl").read_text()


def test_greedy_answers_come_once(words: Words, tmp_path: Path, hispec: Run) -> None:
    for _ in range(2):
        assert hispec(*words, "--temperature", 0)[0] == 0
        assert len(lines(tmp_path)) == 3


def test_what_was_stopped_goes_on_as_if_it_never_was(words: Words, tmp_path: Path, hispec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hispec_ray.distill.BATCHES", (16, 16))
    words[words.index("--tokens") + 1] = 1000
    hispec(*words)
    whole = (tmp_path / "own.jsonl").read_bytes()
    (tmp_path / "own.jsonl").unlink()

    answered = LLM.generate

    def generate(llm: LLM, *request: Any) -> Any:
        if (tmp_path / "own.jsonl").stat().st_size:
            raise KeyboardInterrupt
        return answered(llm, *request)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", generate)
        status, _, err = hispec(*words)
    assert status == 130
    assert err.endswith(f"stopped; the same command goes on after the answers in {tmp_path / 'own.jsonl'}\n")
    part = (tmp_path / "own.jsonl").read_bytes()
    assert whole.startswith(part)
    assert 0 < len(part) < len(whole)
    (tmp_path / "own.jsonl").write_bytes(part + whole[len(part) :][:10])  # as a process leaves it that is killed while it writes
    assert hispec(*words)[0] == 0
    assert (tmp_path / "own.jsonl").read_bytes() == whole


@pytest.mark.parametrize(("lines_kept", "bytes_kept"), [(1, 1), (5, 9), (12, 40), (-1, -1)])
def test_a_file_torn_anywhere_becomes_the_whole_one(lines_kept: int, bytes_kept: int, words: Words, tmp_path: Path, hispec: Run) -> None:
    hispec(*words)
    whole = (tmp_path / "own.jsonl").read_bytes()
    tokens = [len(line["ids"]) - line["learn_from"] for line in lines(tmp_path)]
    assert sum(tokens[:-1]) < 300 <= sum(tokens), "the line that reaches the total is the last"
    split = whole.splitlines(keepends=True)
    (tmp_path / "own.jsonl").write_bytes(b"".join(split[:lines_kept]) + split[lines_kept][:bytes_kept])
    assert hispec(*words)[0] == 0
    assert (tmp_path / "own.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"notes of mine", b"[1]\nnotes", b'{"ids": [1, 2, 3], "learn_from": 3}', b'{"ids": "', b"PK\x03\x04\n\xff", b"[" * 99999]
)
def test_a_file_of_something_else_stays_as_it_is(content: bytes, words: Words, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "own.jsonl").write_bytes(content)
    status, out, err = hispec(*words)
    assert (status, out) == (2, "")
    assert err == f"hispec: error: {tmp_path / 'own.jsonl'}, line 1: no answer to prompt 1; name another file with --out\n"
    assert (tmp_path / "own.jsonl").read_bytes() == content
    assert not (tmp_path / "own.jsonl.settings.json").exists()


@pytest.mark.parametrize("name", ["prompts.jsonl", "linked.jsonl"])
def test_prompts_are_never_written_over(name: str, words: Words, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "prompts.jsonl")
    before = (tmp_path / "prompts.jsonl").read_bytes()
    status, out, err = hispec(*words, "--out", tmp_path / name)
    assert (status, out) == (2, "")
    assert err == f"hispec: error: out is '{tmp_path / name}', which is one of the prompts; name another file\n"
    assert (tmp_path / "prompts.jsonl").read_bytes() == before


def test_answers_do_not_become_prompts_of_the_next_run(words: Words, tmp_path: Path, hispec: Run) -> None:
    status, _, err = hispec(*words, "--prompts", tmp_path)
    assert status == 2
    assert err == f"hispec: error: out is '{tmp_path / 'own.jsonl'}', which is one of the prompts; name another file\n"


@pytest.mark.parametrize(
    ("option", "value", "there", "here"),
    [
        ("--seed", 9, "seed 0", "9"),
        ("--temperature", 0.5, "temperature 0.7", "0.5"),
        ("--max-tokens", 21, "max_tokens 20", "21"),
        ("--dtype", "bfloat16", "dtype 'float32'", "'bfloat16'"),
    ],
)
def test_other_settings_do_not_go_on(option: str, value: object, there: str, here: str, words: Words, tmp_path: Path, hispec: Run) -> None:
    words[words.index("--tokens") + 1] = 20
    hispec(*words)
    before = (tmp_path / "own.jsonl").read_bytes()
    status, out, err = hispec(*words, option, value, "--tokens", 1000)
    assert (status, out) == (2, "")
    assert err == (
        f"hispec: error: out is '{tmp_path / 'own.jsonl'}', where a writing with {there} has begun; this one has {here}. "
        "Give the same settings to go on, or another file\n"
    )
    assert (tmp_path / "own.jsonl").read_bytes() == before


def test_a_file_that_was_taken_away_begins_anew(words: Words, tmp_path: Path, hispec: Run) -> None:
    words[words.index("--tokens") + 1] = 20
    hispec(*words)
    (tmp_path / "own.jsonl").unlink()
    assert hispec(*words, "--seed", 9)[0] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "out is '{out}', which is a folder; it must be a file"),
        ("none/own.jsonl", "out is '{out}' and there is no folder '{out.parent}'; make it first"),
    ],
)
def test_a_bad_out_is_one_line_before_anything_is_loaded(
    name: str, message: str, words: Words, tmp_path: Path, hispec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "__init__", None)
    status, out, err = hispec(*words, "--out", tmp_path / name)
    assert (status, out, err) == (2, "", f"hispec: error: {message.format(out=tmp_path / name)}\n")


def test_a_full_device_says_so(words: Words, hispec: Run) -> None:
    status, out, err = hispec(*words, "--out", "/dev/full")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "hispec: error: /dev/full cannot be written: No space left on device"


def test_lines_end_at_line_feeds_alone(words: Words, tiny_folder: Path, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "prompts.txt").write_bytes("ab\fcd\u2028ef\r\nthe tt\n".encode())
    assert hispec(*words, "--temperature", 0)[0] == 0
    encode = open_model(str(tiny_folder)).tokenizer().encode
    wanted = [encode(prompt) for prompt in ("ab\fcd\u2028ef", "the tt", "zz\nzz")]
    assert [line["ids"][: line["learn_from"]] for line in lines(tmp_path)] == wanted


def test_prompts_that_are_too_long_are_left_out_and_counted(words: Words, tmp_path: Path, hispec: Run) -> None:
    (tmp_path / "prompts.txt").write_text("ab cd\n" + "ab " * 400 + "\n" + "x" * 100_000 + "\n")
    status, _, err = hispec(*words, "--temperature", 0)
    assert status == 0
    assert err.startswith("2 of 4 prompts left out: they have more than 492 tokens\n")
    assert len(lines(tmp_path)) == 2


def test_answers_to_other_prompts_are_not_added_to(words: Words, tmp_path: Path, hispec: Run) -> None:
    hispec(*words)
    before = (tmp_path / "own.jsonl").read_bytes()
    (tmp_path / "prompts.txt").write_text("ab cd\nanother\n")
    status, out, err = hispec(*words)
    assert (status, out) == (2, "")
    assert err == f"hispec: error: {tmp_path / 'own.jsonl'}, line 2: no answer to prompt 2; name another file with --out\n"
    assert (tmp_path / "own.jsonl").read_bytes() == before


def test_a_full_disk_takes_back_what_was_half_written(words: Words, tmp_path: Path, hispec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A file on a disk with room for 100 bytes."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def tell(self) -> int:
            return int(self.file.tell())

        def write(self, content: bytes) -> None:
            self.file.write(content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

        def truncate(self, size: int) -> None:
            self.file.truncate(size)

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode="r", **_: Full(opened(path, mode)) if mode == "ab" else opened(path, mode))
        status, out, err = hispec(*words)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == f"hispec: error: {tmp_path / 'own.jsonl'} cannot be written: No space left on device"
    assert (tmp_path / "own.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a"}\n', ", line 1: it must have 'prompt' or 'messages'"),
        ('{"prompt": 5}\n', ", line 1: prompt is 5; it must be a string"),
        ('{"messages": []}\n', ", line 1: this model has no chat template"),
        ("{\n", ", line 1: not JSON ("),
        ('{"messages": 5}\n', ", line 1: messages is 5; it must be a list of objects with 'role' and 'content'"),
        ('{"messages": [5]}\n', ", line 1: messages is [5]; it must be a list of objects with 'role' and 'content'"),
        ('{"prompt": "Tom \\ud800 has"}\n', ", line 1: prompt has half of a surrogate pair; its text must be whole characters"),
        ('{"n": ' + "1" * 5000 + "}\n", ", line 1: it has a number of more than 4300 digits"),
        ("", ": no prompt; valid are .txt files, a prompt a line, and .jsonl files with 'prompt' or 'messages' in each"),
        (json.dumps({"prompt": "ab " * 400}), ": no prompt that leaves room for 20 tokens: it may have 492 (the context is 512)"),
    ],
)
def test_bad_prompts_are_one_line_that_names_them(tiny_folder: Path, tmp_path: Path, hispec: Run, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    words: Words = ["distill", "--model", tiny_folder, "--prompts", tmp_path / "bad.jsonl", "--out", tmp_path / "own.jsonl"]
    status, out, err = hispec(*words, "--max-tokens", 20, "--threads", 1)
    assert (status, out) == (2, "")
    assert err.startswith(f"hispec: error: {tmp_path / 'bad.jsonl'}{message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "own.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "model.dtype is 'int8'; it must be 'bfloat16' or 'float32'"),
        (["--tokens", 0], "Invalid value for '--tokens': "),
        (["--seed", 2**40 + 1], "Invalid value for '--seed': "),
        (["--max-tokens", 512], "max_tokens is 512; it must be from 1 to 511 (the context, 512, has the prompt too)"),
        (["--model", "/no/such"], "model.path is '/no/such': there is no such file or folder"),
        (["--prompts", "/no/such.txt"], "/no/such.txt does not exist; a file or folder is needed"),
    ],
)
def test_bad_options_are_one_line_that_names_them(words: Words, hispec: Run, options: Words, message: str) -> None:
    status, out, err = hispec(*words, *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"hispec: error: {message}")
    assert err.count("\n") == 1
