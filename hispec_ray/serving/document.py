"""The OpenAPI document: what each route takes and answers. OpenAI's answers stand there as the `openai` package has them.

That package takes a second or so to import: import this module only where the document is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from openai.types import Completion, Model, completion_choice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from hispec_ray.serving.bodies import ChatBody, CompletionBody, DetokenizeBody, ModelBody, TokenizeBody


class CompletionLogprobs(completion_choice.Logprobs):
    """With echo, the first token of a prompt has no probability; OpenAI's own answers have null there too, though its types do not."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class TextChoice(completion_choice.CompletionChoice):
    """A choice of a completion; in a stream it has no reason before its end."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]
    logprobs: CompletionLogprobs | None = None


class TextCompletion(Completion):
    """The answer of POST /v1/completions, and an event of its stream."""

    choices: list[TextChoice]  # type: ignore[assignment]


class ErrorBody(BaseModel):
    """The body of every answer that is not 200."""

    error: ErrorObject


class ModelList(BaseModel):
    """The models: the one that is served."""

    object: str
    data: list[Model]


class Tokens(BaseModel):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens' names in the tokenizer."""


class Detokenized(BaseModel):
    """The answer of POST /detokenize."""

    prompt: str


class Version(BaseModel):
    """The server's version."""

    version: str


class Health(BaseModel):
    """What runs, what waits, and the share of the cache in use."""

    status: str
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class _Route:
    """answer: of status 200; chunk: of a stream's events, where there are streams; failures: the other statuses, beside `_ANYWHERE`."""

    answer: type[BaseModel]
    failures: Sequence[int] = ()
    body: type[ModelBody] | None = None
    chunk: type[BaseModel] | None = None
    examples: Sequence[dict[str, Any]] = ()


_FAILURES = {
    400: "The request is not valid; `param` names the field",
    401: "There is no valid API key",
    404: "There is no such model, or no such path",
    405: "The path does not have this method",
    413: "The body is larger than the server reads",
    429: "The server is busy",
    500: "The server had an error",
    503: "The server is not ready",
}
_RETRIED = (429, 503)
_ANYWHERE = (401, 404, 405, 500)
_WITH_BODY = (400, 413, 503)
_GENERATING = (*_WITH_BODY, 429)

_PROMPT = {"prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0}
_SAID = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 8, "temperature": 0}
_ROUTES = {
    "/v1/completions": _Route(
        TextCompletion,
        _GENERATING,
        CompletionBody,
        TextCompletion,
        (_PROMPT, _PROMPT | {"stream": True}, _PROMPT | {"echo": True, "logprobs": 1}),
    ),
    "/v1/chat/completions": _Route(
        ChatCompletion,
        _GENERATING,
        ChatBody,
        ChatCompletionChunk,
        (
            _SAID,
            _SAID | {"stream": True, "stream_options": {"include_usage": True}},
            _SAID | {"n": 2, "temperature": 1, "seed": 1, "logprobs": True, "top_logprobs": 2},
            _SAID | {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "integer"}}}},
        ),
    ),
    "/v1/models": _Route(ModelList),
    "/v1/models/{id}": _Route(Model),
    "/tokenize": _Route(
        Tokens, _WITH_BODY, TokenizeBody, examples=({"prompt": "1, 2, 3,", "return_token_strs": True}, {"messages": _SAID["messages"]})
    ),
    "/detokenize": _Route(Detokenized, _WITH_BODY, DetokenizeBody, examples=({"tokens": [33, 28]},)),
    "/version": _Route(Version),
    "/health": _Route(Health, (503,)),
}
_OPEN = ("/health",)  # to all who have no key


def write(app: FastAPI, model: str, guarded: bool) -> dict[str, Any]:
    """Return the document. model: the id that clients use; guarded: whether one needs a key."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = {kind for route in _ROUTES.values() for kind in (route.answer, route.body, route.chunk, ErrorBody) if kind}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    names, schemas = models_json_schema([(kind, "validation") for kind in ordered], ref_template="#/components/schemas/{model}")
    for path, operations in found["paths"].items():
        route = _ROUTES[path]
        for operation in operations.values():
            operation["responses"] = {"200": _answer(route, names)}
            operation["responses"] |= {str(status): _to(f"responses/{status}") for status in sorted((*_ANYWHERE, *route.failures))}
            if route.body:
                content = {"schema": names[route.body, "validation"], "examples": _examples(route.examples, model)}
                operation["requestBody"] = {"required": True, "content": {"application/json": content}}
            for parameter in operation.get("parameters", ()):  # {id} is the only one
                parameter["schema"] = _only(model)
            if guarded and path in _OPEN:
                operation["security"] = []
    for body in (route.body for route in _ROUTES.values() if route.body):
        schemas["$defs"][body.__name__]["properties"]["model"] = _only(model)
    found["components"] = {
        "schemas": schemas["$defs"],
        "responses": {str(status): _failure(status, names[ErrorBody, "validation"]) for status in _FAILURES},
    }
    if guarded:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _only(model: str) -> dict[str, Any]:
    return {"type": "string", "enum": [model]}


def _to(place: str) -> dict[str, Any]:
    return {"$ref": f"#/components/{place}"}


def _answer(route: _Route, names: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": names[route.answer, "validation"]}}
    if route.chunk:
        # What OpenAPI 3.2 and FastAPI call an event. An error in the midst of an answer is the last event.
        payload = {"anyOf": [names[route.chunk, "validation"], names[ErrorBody, "validation"]]}
        data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}]}
        content["text/event-stream"] = {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
    return {"description": "The answer; events where `stream` is true" if route.chunk else "The answer", "content": content}


def _failure(status: int, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": _FAILURES[status], "content": {"application/json": {"schema": body}}}
    if status in _RETRIED:
        answer["headers"] = {"Retry-After": {"description": "Seconds after which to come back", "schema": {"type": "integer"}}}
    return answer


def _examples(bodies: Sequence[dict[str, Any]], model: str) -> dict[str, Any]:
    return {f"example {number}": {"value": {"model": model} | body} for number, body in enumerate(bodies, 1)}
