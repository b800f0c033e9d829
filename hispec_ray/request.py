"""What a caller asks for and what comes back: plain data that every room of the house shares."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field, replace
from enum import StrEnum

MAX_SEED = 2**63 - 1
LONGEST_STOP = 1024  # characters


class RequestError(ValueError):
    """A request that cannot be honoured: names the field, the value and the valid range.

    `field` is the request's own field name (None when no single field is to blame); `code` is a
    machine-readable reason where one exists (for example ``context_length_exceeded``).
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str | None, str | None]]:
        return type(self), (self.message, self.field, self.code)


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the caller may try again later."""


class EngineDeadError(RuntimeError):
    """The engine's thread ended on an error; the message is that error's."""


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context's end


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is to be continued.

    temperature: 0 is greedy; up to 2. Under 1e-5 it is taken for 0: so cold a draw is the best token anyway.
    seed: fixes the noise of the choice rule; 0 .. 2**63 - 1. None draws one when the request enters.
    max_tokens: most tokens to write; None means up to the end of the context.
    stop: up to 16 strings of up to 1024 characters; the text ends before the first that appears. A string stands for itself alone.
    ignore_eos: go on past the end-of-sequence token.
    n: independent choices of the same prompt, each with a seed of its own.

    Raises RequestError when a value is out of range.
    """

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("seed", "max_tokens", "n"):
            value = getattr(self, name)
            if (value is not None or name == "n") and (not isinstance(value, int) or isinstance(value, bool)):
                raise RequestError(f"{name} is {value!r}; it must be a whole number", name)
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise RequestError(f"temperature is {self.temperature!r}; it must be a number from 0 to 2", "temperature")
        if not 0.0 <= self.temperature <= 2.0:
            raise RequestError(f"temperature is {self.temperature}; it must be from 0 to 2", "temperature")
        if self.temperature < 1e-5:  # logits divided by less could overflow
            object.__setattr__(self, "temperature", 0.0)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}", "seed")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 0 or more", "max_tokens")
        self._check_stop()
        if not 1 <= self.n <= 128:
            raise RequestError(f"n is {self.n}; it must be from 1 to 128", "n")

    def _check_stop(self) -> None:
        if len(self.stop) > 16:
            raise RequestError(f"stop has {len(self.stop)} strings; at most 16 are allowed", "stop")
        if "" in self.stop:
            raise RequestError("stop has an empty string; each must have at least one character", "stop")
        for text in self.stop:
            if not isinstance(text, str) or len(text) > LONGEST_STOP:
                shown = f"one of {len(text)} characters" if isinstance(text, str) else repr(text)
                raise RequestError(f"stop has {shown}; each must be a text of 1 to {LONGEST_STOP} characters", "stop")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence for the engine: a prompt in token ids and its parameters (with a seed that is set)."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class TokenDelta:
    """What one step added to one request.

    text is what may be shown now: whole characters only, nothing that could still become part of a
    stop string. levels[i] names the level whose own choice token_ids[i] was: "draft", "check" or "full".
    token_ids counts every token that the request pays for, the end-of-sequence token included.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request: the request's own for 0, a hash of both for the rest."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def choices_of(params: SamplingParams) -> tuple[SamplingParams, ...]:
    """Return the parameters of each of the `n` choices, each with n 1 and a seed of its own; one is drawn where params has none."""
    seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
    return tuple(replace(params, n=1, seed=choice_seed(seed, index)) for index in range(params.n))
