"""The HTTP side over a coordinator in the same process: how to ask it, and what every answer must be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject

from hispec_ray.config import Settings
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.document import TextCompletion
from hispec_ray.serving.ingress import create_app
from serving.fake_engine import FakeEngine

MODEL = "models/M"
LIMIT = 10_000
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HERMES_TEMPLATE = "{% for m in tools %}<tool_call>{% endfor %}"
KINDS: dict[str, Any] = {"text_completion": TextCompletion, "chat.completion": ChatCompletion, "chat.completion.chunk": ChatCompletionChunk}
"""OpenAI's types, by what an answer calls itself; TextCompletion is theirs but for two nulls that OpenAI itself sends."""


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
    return valid(send("POST", "/v1/completions", COMPLETION | fields, engine))


def chat(engine: FakeEngine | None = None, **fields: Any) -> httpx.Response:
    return valid(send("POST", "/v1/chat/completions", CHAT | fields, engine))


def valid(response: httpx.Response) -> httpx.Response:
    """A whole answer is what OpenAI's own types say; `events` looks at streams."""
    if response.status_code == 200 and response.headers["content-type"] == "application/json":
        KINDS[response.json()["object"]].model_validate(response.json(), strict=True)
    return response


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events, which must end with one [DONE]."""
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    data = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert data.pop() == "[DONE]"
    found = [json.loads(event) for event in data]
    for chunk in found:
        KINDS[chunk["object"]].model_validate(chunk, strict=True)
    return found


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The body is OpenAI's and nothing else; return its message."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert body["error"]["type"] == {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(status, "invalid_request_error")
    ErrorObject.model_validate(body["error"], strict=True)
    message: str = body["error"]["message"]
    return message


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
