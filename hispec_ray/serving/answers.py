"""OpenAI's answers in plain data: whole ones, the chunks of a stream, errors; and what a coordinator sends to be written so."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_LONGEST_MESSAGE, _LONGEST_PARAM = 800, 200  # characters


class Spelled(NamedTuple):
    """A token as a client sees it: its text (U+FFFD where it has only a part of a character) and bytes; a special token has no bytes."""

    text: str
    bytes: bytes


class Entry(NamedTuple):
    """A token's log-probability and those of the likeliest tokens in its place, the likeliest first.

    logprob: None for a prompt's first token. offset: characters of the choice's text before it.
    """

    token: Spelled
    logprob: float | None
    top: tuple[tuple[Spelled, float], ...]
    offset: int


class CallPart(NamedTuple):
    """A piece of a tool call: the first of each has an id and the name, the others more of the arguments."""

    number: int
    id: str | None
    name: str | None
    arguments: str


class Delta(NamedTuple):
    """What steps added to one choice.

    number: the choice's index; text: to be shown now; tokens: that the request pays for; reason: in the last one why it ended.
    entries: log-probabilities, where asked for, of the tokens whose text is shown. levels: (token id, level that chose it first), where
    asked for.
    """

    number: int
    text: str = ""
    tokens: int = 0
    reason: str | None = None
    entries: tuple[Entry, ...] = ()
    calls: tuple[CallPart, ...] = ()
    levels: tuple[tuple[int, str], ...] = ()


def joined_calls(parts: Iterable[CallPart]) -> tuple[CallPart, ...]:
    """Return the parts, in their order, with those of one call made one: clients expect a call once in an answer, and once in a chunk."""
    calls: dict[int, CallPart] = {}
    for part in parts:
        known = calls.get(part.number)
        calls[part.number] = part if known is None else known._replace(arguments=known.arguments + part.arguments)
    return tuple(calls.values())


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return what the deltas of one choice, in their order and at least one, come to."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        deltas[0].number,
        "".join([delta.text for delta in deltas]),
        sum([delta.tokens for delta in deltas]),
        deltas[-1].reason,
        tuple(chain.from_iterable(delta.entries for delta in deltas)),
        joined_calls([part for delta in deltas for part in delta.calls]),
        tuple(chain.from_iterable(delta.levels for delta in deltas)),
    )


@dataclass(frozen=True, slots=True)
class Started:
    """The first thing that a coordinator sends for a job that it took on: the tokens of each prompt."""

    prompt_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request is not answered, or not to its end."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def of_param(self, param: str | None) -> Failure:
        return replace(self, param=param)


Item = Started | Failure | list[Delta]
"""What travels from a coordinator to an ingress: Started and then deltas until every choice has ended; or a Failure, as the last."""


class RequestFailed(Exception):
    """Ends the handling of a request with a Failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


NOT_READY = Failure(503, "The server is not ready: the engine has stopped and is being replaced; try again", headers={"Retry-After": "10"})
NO_KEY = Failure(
    401,
    "There is no valid API key; send one as `Authorization: Bearer KEY`",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
TOO_COMPLEX = Failure(
    400, "The grammar of this answer became more complex than the server allows; simplify its schema", "grammar", "grammar_too_complex"
)
SERVER_FAILURE = Failure(500, "The server had an error while answering; the server's log has more")


def error(failure: Failure) -> dict[str, Any]:
    """The body of every answer that is not 200, and of a stream's event that ends it early."""
    kind = _TYPES.get(failure.status, "invalid_request_error")
    param = None if failure.param is None else _short(failure.param, _LONGEST_PARAM)
    return {"error": {"message": _short(failure.message, _LONGEST_MESSAGE), "type": kind, "param": param, "code": failure.code}}


def _short(text: str, most: int) -> str:
    """Cut the middle out of a text of more than `most` characters: what a client sent, or a library said of it, may be of any length."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}


class Answer(ABC):
    """Writes the answer to one request. `id` and `created` are those of all its chunks.

    logprobs, trace: whether they were asked for.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, *, logprobs: bool = False, trace: bool = False) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.logprobs = logprobs
        self.trace = trace

    def whole(self, choices: Sequence[Delta], counts: dict[str, int]) -> dict[str, Any]:
        """The answer in one piece, from what each choice came to."""
        return {**self._head(self.whole_object), "choices": [self._traced(self.choice(c), c) for c in choices], "usage": counts}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks for a delta; none where there is nothing to show."""
        pieces = self.pieces(delta)
        if pieces and self.trace:
            pieces[0] = self._traced(pieces[0], delta)
        return [self.chunk(piece) for piece in pieces]

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [choice]}

    def usage_chunk(self, counts: dict[str, int]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": counts}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _traced(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        if not self.trace:
            return choice
        return choice | {"hispec": {"token_ids": [id for id, _ in delta.levels], "levels": [level for _, level in delta.levels]}}

    @abstractmethod
    def choice(self, whole: Delta) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a choice's chunks begin with."""

    @abstractmethod
    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks' choices for a delta."""


class CompletionAnswer(Answer):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def choice(self, whole: Delta) -> dict[str, Any]:
        return {"index": whole.number, "text": whole.text, "logprobs": self._lists(whole.entries), "finish_reason": whole.reason}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.choice(delta)] if delta.text or delta.reason or delta.entries or delta.levels else []

    def _lists(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [_in_lists(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [None if entry.logprob is None else _map(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }


def _map(entry: Entry) -> dict[str, float]:
    """The likeliest tokens and the token itself. Of several with one text the likeliest stands."""
    logprobs: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        assert logprob is not None
        logprobs.setdefault(_in_lists(token), logprob)
    return logprobs


def _in_lists(token: Spelled) -> str:
    """OpenAI's way to name a token that is no text of its own."""
    try:
        return token.bytes.decode() or token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, whole: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        if whole.calls:
            calls = [_call(part) for part in whole.calls]
            message |= {"content": whole.text or None, "tool_calls": calls}
        return {"index": whole.number, "message": message, "logprobs": self._content(whole.entries), "finish_reason": whole.reason}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""}, None)]

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            said["tool_calls"] = [{"index": part.number} | _call(part) for part in delta.calls]
        pieces = [self._delta(delta.number, said, None, delta.entries)] if said or delta.entries or delta.levels else []
        if delta.reason:
            pieces.append(self._delta(delta.number, {}, delta.reason))
        return pieces

    def _delta(self, index: int, said: dict[str, Any], reason: str | None, entries: Sequence[Entry] = ()) -> dict[str, Any]:
        return {"index": index, "delta": said, "logprobs": self._content(entries) if entries else None, "finish_reason": reason}

    def _content(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [_scored(e.token, e.logprob) | {"top_logprobs": [_scored(token, logprob) for token, logprob in e.top]} for e in entries]
        return {"content": content, "refusal": None}


def _scored(token: Spelled, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.bytes)}


def _call(part: CallPart) -> dict[str, Any]:
    if part.id is None:
        return {"function": {"arguments": part.arguments}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
