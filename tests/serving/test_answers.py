"""Answers over HTTP, whole and streamed: what stands in them, by OpenAI's own types too."""

from __future__ import annotations

from typing import Any

import pytest

from hispec_ray.serving.answers import usage
from serving.asgi import HERMES_TEMPLATE, MODEL, TOOL, chat, complete, events
from serving.fake_engine import FakeEngine


def test_a_completion() -> None:
    body = complete().json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14},
    }


def test_a_chat() -> None:
    body = chat().json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    message = {"role": "assistant", "content": "Hello, world", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14},
    }


def test_a_streamed_completion() -> None:
    chunks = events(complete(stream=True))
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["Hello", ", ", "world"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert not any("usage" in chunk for chunk in chunks)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_an_empty_delta() -> None:
    choices = [chunk["choices"][0] for chunk in events(chat(stream=True))]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ", "},
        {"content": "world"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "stop"]


@pytest.mark.parametrize("ask", [complete, chat])
def test_usage_comes_last_where_it_is_asked_for(ask: Any) -> None:
    *chunks, last = events(ask(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("ask", [complete, chat])
def test_every_event_has_the_counts_so_far_where_they_are_asked_for(ask: Any) -> None:
    *chunks, last = events(ask(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    expected = [5, 7, 12] if ask is complete else [5, 5, 7, 12, 12]
    assert [chunk["usage"] for chunk in chunks] == [usage(2, tokens) for tokens in expected]
    assert last["usage"] == usage(2, 12)


def test_a_step_without_text_is_no_event_but_is_counted() -> None:
    engine = FakeEngine(lambda request: ["", "a", ""])
    *chunks, last = events(complete(engine, stream=True, stream_options={"include_usage": True}))
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [("a", None), ("", "stop")]
    assert last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_joined_stream_is_the_whole_answer(ask: Any) -> None:
    script = {0: ["one", " 🎉漢", "", "字"], 1: ["two"], 2: ["", "three\n\n", "data: x"]}

    def engine() -> FakeEngine:
        return FakeEngine(lambda request: script[int(request.id.rsplit("-", 1)[1])])

    whole = ask(engine(), n=3).json()
    joined, reasons = {0: "", 1: "", 2: ""}, {0: [], 1: [], 2: []}  # type: ignore[var-annotated]
    for chunk in events(ask(engine(), n=3, stream=True)):
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["text"] if ask is complete else choice["delta"].get("content", "")
            reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert joined == {index: "".join(pieces) for index, pieces in script.items()}
    assert reasons == {index: ["stop"] for index in script}
    texts = [choice["text"] if ask is complete else choice["message"]["content"] for choice in whole["choices"]]
    assert texts == list(joined.values())
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["prompt_tokens"] == 2


def test_several_prompts_are_choices_prompt_by_prompt() -> None:
    engine = FakeEngine(lambda request: [chr(request.prompt_ids[0])])
    body = complete(engine, prompt=["a", "bc"], n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_no_tokens_are_an_answer() -> None:
    body = complete(max_tokens=0).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")
    assert body["usage"]["completion_tokens"] == 0


def test_an_echoed_completion_begins_with_the_prompt() -> None:
    for prompt in ("Hi", [72, 105]):
        body = complete(prompt=prompt, echo=True, logprobs=1).json()
        choice = body["choices"][0]
        assert choice["text"] == "HiHello, world"
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["token_logprobs"][:2] == [None, -0.105]
        chunks = events(complete(prompt=prompt, echo=True, logprobs=1, stream=True))
        parts = [chunk["choices"][0] for chunk in chunks]
        assert parts[0]["text"] == "HiHello"
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
    assert complete(echo=True).json()["choices"][0] | {"logprobs": None} == complete(echo=True).json()["choices"][0]
    assert complete(echo=True, max_tokens=0).json()["choices"][0]["text"] == "Hi"


def test_the_trace_tells_who_chose_each_token() -> None:
    for ask in (complete, chat):
        (choice,) = ask(hispec={"trace": True}).json()["choices"]
        assert choice["hispec"] == {"token_ids": list(map(ord, "Hello, world")), "levels": ["full"] * 12}
        parts = [chunk["choices"][0] for chunk in events(ask(hispec={"trace": True}, stream=True))]
        assert [id for part in parts for id in part.get("hispec", {"token_ids": []})["token_ids"]] == choice["hispec"]["token_ids"]
        assert "hispec" not in ask().json()["choices"][0]


def test_a_chat_that_calls_a_tool() -> None:
    def engine() -> FakeEngine:
        caller = FakeEngine(lambda request: ['<tool_call>\n{"name": "a', 'dd", "argume', 'nts": {"a"', ": 5}}\n</tool_call>"])
        caller.tokenizer.chat_template = HERMES_TEMPLATE
        return caller

    used = engine()
    (choice,) = chat(used, tools=[TOOL], tool_choice="required").json()["choices"]
    assert used.tokenizer.tools == [TOOL]
    assert "add" in used.grammars[0]
    assert 'call: "<tool_call>"' in used.grammars[0]  # a text, for this tokenizer has no such token
    assert used.requests[0].params.grammar == used.grammars[0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None},
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    assert call["function"] == {"name": "add", "arguments": '{"a": 5}'}
    deltas = [chunk["choices"][0]["delta"] for chunk in events(chat(engine(), tools=[TOOL], stream=True))]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls if call["function"]["arguments"]] == ['{"a"', ": 5}"]
    assert next(call.get("function").get("name") for call in calls) == "add"
    assert not any(delta.get("content") for delta in deltas)
