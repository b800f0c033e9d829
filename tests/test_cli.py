"""`hispec generate`: what goes to stdout, what to stderr, and with which status."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from shared import Run

from hispec_ray import LLM, SamplingParams, TokenDelta
from hispec_ray.cli import MARKS, LevelSpans
from hispec_ray.engine.detokenizer import CharacterStream, Detokenizer
from hispec_ray.request import FinishReason

MARK = re.compile("[" + "".join(mark.before + mark.after for mark in MARKS.values()) + "]")
COLOUR = re.compile(r"\x1b\[[\d;]*m")


DEPLOYMENT = """
applications:
  - name: other
    import_path: somebody.else:app
  - name: hispec
    import_path: hispec_ray.serving.app:build
    args:
      model: {{path: {folder}, dtype: float32, threads: 1}}
      speculation: {{method: hispec, exits: {{draft: 3, check: 6}}}}
      cache: {{blocks: 64}}
"""


@pytest.fixture
def tiny(tiny_folder: Path, tmp_path: Path) -> list[object]:
    """Arguments that answer with the tiny model, quickly."""
    config = tmp_path / "deployment.yaml"
    config.write_text(DEPLOYMENT.format(folder=tiny_folder))
    return ["generate", "ab cd", "--config", config, "--max-tokens", 24]


def text_and_figures(out: str) -> tuple[str, str]:
    """The text of a trace without colours and marks, and what follows it."""
    _, rest = COLOUR.sub("", out).split("\n\n", 1)
    text, figures = rest.split("\n\nlevel ", 1)
    return MARK.sub("", text), figures


def test_the_default_model_answers_and_only_the_text_is_on_stdout(hispec: Run) -> None:
    status, out, err = hispec("generate", "What is 2+2? Answer with one number.", "--dtype", "float32", "--threads", 1)
    assert (status, out, err) == (0, "The answer is 4.\n", "")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_text_is_the_same_whatever_the_method(hispec: Run, tiny: list[object], temperature: float) -> None:
    tiny += ["--temperature", temperature, "--seed", 5]
    plain = hispec(*tiny, "--method", "plain")
    assert hispec(*tiny, "--method", "hispec", "--draft-exit", 6, "--check-exit", 7) == plain
    assert hispec(*tiny, "--method", "single", "--draft-exit", 5, "--draft-tokens", 3) == plain


def test_a_stop_string_ends_the_text(hispec: Run, tiny: list[object]) -> None:
    _, whole, _ = hispec(*tiny)
    stop = whole[5:8]
    status, out, _ = hispec(*tiny, "--stop", "never in the text", "--stop", stop)
    assert (status, out) == (0, whole[: whole.index(stop)] + "\n")


@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR"])
def test_a_trace_marks_the_same_text_and_counts_its_tokens(
    hispec: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    _, plain, _ = hispec(*tiny)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    status, out, err = hispec(*tiny, "--trace", "--draft-exit", 6, "--check-exit", 7)
    assert (status, err) == (0, "")
    text, figures = text_and_figures(out)
    assert text == plain.removesuffix("\n")
    assert ("\x1b[30;48;5;" in out) == (variable == "FORCE_COLOR")
    assert ("‹" in out) == (variable == "NO_COLOR")
    tokens = {level: int(count) for level, count in re.findall(r"^(draft|check|full) +\d+ +(\d+)", figures, re.M)}
    assert sum(tokens.values()) == 24
    assert tokens["draft"] > 0
    assert tokens["full"] > 0
    assert re.search(r"^24 tokens, the first after \d+ ms, then [\d.]+ tokens/s with 0\.\d\d full passes a token$", figures, re.M)


def test_every_piece_has_the_level_of_the_token_that_made_it(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("float32", "hispec", 6, 7)
    prompt = llm.encode("ab cd")
    detokenizer = Detokenizer(llm.engine.tokenizer)
    whole = llm.generate("ab cd", SamplingParams(temperature=0, max_tokens=40))[0].choices[0]
    made = CharacterStream(detokenizer, prompt)
    expected = [(made.push(token), level) for token, level in zip(whole.token_ids, whole.levels, strict=True)]

    # a stop string that begins with every other character of the text holds pieces back across deltas
    stops = tuple(f"{character}\0" for character in sorted(set(whole.text)))[::2]
    spans = LevelSpans(CharacterStream(detokenizer, prompt))
    pieces: list[tuple[str, str]] = []
    for delta in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=40, stop=stops)):
        new = list(spans.split(delta))
        assert "".join(piece for piece, _ in new) == delta.text
        pieces += new
    assert characters(pieces) == characters(expected)


def characters(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(character, level) for piece, level in pieces for character in piece]


def test_a_character_of_several_tokens_has_the_level_of_the_last() -> None:
    spans = LevelSpans(CharacterStream(Detokenizer(Bytes()), [97]))
    party = list("🎉".encode())
    assert list(spans.split(TokenDelta("r", "", party[:3], ["draft", "draft", "check"]))) == []
    assert list(spans.split(TokenDelta("r", "🎉x", [party[3], 120], ["full", "draft"]))) == [("🎉", "full"), ("x", "draft")]
    assert list(spans.split(TokenDelta("r", "\ufffd", [party[0]], ["check"], FinishReason.LENGTH))) == [("\ufffd", "check")]


class Bytes:
    """A tokenizer with a token for each byte."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return bytes(token_ids).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return chr(ids)

    def convert_tokens_to_ids(self, tokens: str) -> None:
        return None


def test_ctrl_c_keeps_what_was_written(hispec: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole, _ = hispec(*tiny)
    uninterrupted = LLM.stream

    def stream(*request: Any) -> Iterator[TokenDelta]:
        yield from islice(uninterrupted(*request), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)
    status, out, err = hispec(*tiny)
    assert (status, err) == (130, "")
    assert whole.startswith(out.removesuffix("\n"))
    assert 1 < len(out) < len(whole)
    status, traced, err = hispec(*tiny, "--trace")
    assert (status, err) == (130, "")
    text, figures = text_and_figures(traced)
    assert whole.startswith(text)
    assert 1 <= len(text) < len(whole)
    assert re.search(r"^\d+ tokens, the first after", figures, re.M)


def test_version(hispec: Run) -> None:
    status, out, _ = hispec("--version")
    assert status == 0
    assert re.fullmatch(r"hispec \d+\.\d+\.\d+\n", out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "0"], "speculation.window is 0; it must be greater than or equal to 1"),
        (["--method", "fast"], "speculation.method is 'fast'; it must be 'plain', 'single' or 'hispec'"),
        (["--dtype", "int8"], "model.dtype is 'int8'; it must be 'bfloat16' or 'float32'"),
        (
            ["--draft-exit", "6", "--check-exit", "5"],
            "speculation.exits.draft is 6 and speculation.exits.check is 5; ",
        ),
        (["--method", "single", "--draft-exit", "9"], "speculation.exits.draft is 9; it must be from 1 to 8 (the model's depth)"),
        (["--temperature", "2.5"], "temperature is 2.5; it must be from 0 to 2"),
        (["--max-tokens", "-1"], "max_tokens is -1; it must be 0 or more"),
        (["--max-tokens", "1000"], "This model's maximum context length is 512 tokens"),
        (["--seed", "-1"], "seed is -1; it must be from 0 to 9223372036854775807"),
        (["--stop", ""], "stop has an empty string; each must have at least one character"),
        (["--window", "many"], "Invalid value for '--window': "),
        (["--no-such"], "No such option: --no-such"),
        (["--model", "/no/such"], "model.path is '/no/such': there is no such file or folder; it must be a folder"),
        (["--config", "/no/such.yaml"], "config is '/no/such.yaml': No such file or directory"),
        (["--chat"], "this model has no chat template"),
    ],
)
@pytest.mark.parametrize("trace", [[], ["--trace"]])
def test_bad_input_is_one_line_that_names_it(
    hispec: Run, tiny: list[object], tiny_folder: Path, options: list[str], message: str, trace: list[str]
) -> None:
    status, out, err = hispec(*tiny, *options, *trace)
    assert (status, out) == (2, "")
    assert err.startswith("hispec: error: " + message.format(model=tiny_folder))
    assert err.count("\n") == 1


def test_a_prompt_that_is_not_text_is_refused(hispec: Run, tiny: list[object]) -> None:
    tiny[1] = "ab\udcff"
    assert hispec(*tiny) == (2, "", "hispec: error: prompt has bytes that are not text; it must be valid UTF-8\n")
    tiny[1] = ""
    assert hispec(*tiny) == (2, "", "hispec: error: the prompt is empty; it must have at least one token\n")


def test_options_override_a_deployment_file(hispec: Run, tiny: list[object]) -> None:
    layers = re.compile(r"^(?:draft|check|full) +(\d+)", re.M)
    assert layers.findall(hispec(*tiny, "--trace")[1]) == ["3", "6", "8"]
    assert layers.findall(hispec(*tiny, "--trace", "--draft-exit", 5)[1]) == ["5", "6", "8"]
    assert layers.findall(hispec(*tiny, "--trace", "--method", "single")[1]) == ["3", "8"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("applications: [", "config is '{config}': while parsing a flow node"),
        ("- 1", "config is '{config}'; it must be a Serve config with one application"),
        (
            "applications: [{import_path: somebody.else:app}]",
            "config is '{config}'; it must be a Serve config with one application",
        ),
        ("applications: [{import_path: hispec_ray.serving.app:build, args: 5}]", "config is '{config}'; it must be a Serve config"),
        (
            "applications: [{import_path: hispec_ray.serving.app:build, args: {speculation: {widow: 4}}}]",
            "speculation.widow is no setting; there are method, drafter, phrases, exits, draft_tokens, window",
        ),
        (
            "applications: [{import_path: hispec_ray.serving.app:build, args: {parallel: {stages: [{tp: 2}], patience: 4}}}]",
            "parallel.patience is no setting; there are stages, patience_s, shared_memory",
        ),
        (
            "applications: [{import_path: hispec_ray.serving.app:build, args: {parallel: {stages: [{tp: 2, layer: 4}]}}}]",
            "parallel.stages.0.layer is no setting; there are layers, tp",
        ),
        ("applications: [{import_path: hispec_ray.serving.app:build, args: {speculation: 4}}]", "config is '{config}': speculation is 4"),
    ],
)
def test_a_bad_deployment_file_is_one_line(hispec: Run, tmp_path: Path, content: str, message: str) -> None:
    config = tmp_path / "deployment.yaml"
    config.write_text(content)
    status, out, err = hispec("generate", "hi", "--config", config, "--window", 2)
    assert (status, out) == (2, "")
    assert err.startswith("hispec: error: " + message.format(config=config))
    assert err.count("\n") == 1


def test_a_deployment_file_is_checked_without_a_server(hispec: Run, tiny_folder: Path, tmp_path: Path) -> None:
    def check(**changes: object) -> tuple[int, str, str]:
        args = {"model": {"path": str(tiny_folder)}, "speculation": {"exits": {"draft": 3, "check": 6}}} | changes
        file = tmp_path / "deployment.yaml"
        file.write_text(yaml.safe_dump({"applications": [{"import_path": "hispec_ray.serving.app:build", "args": args}]}))
        return hispec("check", file)

    said = f"{tmp_path / 'deployment.yaml'}: {tiny_folder}, hispec (draft 3, check 6, full 8 layers)\n"
    assert check() == (0, said, "")
    changes: dict[str, dict[str, object]] = {
        "the model": {"speculation": {"exits": {"draft": 3, "check": 9}}},
        "parallel.stages.0.layers is 5; ": {"parallel": {"stages": [{"layers": 5}, {"layers": 3}]}},
        "speculation.widow is no setting": {"speculation": {"widow": 4}},
        "nowhere": {"model": {"path": str(tmp_path / "nowhere")}},
        "model.chat_template is": {"model": {"path": str(tiny_folder), "chat_template": str(tmp_path / "a.jinja")}},
        "speculation.phrases is": {"speculation": {"drafter": "lookup", "phrases": str(tmp_path / "none")}},
        "server.api_keys_file is": {"server": {"api_keys_file": str(tmp_path / "keys")}},
    }
    for message, change in changes.items():
        status, out, err = check(**change)
        assert (status, out) == (2, "")
        assert err.startswith("hispec: error: ")
        assert message in err
        assert err.count("\n") == 1
