"""Errors over HTTP: OpenAI's form, whatever went wrong and whenever."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hispec_ray.request import EngineDeadError, FinishReason, GenerationRequest, TokenDelta
from serving.asgi import CHAT, COMPLETION, HERMES_TEMPLATE, LIMIT, TOOL, app, assert_error, chat, complete, raw, send
from serving.fake_engine import CONTEXT, FakeEngine


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_byte_are_statuses(stream: bool) -> None:
    assert_error(complete(temperature=3, stream=stream), 400, "temperature")
    assert_error(complete(prompt=[1000], stream=stream), 400, "prompt")
    assert_error(complete(model="gpt-4", stream=stream), 404, "model", "model_not_found")
    assert "body" in assert_error(send("POST", "/v1/completions", b"{"), 400)
    full, dead = FakeEngine(), FakeEngine()
    full.full, dead.dies_after = True, 0
    response = complete(full, stream=stream)
    assert_error(response, 429, None, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "1"
    assert "secret" not in assert_error(complete(dead, stream=stream), 500)


def test_a_context_that_is_too_short_is_told_in_the_clients_words() -> None:
    said = f"maximum context length is {CONTEXT} tokens"
    assert said in assert_error(complete(max_tokens=CONTEXT), 400, "max_tokens", "context_length_exceeded")
    assert said in assert_error(chat(max_completion_tokens=CONTEXT), 400, "max_completion_tokens", "context_length_exceeded")
    long = [{"role": "user", "content": "x" * CONTEXT}]
    assert said in assert_error(chat(messages=long), 400, "messages", "context_length_exceeded")


@pytest.mark.parametrize(("death", "status"), [(RuntimeError("a secret"), 500), (EngineDeadError("a secret"), 503)])
@pytest.mark.parametrize("ask", [complete, chat])
def test_an_error_after_the_first_byte_is_the_last_event(ask: Any, death: Exception, status: int) -> None:
    engine = FakeEngine()
    engine.dies_after, engine.death = 2, death
    response = ask(engine, stream=True)
    assert response.status_code == 200
    *_, last = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n") if event]
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "[DONE]" not in response.text
    assert_error(ask(engine), status)


def test_a_path_or_method_that_does_not_exist() -> None:
    assert "/nowhere" in assert_error(send("GET", "/nowhere"), 404)
    assert_error(send("POST", "/v1/completions/"), 404)
    response = send("GET", "/v1/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_query_may_be_any_bytes() -> None:
    for path, method, status in (("/nowhere", "GET", 404), ("/v1/completions", "GET", 405), ("/version", "GET", 200)):
        start, body = asyncio.run(raw(app(FakeEngine()), path, method=method, query_string=b"a=\xff\xfe"))
        assert start["status"] == status
        assert status == 200 or json.loads(body["body"])["error"]["message"].endswith(f"{method} {path}")


def test_a_body_over_the_limit() -> None:
    assert_error(complete(prompt="x" * LIMIT), 413)
    assert_error(complete(prompt="x" * (LIMIT - 100)), 400, "prompt", "context_length_exceeded")


def test_a_method_that_the_server_does_not_have() -> None:
    assert "'hispec'" in assert_error(complete(hispec={"method": "single"}), 400, "hispec.method")
    assert complete(hispec={"method": "plain"}).status_code == complete(hispec={"method": "hispec"}).status_code == 200


def test_tools_want_a_template_that_knows_them() -> None:
    assert "knows no tools" in assert_error(chat(tools=[TOOL]), 400, "tools")
    said = [{"role": "tool", "content": "5", "tool_call_id": "a"}]
    assert "knows no tools" in assert_error(chat(messages=said), 400, "messages")
    strange = FakeEngine()
    strange.tokenizer.chat_template = "{{ tools }}"
    assert "does not know" in assert_error(chat(strange, tools=[TOOL]), 400, "tools")
    assert chat(tools=[TOOL], tool_choice="none").status_code == 200


@pytest.mark.parametrize("arguments", ["[]", "{", "5"])
def test_the_arguments_of_an_earlier_call_are_an_object(arguments: str) -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_template = HERMES_TEMPLATE
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    said = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    assert "JSON object" in assert_error(chat(engine, messages=said), 400, "messages.1")


def test_a_grammar_that_cannot_be_followed_is_named_by_its_field() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    assert "nonsense" in assert_error(chat(response_format=wanted), 400, "response_format")
    engine = FakeEngine()
    engine.tokenizer.chat_template = HERMES_TEMPLATE
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "nonsense"}}}}}
    assert_error(chat(engine, tools=[tool]), 400, "tools")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["nothing", "something"])
def test_a_grammar_beyond_its_limits_ends_the_answer_with_an_error(stream: bool, after: str) -> None:
    class Beyond(FakeEngine):
        def answer(self, request: GenerationRequest) -> list[TokenDelta]:
            said = [TokenDelta(request.id, "{", [1], ["full"])] if after == "something" else []
            return [*said, TokenDelta(request.id, finish_reason=FinishReason.ERROR)]

    response = chat(Beyond(), stream=stream)
    if stream and after == "something":
        last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert (last["error"]["param"], last["error"]["code"]) == ("response_format", "grammar_too_complex")
    else:
        assert_error(response, 400, "response_format", "grammar_too_complex")


TOOLS = [{"type": "function", "function": {"name": f"{'a' * 50}{number}"}} for number in range(40)]
WIDE: Any = ["x" * 9]
for _ in range(2):
    WIDE = [WIDE] * 6


@pytest.mark.parametrize(
    ("status", "path", "fields"),
    [
        (404, "/v1/" + "x" * 5000, {}),
        (404, "/v1/completions", COMPLETION | {"model": "x" * 5000}),
        (400, "/v1/completions", COMPLETION | {"x" * 5000: 1}),
        (400, "/v1/completions", COMPLETION | {"temperature": WIDE}),
        (400, "/v1/completions", COMPLETION | {"logit_bias": {"9" * 5000: "a"}}),
        (400, "/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (400, "/v1/chat/completions", CHAT | {"tools": TOOLS * 2}),
        (400, "/v1/chat/completions", CHAT | {"messages": [CHAT["messages"][0] | {"x" * 5000: 1}]}),
    ],
)
def test_an_error_is_short_whatever_a_client_sent(status: int, path: str, fields: Any) -> None:
    response = send("POST", path, fields)
    assert response.status_code == status
    assert 0 < len(response.json()["error"]["message"]) < 1000
    assert len(response.json()["error"]["param"] or "") < 1000
