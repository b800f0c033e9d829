"""OpenAI's answers in plain data: whole ones, the chunks of a stream, errors."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hispec_ray.engine.tools import CallPart
from hispec_ray.serving.wire import Delta, Entry, Failure, Spelled

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_LONGEST_MESSAGE, _LONGEST_PARAM = 800, 200  # characters


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
