"""Requests that no client should send, for hypothesis: bodies with one to three things broken, odd schemas, bytes, headers and paths."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from serving.live import COUNTING, MODEL, QUESTION

MOST_BYTES = 4 * 2**20  # of a body; the server's default
TOKENS = 2  # the most that a generated request may ask for


@dataclass(frozen=True)
class Request:
    """A request as it goes over the wire.

    raw: all of it, where it is not HTTP as the proxy in front of the application knows it, which then answers in words of its own.
    """

    path: str = "/v1/completions"
    body: bytes = b""
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    chunked: bool = False
    raw: bytes = b""

    def __repr__(self) -> str:
        return repr(self.raw) if self.raw else f"{self.method} {self.path!r:.200} {str(self.headers)[:300]} {self.body[:2000]!r}"

    def wire(self) -> bytes:
        if self.raw:
            return self.raw
        given = {name.lower() for name, _ in self.headers}
        length = ("Transfer-Encoding", "chunked") if self.chunked else ("Content-Length", str(len(self.body)))
        usual = [("Host", "localhost"), ("Content-Type", "application/json")]
        headers = [length, *((name, value) for name, value in usual if name.lower() not in given), *self.headers]
        head = "\r\n".join([f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""])
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.body), self.body) if self.chunked and self.body else self.body
        return head.encode("latin-1") + (body or b"0\r\n\r\n" * self.chunked)


def _one(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """One of the values. `sampled_from` would spell them all out, and some are long."""
    return st.integers(0, len(values) - 1).map(lambda place: values[place])


def _one_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """A copy of one of the values, which may be changed further."""
    return _one(values).map(copy.deepcopy)


def _tool(name: str = "add", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Adds", "parameters": {"type": "object"} | parameters}}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


_NUMBER = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
_PARTS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
_CALLED = [*QUESTION, {"role": "assistant", "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "5"}]
_COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 5, "echo": True, "max_tokens": 0},
    {"n": 2, "temperature": 1.2, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "best_of": 2},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5, "6": -100}},
    {"stop": ["8, 9", "x"], "stop_token_ids": [5], "min_tokens": 1, "ignore_eos": True},
    {"stream": True, "stream_options": {"include_usage": True}, "hispec": {"method": "plain", "trace": True}},
    {"prompt": ["Hi", "Ho"], "user": "me", "stop": "x"},
    {"prompt": [5, 6, 7], "stream": True, "logprobs": 1},
    {"prompt": [[5, 6], [7]], "suffix": None},
]
_CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 3, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"tools": [_tool(**_NUMBER), _tool("other")], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [_tool(**_NUMBER)], "tool_choice": {"type": "function", "function": {"name": "add"}}, "stream": True},
    {"tools": [_tool(**_NUMBER)], "messages": _CALLED, "hispec": {"method": "hispec", "trace": True}},
    {"response_format": {"type": "json_object"}, "max_completion_tokens": TOKENS},
    {"response_format": _schema({"type": "object"} | _NUMBER)},
    {"response_format": _schema({"type": "array", "items": {"enum": ["a", 5]}}), "stream": True, "seed": 1, "temperature": 1.0},
    {"messages": _PARTS, "stop": ["a"], "logit_bias": {"5": 1}},
]
VALID: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"model": MODEL, "prompt": COUNTING, "max_tokens": TOKENS} | more) for more in _COMPLETIONS),
    *(("/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "max_tokens": TOKENS} | more) for more in _CHATS),
    ("/tokenize", {"model": MODEL, "prompt": "Hi", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"model": MODEL, "messages": _CALLED, "add_generation_prompt": False}),
    ("/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
]
"""A request of every feature."""

# What no dictionary can say stands in it under these names.
_SPELLED = {f"@{depth} lists@": "[" * depth + "]" * depth for depth in (50, 101, 130, 500, 980, 5000)}
_SPELLED |= {f"@{depth} objects@": '{"a":' * depth + "1" + "}" * depth for depth in (50, 101, 130, 500, 980, 5000)}
_SPELLED |= {
    "@digits@": "9" * 5000,
    "@1e999@": "1e999",
    "@-1e999@": "-1e999",
    "@007@": "007",
    "@+1@": "+1",
    "@.5@": ".5",
    "@twice@": '{"a":1,"a":2}',
}


def spelled(content: Any) -> bytes:
    text = json.dumps(content)
    for name, raw in _SPELLED.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


def _wide(depth: int) -> Any:
    return ["x" * 9] * 6 if not depth else [_wide(depth - 1) for _ in range(6)]


_STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 7, 16, 129, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.5, 1.5, 3.0, -0.0,
    1e308, 5e-324, float("nan"), float("inf"), -float("inf"), "", " ", "x", "5", "true", "text", "a" * 300, "é" * 100, "\0", "\ud83d",
    "\udc00x", "\u202e", "🎉", "<|im_end|>", "{{ 1 / 0 }}", [], {}, [[]], [None], [1, "a"], ["a", 1], [[1], "a"], [-1], [49152], [2**70],
    {"": 0}, {"a": {"b": []}}, {"type": "x"}, {"\ud83d": 1}, {"k" * 3000: 1}, _wide(4), *_SPELLED,
]  # fmt: skip
_NAMES = [
    "", "x", "model", "temperature", "messages", "prompt", "tools", "functions", "suffix", "k" * 3000, "\ud83d", "\0", "a.b", "~one", "0",
]  # fmt: skip
_SMALL = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
strange: st.SearchStrategy[Any] = _one_of(_STRANGE) | _one_of(_STRANGE) | _SMALL


def _tree(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {name: _tree(depth - 1) for name in "ab"}} if depth else {"type": "string"}


_SCHEMAS: list[Any] = [
    {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "http://localhost/x"}, {"$ref": 5}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}},
    {"$id": "\ud83d"}, {"not": {}}, {"type": "array", "uniqueItems": True}, {"type": ["string", "x"]}, {"type": []}, {"enum": []},
    {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]$"},
    {"const": None}, {"type": "string", "pattern": "(a{1000}){1000}"}, {"type": "string", "pattern": "(.*a){30}"},
    {"type": "string", "pattern": 5}, {"type": "string", "minLength": 10**9}, {"type": "string", "maxLength": 10**9},
    {"type": "string", "minLength": 5, "maxLength": 4}, {"type": "string", "maxLength": 10**30}, {"type": "string", "format": "nonsense"},
    {"type": "string", "format": "date-time"}, {"type": "array", "minItems": 10**6}, {"type": "array", "items": False, "minItems": 1},
    {"prefixItems": [{}] * 500}, {"type": "integer", "minimum": 5, "maximum": 4},
    {"type": "integer", "minimum": -(10**300), "maximum": 10**300}, {"type": "number", "multipleOf": 1e-300},
    {"type": "integer", "multipleOf": 0}, {"type": "number", "maximum": float("nan")},
    {"type": "object", "properties": {"a": False}, "required": ["a"]}, {"type": "object", "properties": {"\ud83d": {}}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}, {"type": "object", "patternProperties": {"(": {}}},
    {"type": "object", "properties": {f"p{i}": {} for i in range(400)}, "required": [f"p{i}" for i in range(400)]},
    {"anyOf": [_tree(1) | {"title": str(i)} for i in range(100)]}, {"anyOf": []}, {"oneOf": [{}, {}]},
    {"allOf": [{"type": "string"}, {"type": "number"}]}, {"type": "x" * 3000},
    {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(8)]},
    {"enum": [f"v{i}" for i in range(2000)]}, {"enum": ["x" * 5000, 10**400]}, _tree(7), {"description": "x" * 10_000},
    {"x-guidance": {"whitespace_pattern": "("}}, {"x-guidance": 5}, {"if": {}, "then": {}}, {"dependentRequired": {"a": ["b"]}}, {},
    *({"const": name} for name in _SPELLED),
]  # fmt: skip
_KEYWORDS = [
    "type", "enum", "const", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "pattern", "format", "minimum",
    "maxLength", "minItems", "additionalProperties", "prefixItems", "multipleOf", "description",
]  # fmt: skip
_TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"]
_drawn_schemas = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(_TYPES)}) | st.dictionaries(st.sampled_from(_KEYWORDS), strange, max_size=3),
    lambda inner: st.dictionaries(
        st.sampled_from(_KEYWORDS), inner | st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner)
    ),
    max_leaves=8,
)
schemas: st.SearchStrategy[Any] = _one_of(_SCHEMAS) | _drawn_schemas


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside, as what holds it and its key or index there."""
    if isinstance(content, dict | list):
        for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
            yield content, key
            yield from _places(value)


def _remove(holder: Any, key: Any, draw: st.DrawFn) -> None:
    del holder[key]


def _replace(holder: Any, key: Any, draw: st.DrawFn) -> None:
    holder[key] = draw(strange)


def _repeat(holder: Any, key: Any, draw: st.DrawFn) -> None:
    value = holder[key]
    times = draw(st.sampled_from([1, 2, 17, 3000]))
    holder[key] = (value if isinstance(value, list) else [value]) * min(times, 1 + MOST_BYTES // len(spelled(value)))


def _scale(holder: Any, key: Any, draw: st.DrawFn) -> None:
    value = holder[key]
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    holder[key] = value * draw(st.sampled_from([-1, 1000, 1e-9, 10**20])) if numeric else {"x": value}


def _add(holder: Any, key: Any, draw: st.DrawFn) -> None:
    if isinstance(holder, dict):
        name = draw(_one_of(_NAMES))
        holder[name] = draw(strange)
    else:
        holder.append(draw(strange))


def _borrow(holder: Any, key: Any, draw: st.DrawFn) -> None:
    """A field of another request."""
    _, other = draw(_one_of(VALID))
    name = draw(st.sampled_from(sorted(other)))
    if isinstance(holder, dict):
        holder[name] = other[name]


_CHANGES: list[Callable[[Any, Any, st.DrawFn], None]] = [_remove, _replace, _replace, _repeat, _scale, _add, _borrow]


def _bounded(path: str, content: Any) -> Any:
    """Let no answer be long, whatever else is asked."""
    if isinstance(content, dict) and path.startswith("/v1"):
        for name in ("max_tokens", "max_completion_tokens"):
            if type(content.get(name)) is int and TOKENS < content[name] < 2048:
                content[name] = TOKENS
        if content.get("max_tokens") is None and content.get("max_completion_tokens") is None:
            content["max_tokens"] = TOKENS
    return content


@st.composite
def broken_bodies(draw: st.DrawFn) -> Request:
    """A valid request with one to three things changed; some stay valid."""
    path, content = draw(_one_of(VALID))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(content))
        if not places:
            break
        change = draw(st.sampled_from(_CHANGES))
        change(*draw(_one(places)), draw)
        if change is _repeat:  # what is repeated is one object: changed further, it might grow beyond measure
            break
    return Request(path, spelled(_bounded(path, content)))


@st.composite
def strange_schemas(draw: st.DrawFn) -> Request:
    schema, stream = draw(schemas), draw(st.booleans())
    wanted = {"response_format": _schema(schema)}
    if draw(st.integers(0, 2)) == 2:
        wanted = {"tools": [_tool() | {"function": {"name": "f", "parameters": schema}}], "tool_choice": "required"}
    return Request("/v1/chat/completions", spelled({"model": MODEL, "messages": QUESTION, "max_tokens": TOKENS, "stream": stream} | wanted))


_NO_TEXT = [
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82",
    b"\0",
    b"\x1b",
    b'"',
    b"{",
    b"]",
    b",",
    b"\\",
    b"\\u12",
    b"//",
]
_PLAIN_BODY = spelled({"model": MODEL, "prompt": "Hé 🎉", "max_tokens": 1, "stream": True})
_BODIES = [
    b"", b" ", b"null", b"5", b"[]", b'"a"', b"{}", b"NaN", b"{'a': 1}", b"a=1&b=2", b"[" * 100_000, b'{"a":' * 100_000, b"{" * 100_000,
    b"\xff" * 99, _PLAIN_BODY * 2, b"\xef\xbb\xbf" + _PLAIN_BODY, _PLAIN_BODY.decode().encode("utf-16"),
    _PLAIN_BODY.decode().encode("utf-32"), b"\x1f\x8b\x08\0\0\0\0\0\0\3", _PLAIN_BODY.replace(b":", b": " * 999),
]  # fmt: skip


@st.composite
def broken_bytes(draw: st.DrawFn) -> Request:
    """A body that ends too early, or has bytes in it that are none of JSON's."""
    if draw(st.booleans()):
        request = Request(draw(_one_of(VALID))[0], draw(_one_of(_BODIES) | st.binary(max_size=40)))
    else:
        path, content = draw(_one_of(VALID))
        body = spelled(content)
        place = draw(st.integers(0, len(body) - 1))
        request = Request(path, body[:place] + draw(st.sampled_from([b"", *(piece + body[place:] for piece in _NO_TEXT)])))
    return replace(request, chunked=draw(st.booleans()))


_TYPES_OF_CONTENT = [
    "", "text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
    "application/octet-stream", "a" * 5000, "\xff", ";;;", "application/json, text/html",
]  # fmt: skip
_HEADERS = [
    ("Accept", "image/png"), ("Accept-Encoding", "identity;q=0"), ("Authorization", "Basic \xff"), ("Connection", "close"),
    ("Content-Encoding", "gzip"), ("Cookie", "a=b; " * 4000), ("Expect", "100-continue"), ("Host", "["), ("Host", ""), ("Host", "\xff"),
    ("If-None-Match", "*"), ("Origin", "null"), ("Range", "bytes=0-1"), ("traceparent", "\xff"), ("serve_multiplexed_model_id", "x"),
    ("x-session-id", "x"), ("x-request-id", "x" * 3000), ("X-Forwarded-For", "::1, " * 500), ("X-HTTP-Method-Override", "DELETE"),
    ("X-Empty", ""), ("X-Bytes", "\x80\xff"), ("Upgrade", "h2c"),
]  # fmt: skip
_PATHS = [
    "/", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/v1//completions", "/V1/completions", "/v1/completions%00", "/v1/chat",
    "/v1/embeddings", "/v1/models/", "/v1/models/x", "/v1/models/%00%ff", "/v1/models/" + "x" * 5000, "/v1/../etc/passwd", "/%2e%2e/x",
    "/%ff", "/[", "//[", "/-/x", "/docs", "/v1/nothing?" + "a=b&" * 999, "/v1/completions?stream=true", "/v1/" + "x" * 5000,
    "http://localhost/v1/nothing", "/v1/nothing#x", "/x;y=z", "/v1/nothing?a=%ff",
]  # fmt: skip
_METHODS = ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "POST"]


@st.composite
def odd_envelopes(draw: st.DrawFn) -> Request:
    """A request whose method, path or headers are odd."""
    path, content = draw(_one_of(VALID))
    request = Request(path, spelled(content), chunked=draw(st.booleans()))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return replace(request, method=draw(st.sampled_from(_METHODS)), path=draw(_one_of([path, *_PATHS])))
    if kind == 1:
        return replace(request, headers=(("Content-Type", draw(_one_of(_TYPES_OF_CONTENT))),))
    if kind == 2:
        return replace(request, headers=tuple((f"X-{number}", "x") for number in range(500)))
    return replace(request, headers=tuple(draw(st.lists(_one_of(_HEADERS), min_size=1, max_size=3))))


_TOO_LARGE = [b" " * (MOST_BYTES + 1), b'{"prompt": "' + b"a" * MOST_BYTES + b'"}', _PLAIN_BODY + b" " * 2 * MOST_BYTES]
_NEARLY = [
    Request(path, f'{{"model": "{MODEL}", {fields} "{name}": [{first}{more * ((MOST_BYTES - 200) // len(more))}]}}'.encode())
    for path, fields, name, first, more in (
        ("/v1/completions", "", "prompt", "1", ',"a"'),
        ("/v1/completions", '"max_tokens": 1, "n": 128, "echo": true,', "prompt", "1", ",1"),
        ("/v1/completions", '"max_tokens": 1, "logprobs": 1, "echo": true,', "prompt", "[1]", ",[1]"),
        ("/v1/completions", "", "stop", '"a"', ",5"),
        ("/v1/chat/completions", "", "messages", "5", ",{}"),
        ("/v1/chat/completions", "", "messages", '{"role": "user", "content": "a"}', ',{"role": "user", "content": "a"}'),
        ("/detokenize", "", "tokens", '"a"', ",1"),
        ("/detokenize", "", "tokens", "1", ",1"),
    )
]


@st.composite
def large_bodies(draw: st.DrawFn) -> Request:
    """A body over the limit, or one just below it: a million things in it, wrong or only too many."""
    too_large = st.builds(Request, st.sampled_from(sorted({path for path, _ in VALID})), _one_of(_TOO_LARGE))
    return replace(draw(too_large | _one_of(_NEARLY)), chunked=draw(st.booleans()))


_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
not_http = _one_of(
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n", b"GET nothing HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET /v1/nothing?a=\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        _HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", _HEAD + b"Content-Length: -1\r\n\r\n",
        _HEAD + b"Content-Length: x\r\n\r\n",
        _HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        _HEAD + b"no colon\r\n\r\n", _HEAD + b"Bad Name: x\r\n\r\n", _HEAD + b"X: a\0b\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    ]
).map(lambda raw: Request(raw=raw))  # fmt: skip


@st.composite
def bad_requests(draw: st.DrawFn) -> Request:
    """Mostly broken bodies; a large one in thirty."""
    kinds = [(14, broken_bodies()), (5, strange_schemas()), (6, broken_bytes()), (3, odd_envelopes()), (1, not_http), (1, large_bodies())]
    drawn = draw(st.integers(1, sum(weight for weight, _ in kinds)))
    for weight, kind in kinds:
        drawn -= weight
        if drawn <= 0:
            return draw(kind)
    raise AssertionError
