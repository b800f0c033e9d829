"""What a caller asks for and what comes back: plain data that every room of the house shares."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

MAX_SEED = 2**63 - 1
MOST_CHOICES = 128
MOST_STOPS = 16
LONGEST_STOP = 1024  # characters
MOST_IDS = 1024  # in logit_bias, and in stop_token_ids
LARGEST_BIAS = 100
MOST_LOGPROBS = 20
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}  # fmt: skip
"""Of the parameters that are numbers, ends included."""


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
    ERROR = "error"  # the grammar became more than its limits allow; not one of OpenAI's


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, and those of the likeliest tokens there, the likeliest first: (id, logarithm).

    Of the model's own distribution, before a request's penalties, biases, temperature and filters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is done to a row of logits before the token at its position is drawn; fields as in `SamplingParams`.

    logit_bias: (id, what is added), ascending. late: ids that are not drawn before position `late_from`, for they would end the answer.
    answer_from: position of the answer's first token. Whatever is 0 here, or 1 for top_p and repetition_penalty, changes nothing.
    """

    answer_from: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    late: tuple[int, ...] = ()
    late_from: int = 0
    grammar: str | None = None

    @property
    def filters(self) -> bool:
        """Whether it takes the whole row of logits to know which tokens may be drawn."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def counts(self) -> bool:
        """Whether it depends on how often tokens were said before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is to be continued.

    temperature: 0 is greedy; up to 2. Under 1e-5 it is taken for 0: so cold a draw is the best token anyway.
    seed: fixes the noise of the choice rule; 0 .. 2**63 - 1. None draws one when the request enters.
    max_tokens: most tokens to write; None means up to the end of the context.
    stop: up to 16 strings of up to 1024 characters; the text ends before the first that appears. A string stands for itself alone.
    ignore_eos: go on past the end-of-sequence token.
    n: independent choices of the same prompt, each with a seed of its own.
    top_k: draw from the k likeliest tokens; 0 or -1 is all. top_p: from the likeliest that together have this probability, at least one.
    min_p: from those with at least this share of the likeliest one's probability. The three look at the distribution after the
        penalties and the temperature, and do nothing at temperature 0. Equals of the last one that is kept are kept too.
    presence_penalty, frequency_penalty: -2 to 2, taken off a token's logit where the answer has it, once and for each time.
    repetition_penalty: above 0; a logit of a token that the prompt or the answer has is divided by it where positive, else multiplied.
    logit_bias: what is added to the logits of ids, -100 to 100.
    stop_token_ids: ids that end the answer as the end-of-sequence token does.
    logprobs: how many of the likeliest tokens are told at each token of the answer, 0 to 20, and the token's own log-probability with
        them; None for none of it.
    min_tokens: the answer does not end before so many tokens by a token; stop strings are looked for in what comes after them.
    prompt_logprobs: as logprobs, for each token of the prompt but the first. The prompt is then read whole, past the prefix cache.
    grammar: the answer follows this grammar, in llguidance's form (see `hispec_ray.grammar`), and ends where it does.
    speculate: False decodes this request plainly; its text is the same.

    Raises RequestError when a value is out of range.
    """

    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("seed", "max_tokens", "n", "top_k", "min_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if (value is not None or name not in ("seed", "max_tokens", "logprobs", "prompt_logprobs")) and (
                not isinstance(value, int) or isinstance(value, bool)
            ):
                raise RequestError(f"{name} is {value!r}; it must be a whole number", name)
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RequestError(f"{name} is {value!r}; it must be a number from {least} to {most}", name)
            if not least <= value <= most:
                raise RequestError(f"{name} is {value}; it must be from {least} to {most}", name)
        if self.top_k < -1:
            raise RequestError(f"top_k is {self.top_k}; it must be -1 or more (-1 and 0: every token)", "top_k")
        object.__setattr__(self, "top_k", max(0, self.top_k))
        self._check_ids()
        if self.temperature < 1e-5:  # logits divided by less could overflow
            object.__setattr__(self, "temperature", 0.0)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}", "seed")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 0 or more", "max_tokens")
        self._check_counts()
        self._check_stop()
        if not 1 <= self.n <= MOST_CHOICES:
            raise RequestError(f"n is {self.n}; it must be from 1 to {MOST_CHOICES}", "n")

    def shape(self, prompt_tokens: int, ends: Collection[int]) -> Shape | None:
        """Return the Shape for a prompt of `prompt_tokens` tokens; None where logits stay as they are.

        ends: ids that would end the answer.
        """
        drawn = self.temperature > 0
        found = Shape(
            answer_from=prompt_tokens,
            top_k=self.top_k if drawn else 0,
            top_p=self.top_p if drawn else 1.0,
            min_p=self.min_p if drawn else 0.0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.biases,
            late=tuple(sorted(ends)) if self.min_tokens else (),
            late_from=prompt_tokens + self.min_tokens if self.min_tokens else 0,
            grammar=self.grammar,
        )
        return None if found == Shape(prompt_tokens) else found

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias in pairs, by ascending id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def _check_counts(self) -> None:
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            most_tokens = "" if self.max_tokens is None else f" to max_tokens, {self.max_tokens}"
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be from 0{most_tokens or ' on'}", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MOST_LOGPROBS:
                raise RequestError(f"{name} is {value}; it must be from 0 to {MOST_LOGPROBS}", name)
        if self.grammar is not None:  # its end is the answer's
            if self.ignore_eos:
                raise RequestError("ignore_eos is true; it must be false where a grammar says how the answer ends", "ignore_eos")
            if self.min_tokens:
                raise RequestError(f"min_tokens is {self.min_tokens}; it must be 0 where a grammar says how the answer ends", "min_tokens")

    def _check_ids(self) -> None:
        """Check ids and biases, and bring them into tuples, ascending and without repeats."""
        bias = self.logit_bias if isinstance(self.logit_bias, Mapping) else dict(self.logit_bias)
        for name, ids in (("logit_bias", tuple(bias)), ("stop_token_ids", tuple(self.stop_token_ids))):
            if len(ids) > MOST_IDS:
                raise RequestError(f"{name} has {len(ids)} ids; at most {MOST_IDS} are allowed", name)
            for id in ids:
                if not isinstance(id, int) or isinstance(id, bool) or id < 0:
                    raise RequestError(f"{name} has id {id!r}; ids must be whole numbers from 0 on", name)
        for id, value in bias.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not -LARGEST_BIAS <= value <= LARGEST_BIAS:
                raise RequestError(
                    f"logit_bias has {value!r} for id {id}; it must be a number from -{LARGEST_BIAS} to {LARGEST_BIAS}", "logit_bias"
                )
        object.__setattr__(self, "logit_bias", tuple(sorted(bias.items())))
        object.__setattr__(self, "stop_token_ids", tuple(sorted(set(self.stop_token_ids))))

    def _check_stop(self) -> None:
        if len(self.stop) > MOST_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MOST_STOPS} are allowed", "stop")
        if "" in self.stop:
            raise RequestError("stop has an empty string; each must have at least one character", "stop")
        for text in self.stop:
            if not isinstance(text, str) or len(text) > LONGEST_STOP:
                shown = f"one of {len(text)} characters" if isinstance(text, str) else repr(text)
                raise RequestError(f"stop has {shown}; each must be a text of 1 to {LONGEST_STOP} characters", "stop")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence for the engine: a prompt in token ids and its parameters (with a seed that is set).

    written: the answer's first tokens, where another engine wrote them and ended: it is gone on with behind them.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    written: tuple[int, ...] = ()


@dataclass(slots=True)
class TokenDelta:
    """What one step added to one request.

    text is what may be shown now: whole characters only, nothing that could still become part of a
    stop string. levels[i] names the level whose own choice token_ids[i] was: "lookup", "draft", "check" or "full".
    token_ids counts every token that the request pays for, the end-of-sequence token included. logprobs: one for each, where asked for.
    prompt_logprobs: of the prompt's next tokens, from its second on, where asked for; all come before the first of token_ids.
    stopped_by: with a finish_reason of stop, the stop string or the token id that ended the answer.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    stopped_by: str | int | None = None


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
