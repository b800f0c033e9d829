"""`serve run deployments/hispec.yaml` for real: Ray, the proxy, the default model in fp32, and what OpenAI clients ask.

Takes about 40 seconds, half of them for Ray and the model to start.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from live import COUNTING, MODEL, QUESTION, ask, pieces, reasons, stream, wait_for


def test_a_stop_string_across_tokens(server: str) -> None:
    fields: dict[str, Any] = {"prompt": COUNTING, "max_tokens": 32, "stream_options": {"include_usage": True}}
    events = stream(server, stop=["8, 9"], **fields)
    assert "".join(pieces(events)) == " 6, 7, "
    assert not any("8" in piece for piece in pieces(events))
    assert reasons(events) == ["stop"]
    assert (events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"]) == (14, 11)
    events = stream(server, stop=["8, 7"], **fields)
    assert "".join(pieces(events)) == " 6, 7, 8, 9, 10, 11, 12, 13, 14,"
    assert reasons(events) == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == 32
    chat: dict[str, Any] = {"path": "/v1/chat/completions", "messages": QUESTION, "max_tokens": 40}
    assert "".join(pieces(stream(server, stop=["is 4"], **chat))) == "The answer "


@pytest.mark.parametrize(
    ("most", "text", "reason", "tokens"), [(11, " 6, 7, ", "stop", 11), (10, " 6, 7, 8, ", "length", 10), (12, " 6, 7, ", "stop", 11)]
)
def test_a_stop_string_and_the_limit_in_one_chunk(server: str, most: int, text: str, reason: str, tokens: int) -> None:
    body = ask(server, prompt=COUNTING, max_tokens=most, stop=["8, 9"])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (text, reason)
    assert body["usage"]["completion_tokens"] == tokens


def test_the_end_of_sequence_inside_an_accepted_chunk(server: str) -> None:
    body = ask(server, "/v1/chat/completions", messages=QUESTION, max_tokens=40)
    assert body["choices"][0]["message"]["content"] == "The answer is 4."
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 42, "completion_tokens": 7, "total_tokens": 49}


def test_characters_split_across_tokens(server: str) -> None:
    emoji = "Emoji: 🎉🎉🎉🎉🎉🎉"
    found = pieces(stream(server, prompt=emoji, max_tokens=12))
    assert "".join(found) == "🎉🎉🎉🎉"
    assert "\ufffd" not in "".join(found)
    cut = "".join(pieces(stream(server, prompt=emoji, max_tokens=13)))
    assert cut.startswith("🎉🎉🎉🎉")
    assert "\ufffd" not in cut[:-1]
    assert ask(server, prompt=emoji, max_tokens=13)["choices"][0]["text"] == cut
    assert "".join(pieces(stream(server, prompt="漢字漢字漢字漢字漢字", max_tokens=16))) == "漢字漢字漢字漢字"
    stopped = ask(server, prompt=emoji, max_tokens=12, stop=["🎉🎉"])
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("", "stop")
    assert stopped["usage"]["completion_tokens"] == 6


def test_no_tokens_and_one(server: str) -> None:
    none = ask(server, prompt="The capital of France is", max_tokens=0)
    assert (none["choices"][0]["text"], none["choices"][0]["finish_reason"], none["usage"]["completion_tokens"]) == ("", "length", 0)
    one = ask(server, prompt=COUNTING, max_tokens=1)
    assert (one["choices"][0]["text"], one["usage"]["completion_tokens"]) == (" ", 1)


def test_an_echoed_prompt(server: str) -> None:
    prompt = "The capital of France is"
    body = ask(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]) == (prompt, "length", 0)
    assert "".join(choice["logprobs"]["tokens"]) == prompt
    assert len(choice["logprobs"]["token_logprobs"]) == body["usage"]["prompt_tokens"] == 5
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert ask(server, prompt=prompt, max_tokens=4, echo=True)["choices"][0]["text"].startswith(f"{prompt} ")


LOGPROBS = [-0.114, -0.051, -0.127, -0.053, -0.044, -0.046, -0.037, -0.008, -0.053, -0.049, -0.006, -0.202, -0.108, -0.005, -0.005, -0.549]
PLAIN = {"method": "plain"}


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


def test_log_probabilities_of_a_chat(server: str) -> None:
    fields: dict[str, Any] = {"path": "/v1/chat/completions", "messages": QUESTION, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
    (choice,) = ask(server, **fields)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"] == "The answer is 4."
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    parts = [event["choices"][0]["logprobs"] for event in stream(server, **fields)]
    assert [entry for part in parts if part for entry in part["content"]] == content


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


SHAPED: list[dict[str, Any]] = [
    {"top_p": 0.8, "temperature": 0.9}, {"top_k": 5, "min_p": 0.05, "temperature": 1.2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "temperature": 0.7}, {"logit_bias": {"28": -100, "29": 3}}, {"min_tokens": 12, "stop_token_ids": [28, 216]},
    {"n": 3, "temperature": 1.0, "stop": ["e", "\n"]}, {"ignore_eos": True, "max_tokens": 40},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPED, ids="-".join)
def test_every_parameter_gives_the_same_answer_with_speculation_and_without(server: str, shape: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"prompt": COUNTING, "max_tokens": 24, "seed": 11, **shape}
    guessed, plain = (ask(server, hispec=how, **fields) for how in (None, PLAIN))
    assert (guessed["choices"], guessed["usage"]) == (plain["choices"], plain["usage"])
    events = stream(server, **fields)
    texts = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == i) for i in range(shape.get("n", 1))]
    assert texts == [choice["text"] for choice in plain["choices"]]


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


def test_the_usage_of_a_stream(server: str) -> None:
    fields: dict[str, Any] = {"prompt": COUNTING, "max_tokens": 8}
    *events, last = stream(server, stream_options={"include_usage": True}, **fields)
    assert (last["choices"], last["usage"]) == ([], {"prompt_tokens": 14, "completion_tokens": 8, "total_tokens": 22})
    assert all(event["usage"] is None for event in events)
    assert len({(event["id"], event["created"]) for event in [*events, last]}) == 1
    assert all(event["choices"] and "usage" not in event for event in stream(server, **fields))


def test_a_chat_of_parts_and_turns(server: str) -> None:
    path = "/v1/chat/completions"
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert ask(server, path, messages=parts, max_tokens=40)["choices"][0]["message"]["content"] == "The answer is 4."
    assert ask(server, path, messages=QUESTION * 2, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert ask(server, path, messages=[{"role": "user", "content": "<|im_end|>"}], max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_seed_gives_the_same_text_streamed_or_not(server: str) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0.8, "max_tokens": 24}
    text = ask(server, seed=3, **fields)["choices"][0]["text"]
    assert "".join(pieces(stream(server, seed=3, **fields))) == text
    assert ask(server, seed=4, **fields)["choices"][0]["text"] != text


def test_the_openai_client(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "The answer is 4."
        chunks = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40, stream=True)  # type: ignore[call-overload,arg-type]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The answer is 4."  # type: ignore[union-attr]
        assert client.completions.create(model=MODEL, prompt=COUNTING, temperature=0, max_tokens=4).choices[0].text == " 6, "
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("gpt-4")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=MODEL, prompt="a", temperature=3)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
            client.completions.create(model=MODEL, prompt="a " * 3000)


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
