"""The HTTP side over a coordinator in the same process: statuses, bodies, streams, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import CONTEXT, FakeEngine
from ray.exceptions import ActorDiedError, ActorUnavailableError

from hispec_ray.config import Settings
from hispec_ray.request import EngineDeadError, FinishReason, GenerationRequest, TokenDelta
from hispec_ray.serving.answers import usage
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import RemoteCoordinator, create_app
from hispec_ray.serving.keys import Keys
from hispec_ray.serving.wire import Delta, Item, Job, Started

MODEL = "models/M"
LIMIT = 10_000
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def app(engine: FakeEngine) -> Any:
    return create_app(Coordinator(Settings(), load=lambda settings: engine), MODEL, LIMIT)


def send(
    method: str, path: str, body: Any = None, engine: FakeEngine | None = None, over: Any = None, headers: Any = None
) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(over or app(engine or FakeEngine()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(request())


def complete(engine: FakeEngine | None = None, **fields: Any) -> httpx.Response:
    return send("POST", "/v1/completions", COMPLETION | fields, engine)


def chat(engine: FakeEngine | None = None, **fields: Any) -> httpx.Response:
    return send("POST", "/v1/chat/completions", CHAT | fields, engine)


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events, which must end with one [DONE]."""
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    data = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The body is OpenAI's and nothing else; return its message."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert body["error"]["type"] == {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(status, "invalid_request_error")
    message: str = body["error"]["message"]
    return message


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


class Broken:
    """A coordinator that raises, before or amid an answer."""

    def __init__(self, *before: Item, death: Exception | None = None) -> None:
        self.before = before
        self.death = death or ConnectionError("a secret of the cluster")

    async def generate(self, job: Job) -> AsyncGenerator[Item]:
        for item in self.before:
            yield item
        raise self.death

    async def tokenize_only(self, asked: Any) -> Any:
        raise self.death

    detokenize = tokenize_only

    async def health(self) -> dict[str, float]:
        raise ConnectionError("a secret of the cluster")


class Replica(Broken):
    """Such a coordinator behind what looks like its Serve handle."""

    def options(self, stream: bool) -> Replica:
        return self

    @property
    def generate(self) -> Any:
        return SimpleNamespace(remote=super().generate)

    @property
    def tokenize_only(self) -> Any:
        return SimpleNamespace(remote=super().tokenize_only)


@pytest.mark.parametrize("death", [ActorDiedError(), ActorUnavailableError("a secret of the cluster", None)])
def test_a_replica_that_dies_asks_to_come_back(death: Exception) -> None:
    def gone(*before: Item) -> Any:
        return create_app(RemoteCoordinator(Replica(*before, death=death)), MODEL, LIMIT)  # type: ignore[arg-type]

    for stream in (False, True):
        response = send("POST", "/v1/completions", COMPLETION | {"stream": stream}, over=gone())
        assert "secret" not in assert_error(response, 503)
        assert response.headers["retry-after"] == "10"
    begun = gone(Started([2]), [Delta(0, "Hello", 5)])
    assert_error(send("POST", "/v1/completions", COMPLETION, over=begun), 503)
    response = send("POST", "/v1/completions", COMPLETION | {"stream": True}, over=begun)
    first, last = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n") if event]
    assert first["choices"][0]["text"] == "Hello"
    assert "not ready" in last["error"]["message"]


def test_a_coordinator_that_is_gone_is_a_server_error() -> None:
    broken = create_app(Broken(), MODEL, LIMIT)
    assert "secret" not in assert_error(send("POST", "/v1/completions", COMPLETION, over=broken), 500)
    assert "secret" not in assert_error(send("GET", "/health", over=broken), 503)


def test_a_path_or_method_that_does_not_exist() -> None:
    assert "/nowhere" in assert_error(send("GET", "/nowhere"), 404)
    assert_error(send("POST", "/v1/completions/"), 404)
    response = send("GET", "/v1/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_body_over_the_limit() -> None:
    assert_error(complete(prompt="x" * LIMIT), 413)
    assert_error(complete(prompt="x" * (LIMIT - 100)), 400, "prompt", "context_length_exceeded")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HERMES_TEMPLATE = "{% for m in tools %}<tool_call>{% endfor %}"


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
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 5}'
    assert next(call.get("function").get("name") for call in calls) == "add"
    assert not any(delta.get("content") for delta in deltas)


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


def test_tokens() -> None:
    body = send("POST", "/tokenize", {"model": MODEL, "prompt": "Hi", "return_token_strs": True}).json()
    assert body == {"count": 2, "max_model_len": CONTEXT, "tokens": [72, 105], "token_strs": ["H", "i"]}
    asked = {"model": MODEL, "messages": CHAT["messages"]}
    assert send("POST", "/tokenize", asked).json()["tokens"] == [72, 105]
    assert send("POST", "/detokenize", {"model": MODEL, "tokens": [72, 105]}).json() == {"prompt": "Hi"}
    assert "from 0 to 999" in assert_error(send("POST", "/detokenize", {"model": MODEL, "tokens": [1000]}), 400, "tokens")
    assert_error(send("POST", "/tokenize", {"model": "gpt-4", "prompt": "Hi"}), 404, "model", "model_not_found")
    broken = create_app(RemoteCoordinator(Replica(death=ActorDiedError())), MODEL, LIMIT)  # type: ignore[arg-type]
    assert_error(send("POST", "/tokenize", {"model": MODEL, "prompt": "Hi"}, over=broken), 503)


def test_version() -> None:
    assert send("GET", "/version").json() == {"version": version("hispec-ray")}


def test_keys_let_in_who_has_one() -> None:
    guarded = create_app(Coordinator(Settings(), load=lambda settings: FakeEngine()), MODEL, LIMIT, Keys(["one", "two"]))

    def status(path: str, header: str | None) -> httpx.Response:
        async def request() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://server") as client:
                return await client.get(path, headers={} if header is None else {"Authorization": header})

        return asyncio.run(request())

    for header in ("Bearer one", "bearer two", "Bearer  two "):
        assert status("/v1/models", header).status_code == 200
    for header in (None, "", "Bearer", "Bearer ", "Bearer three", "one", "Basic one", "Bearer one two", "Bearer onetwo"):
        for path in ("/v1/models", "/v1/nothing", "/version", "/openapi.json", "/health/", "//health"):
            response = status(path, header)
            assert_error(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    assert status("/health", None).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/some/prefix/health", 200), ("/some/prefix/version", 401), ("/some/prefix/some/prefix/health", 401), ("/some/prefixes/health", 401)],
)
def test_health_needs_no_key_under_a_route_prefix(path: str, status: int) -> None:
    guarded = create_app(Coordinator(Settings(), load=lambda settings: FakeEngine()), MODEL, LIMIT, Keys(["one"]))
    assert asyncio.run(raw(guarded, path, root_path="/some/prefix"))[0]["status"] == status


def test_a_query_may_be_any_bytes() -> None:
    for path, method, status in (("/nowhere", "GET", 404), ("/v1/completions", "GET", 405), ("/version", "GET", 200)):
        start, body = asyncio.run(raw(app(FakeEngine()), path, method=method, query_string=b"a=\xff\xfe"))
        assert start["status"] == status
        assert status == 200 or json.loads(body["body"])["error"]["message"].endswith(f"{method} {path}")


async def raw(over: Any, path: str, **scope: Any) -> list[Any]:
    """What an app sends for a request that no HTTP client would make so."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def collect(message: Any) -> None:
        sent.append(message)

    usual: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    await over(usual | scope, receive, collect)
    return sent


def test_models() -> None:
    listed = send("GET", "/v1/models").json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert send("GET", f"/v1/models/{MODEL}").json() == listed["data"][0]
    assert_error(send("GET", "/v1/models/gpt-4"), 404, "model", "model_not_found")


def test_health() -> None:
    assert send("GET", "/health").json() == {"status": "ok", "running": 0, "waiting": 0, "kv_usage": 0.0}
    dead = FakeEngine()
    dead.close()
    response = send("GET", "/health", engine=dead)
    assert_error(response, 503)
    assert response.headers["retry-after"] == "10"


def document(keys: Keys | None = None) -> Any:
    written = create_app(Coordinator(Settings(), load=lambda settings: FakeEngine()), MODEL, LIMIT, keys)
    headers = {"Authorization": "Bearer one"} if keys else None
    response = send("GET", "/openapi.json", over=written, headers=headers)
    assert response.status_code == 200
    return response.json()


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {value["$ref"]} if isinstance(value.get("$ref"), str) else set().union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_openapi_document_has_the_bodies() -> None:
    written = document()
    for path, name in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        schema = written["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert "temperature" in written["components"]["schemas"][name]["properties"]
        assert written["components"]["schemas"][name]["properties"]["model"]["enum"] == [MODEL]
    for reference in references(written):
        place = written
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_the_openapi_document_has_the_answers_and_the_errors() -> None:
    written = document()
    operations = {path: operation for path, methods in written["paths"].items() for operation in methods.values()}
    for path, operation in operations.items():
        answers = operation["responses"]
        assert answers["200"]["content"]["application/json"]["schema"]["$ref"].startswith("#/components/schemas/")
        assert ("text/event-stream" in answers["200"]["content"]) == path.endswith("/completions")
        assert {"200", "401", "404", "405", "500"} <= answers.keys()
        assert all(answer == {"$ref": f"#/components/responses/{status}"} for status, answer in answers.items() if status != "200")
    assert {"400", "413", "429", "503"} < operations["/v1/completions"]["responses"].keys()
    for answer in written["components"]["responses"].values():
        assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


def test_the_openapi_document_says_where_a_key_is_needed() -> None:
    guarded, open_to_all = document(Keys(["one"])), document()
    assert guarded["security"] == [{"key": []}]
    assert [path for path, methods in guarded["paths"].items() if methods.get("get", {}).get("security") == []] == ["/health"]
    assert "security" not in open_to_all


def test_a_client_that_goes_away_within_its_body_is_no_failure_of_the_server() -> None:
    engine = FakeEngine()
    messages = [{"type": "http.request", "body": b'{"model"', "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def collect(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(app(engine)(scope, receive, collect))
    assert sent[0]["status"] == 400
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["nothing", "something"])
def test_a_client_that_goes_away_frees_its_sequences(stream: bool, after: str) -> None:
    engine = FakeEngine()

    async def leave() -> None:
        engine.gate = asyncio.Event()
        body = json.dumps(COMPLETION | {"stream": stream, "n": 2}).encode()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def collect(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        call = asyncio.ensure_future(app(engine)(scope, receive, collect))
        while not (len(sent) > 1 if stream and after == "something" else engine.running):
            await asyncio.sleep(0)
        call.cancel()  # what Ray Serve does when the client has gone
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not engine.running
        assert len(engine.aborted) == 2

    asyncio.run(asyncio.wait_for(leave(), 10))
