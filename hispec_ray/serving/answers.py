"""OpenAI's answers in plain data: whole ones, the chunks of a stream, errors; and what a coordinator sends to be written so."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}

Delta = tuple[int, str, int, str | None]
"""What a step added to one choice: its index, text, tokens, and in the last one why it ended."""


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
SERVER_FAILURE = Failure(500, "The server had an error while answering; the server's log has more")


def error(failure: Failure) -> dict[str, Any]:
    """The body of every answer that is not 200, and of a stream's event that ends it early."""
    kind = _TYPES.get(failure.status, "invalid_request_error")
    return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}


class Answer(ABC):
    """Writes the answer to one request. `id` and `created` are those of all its chunks."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    def whole(self, choices: Sequence[tuple[str, str]], counts: dict[str, int]) -> dict[str, Any]:
        """The answer in one piece, from the text and the finish reason of each choice."""
        written = [self.choice(index, text, reason) for index, (text, reason) in enumerate(choices)]
        return {**self._head(self.whole_object), "choices": written, "usage": counts}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [choice]}

    def usage_chunk(self, counts: dict[str, int]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": [], "usage": counts}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @abstractmethod
    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a choice's chunks begin with."""

    @abstractmethod
    def pieces(self, index: int, text: str, reason: str | None) -> list[dict[str, Any]]:
        """The chunks' choices for a delta; none where there is nothing to show."""


class CompletionAnswer(Answer):
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def pieces(self, index: int, text: str, reason: str | None) -> list[dict[str, Any]]:
        return [self.choice(index, text, reason)] if text or reason else []


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""}, None)]

    def pieces(self, index: int, text: str, reason: str | None) -> list[dict[str, Any]]:
        pieces = [self._delta(index, {"content": text}, None)] if text else []
        if reason:
            pieces.append(self._delta(index, {}, reason))
        return pieces

    def _delta(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
