"""`serve run deployments/hispec.yaml` for real: Ray, the proxy, the default model in fp32, and what clients ask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from serving.clients import ADD, SUM
from serving.live import COUNTING, MODEL, QUESTION, ask, pieces, reasons, stream, wait_for

PLAIN = {"method": "plain"}
CHAT = "/v1/chat/completions"
EMOJI = "Emoji: 🎉🎉🎉🎉🎉🎉"
PARTS = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]


@dataclass(frozen=True)
class Case:
    """A greedy request, and the answer that it has however it is decoded and sent."""

    fields: dict[str, Any]
    text: str
    reason: str
    prompt_tokens: int
    tokens: int
    path: str = "/v1/completions"


CASES = {
    "a stop string across tokens": Case({"prompt": COUNTING, "max_tokens": 32, "stop": ["8, 9"]}, " 6, 7, ", "stop", 14, 11),
    "a stop string that only begins": Case(
        {"prompt": COUNTING, "max_tokens": 32, "stop": ["8, 7"]}, " 6, 7, 8, 9, 10, 11, 12, 13, 14,", "length", 14, 32
    ),
    "a stop string in a chat": Case({"messages": QUESTION, "max_tokens": 40, "stop": ["is 4"]}, "The answer ", "stop", 42, 5, CHAT),
    "a stop string at the limit": Case({"prompt": COUNTING, "max_tokens": 11, "stop": ["8, 9"]}, " 6, 7, ", "stop", 14, 11),
    "the limit before a stop string": Case({"prompt": COUNTING, "max_tokens": 10, "stop": ["8, 9"]}, " 6, 7, 8, ", "length", 14, 10),
    "the end of the sequence": Case({"messages": QUESTION, "max_tokens": 40}, "The answer is 4.", "stop", 42, 7, CHAT),
    "content in parts": Case({"messages": PARTS, "max_tokens": 40}, "The answer is 4.", "stop", 42, 7, CHAT),
    "characters split across tokens": Case({"prompt": EMOJI, "max_tokens": 12}, "🎉🎉🎉🎉", "length", 21, 12),
    "a character cut by the limit": Case({"prompt": EMOJI, "max_tokens": 13}, "🎉🎉🎉🎉\ufffd", "length", 21, 13),
    "characters of two and three tokens": Case({"prompt": "漢字漢字漢字漢字漢字", "max_tokens": 16}, "漢字漢字漢字漢字", "length", 20, 16),
    "a stop string of split characters": Case({"prompt": EMOJI, "max_tokens": 12, "stop": ["🎉🎉"]}, "", "stop", 21, 6),
    "no tokens": Case({"prompt": COUNTING, "max_tokens": 0}, "", "length", 14, 0),
    "one token": Case({"prompt": COUNTING, "max_tokens": 1}, " ", "length", 14, 1),
    "an echoed prompt": Case({"prompt": COUNTING, "max_tokens": 2, "echo": True}, f"{COUNTING} 6", "length", 14, 2),
}


@pytest.mark.parametrize(
    ("method", "streamed"),
    [
        pytest.param(None, True, id="guessed-streamed"),
        pytest.param(PLAIN, False, id="plain-whole"),
        pytest.param(None, False, id="guessed-whole", marks=pytest.mark.slow),
        pytest.param(PLAIN, True, id="plain-streamed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_the_same_however_it_is_decoded_and_sent(server: str, name: str, method: Any, streamed: bool) -> None:
    case = CASES[name]
    usage = {"prompt_tokens": case.prompt_tokens, "completion_tokens": case.tokens, "total_tokens": case.prompt_tokens + case.tokens}
    if not streamed:
        body = ask(server, case.path, hispec=method, **case.fields)
        (choice,) = body["choices"]
        text = choice["text"] if case.path != CHAT else choice["message"]["content"]
        assert (text, choice["finish_reason"], body["usage"]) == (case.text, case.reason, usage)
        return
    *events, last = stream(server, case.path, hispec=method, stream_options={"include_usage": True}, **case.fields)
    assert ("".join(pieces(events)), reasons(events)) == (case.text, [case.reason])
    assert (last["choices"], last["usage"]) == ([], usage)
    assert all(event["choices"] and event["usage"] is None for event in events)
    assert len({(event["id"], event["created"]) for event in [*events, last]}) == 1


def test_the_log_probabilities_of_an_echoed_prompt(server: str) -> None:
    prompt = "The capital of France is"
    body = ask(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]) == (prompt, "length", 0)
    assert "".join(choice["logprobs"]["tokens"]) == prompt
    assert len(choice["logprobs"]["token_logprobs"]) == body["usage"]["prompt_tokens"] == 5
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert ask(server, prompt=prompt, max_tokens=4, echo=True)["choices"][0]["text"].startswith(f"{prompt} ")


SPECIAL = "<|im_start|>user\n1, 2,"


def test_special_tokens_stand_in_an_echoed_prompt_by_their_names(server: str) -> None:
    ids = httpx.post(f"{server}/tokenize", json={"model": MODEL, "prompt": SPECIAL}).json()["tokens"]
    text, of_ids = (ask(server, prompt=prompt, max_tokens=1, echo=True, logprobs=1)["choices"][0] for prompt in (SPECIAL, ids))
    assert text == of_ids
    assert text["text"].startswith(SPECIAL)
    lists = text["logprobs"]
    assert "".join(lists["tokens"]) == text["text"]
    assert all(text["text"].startswith(token, at) for token, at in zip(lists["tokens"], lists["text_offset"], strict=True))


LOGPROBS = [-0.114, -0.051, -0.127, -0.053, -0.044, -0.046, -0.037, -0.008, -0.053, -0.049, -0.006, -0.202, -0.108, -0.005, -0.005, -0.549]


def test_log_probabilities_under_speculation(server: str) -> None:
    fields: dict[str, Any] = {"prompt": COUNTING, "max_tokens": 16, "logprobs": 5}
    guessed, plain = (ask(server, hispec=how, **fields)["choices"][0] for how in ({"trace": True}, PLAIN))
    assert {"lookup", "full"} <= set(guessed.pop("hispec")["levels"])
    assert guessed == plain, "to the bit"
    assert guessed["text"] == " 6, 7, 8, 9, 10,"
    assert guessed["logprobs"]["token_logprobs"] == pytest.approx(LOGPROBS, abs=0.02)
    assert all(len(top) >= 5 for top in guessed["logprobs"]["top_logprobs"])
    assert [guessed["text"][at] for at in guessed["logprobs"]["text_offset"]] == [token[0] for token in guessed["logprobs"]["tokens"]]
    cut = ask(server, stop=["8, 9"], **fields)["choices"][0]
    assert cut["text"] == "".join(cut["logprobs"]["tokens"]) == " 6, 7, "
    events = stream(server, **fields)
    for name, values in guessed["logprobs"].items():
        assert [value for event in events for value in event["choices"][0]["logprobs"][name]] == values


OPTIONAL = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "stream", "stream_options", "logprobs", "logit_bias",
    "user",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "hispec",
)  # fmt: skip


def test_null_is_absence(server: str) -> None:
    given: dict[str, Any] = {"seed": 3, "max_tokens": 8}
    completion, chat = {"prompt": "Once"}, {"path": "/v1/chat/completions", "messages": QUESTION}
    for fields, more in ((completion, ("echo", "suffix", "best_of")), (chat, ("tools", "tool_choice", "response_format", "top_logprobs"))):
        nulls = dict.fromkeys((*OPTIONAL, *more)) | given | {"temperature": 0}
        assert ask(server, **nulls, **fields)["choices"] == ask(server, **given, **fields)["choices"]


SAY = [{"role": "user", "content": "Say: 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3"}]
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 8}
ROWS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k and min_p": {"top_k": 5, "min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "repetition": {"repetition_penalty": 0.9},
    "bias": {"logit_bias": {"28": 1, "216": -0.5}},
    "late stop tokens": {"min_tokens": 12, "stop_token_ids": [28, 216]},
    "choices and stop strings": {"n": 3, "stop": ["e", "\n"]},
    "no end": {"ignore_eos": True, "logprobs": 2},
    "chat": {"messages": SAY, "logprobs": True, "top_logprobs": 2},
    "a schema": {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}},
    "a call": {"messages": SUM, "tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 40},
}


@pytest.mark.parametrize(
    ("row", "temperature"),
    [
        pytest.param(row, temperature, marks=pytest.mark.slow if number % 2 == (temperature == 0) else ())
        for number, row in enumerate(ROWS)
        for temperature in (0, 0.9)
    ],
)
def test_every_parameter_gives_the_same_answer_with_speculation_and_without(server: str, row: str, temperature: float) -> None:
    fields: dict[str, Any] = {"max_tokens": 14, "seed": 11, "temperature": temperature} | ROWS[row]
    path = CHAT if "messages" in fields else "/v1/completions"
    fields |= {} if path == CHAT else {"prompt": COUNTING}
    guessed, plain = (ask(server, path, hispec={"trace": True} | how, **fields) for how in ({}, PLAIN))
    levels = [{level for choice in body["choices"] for level in choice.pop("hispec")["levels"]} for body in (guessed, plain)]
    assert levels[1] == {"full"}
    assert levels[0] > {"full"}, "nothing was guessed right: plain decoding was held against itself"
    assert unnamed(guessed["choices"]) == unnamed(plain["choices"])
    assert guessed["usage"] == plain["usage"]
    if path != CHAT:
        events = stream(server, **fields)
        texts = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == i) for i in range(fields.get("n", 1))]
        assert texts == [choice["text"] for choice in plain["choices"]]


def unnamed(choices: list[Any]) -> list[Any]:
    """Choices without the ids of their calls, which are drawn."""
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    return choices


def test_an_answer_that_follows_a_schema(server: str) -> None:
    person = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
    schema = {"type": "object", "properties": person, "required": ["name", "age"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
    said = [{"role": "user", "content": "Describe a person."}]
    for temperature in (0, 1.0):
        fields: dict[str, Any] = {"messages": said, "response_format": wanted, "temperature": temperature, "seed": 5, "max_tokens": 80}
        guessed, plain = (ask(server, "/v1/chat/completions", hispec=how, **fields)["choices"][0] for how in (None, PLAIN))
        assert guessed == plain
        assert guessed["finish_reason"] == "stop"
        assert json.loads(guessed["message"]["content"]).keys() == {"name", "age"}
        assert "".join(pieces(stream(server, "/v1/chat/completions", **fields))) == guessed["message"]["content"]
    strange = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "not": {}}}}
    response = httpx.post(f"{server}/v1/chat/completions", json={"model": MODEL, "messages": said, "response_format": strange})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


def test_several_choices(server: str) -> None:
    fields: dict[str, Any] = {"prompt": "My favourite colour is", "n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    body = ask(server, **fields)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) >= 2
    assert [choice["text"] for choice in ask(server, **fields)["choices"]] == texts
    assert body["usage"]["prompt_tokens"] == 4
    events = stream(server, **fields)
    joined = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) for index in range(4)]
    assert joined == texts
    assert len(reasons(events)) == 4
    greedy = ask(server, **fields | {"temperature": 0})
    assert len({choice["text"] for choice in greedy["choices"]}) == 1


def test_turns_in_a_row_and_special_tokens_in_a_message(server: str) -> None:
    assert ask(server, CHAT, messages=QUESTION * 2, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert ask(server, CHAT, messages=[{"role": "user", "content": "<|im_end|>"}], max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_stream_has_no_usage_where_none_is_asked_for(server: str) -> None:
    assert all(event["choices"] and "usage" not in event for event in stream(server, prompt=COUNTING, max_tokens=8))


def test_a_seed_gives_the_same_text_streamed_or_not(server: str) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0.8, "max_tokens": 24}
    text = ask(server, seed=3, **fields)["choices"][0]["text"]
    assert "".join(pieces(stream(server, seed=3, **fields))) == text
    assert ask(server, seed=4, **fields)["choices"][0]["text"] != text


def test_bad_requests_leave_the_server_unharmed(server: str) -> None:
    for body, param in (
        ('{"model": "M"', None),
        (json.dumps({"model": MODEL, "prompt": [49152]}), "prompt"),
        (json.dumps({"model": MODEL, "prompt": [-1], "stream": True}), "prompt"),
        (json.dumps({"model": MODEL, "prompt": "a", "temperature": float("nan")}), "temperature"),
    ):
        response = httpx.post(f"{server}/v1/completions", content=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert httpx.get(f"{server}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert ask(server, prompt=COUNTING, max_tokens=4)["choices"][0]["text"] == " 6, "


def test_a_client_that_goes_away_frees_its_blocks(server: str) -> None:
    def load() -> Any:
        return httpx.get(f"{server}/health").json()

    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1500, "ignore_eos": True, "n": 2}
    wait_for(lambda: load()["running"] == 0, 10, load)
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{server}/v1/completions", json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is let go closes the connection
        first = next(lines)
        assert "choices" in first, first
        assert load()["running"] == 2
    wait_for(lambda: load()["running"] == 0, 10, load)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
    wait_for(lambda: load()["running"] == 0, 10, load)
    assert load()["kv_usage"] == 0
