"""What crosses between the ingress and a coordinator, each in a process of its own: small plain data, jobs one way and items the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from hispec_ray.engine.tools import CallPart, ToolUse
from hispec_ray.request import RequestError, SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of a coordinator: prompts as text or token ids, or else the messages of a chat.

    stream: whether the answer is wanted as it comes; else the ends of its choices are enough.
    tools: what the answer may call. echo: whether it begins with the prompt. trace: whether to tell the level that chose each token.
    method: the method of speculation that the client asked for, if it did.
    resumable: whether deltas tell their token ids, so that another coordinator can go on where this one ends.
    written: by choice, the tokens that another one has told; ended: the choices that it has told to their end. Both only where it began.
    """

    id: str
    params: SamplingParams
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    stream: bool = True
    tools: ToolUse | None = None
    echo: bool = False
    trace: bool = False
    method: str | None = None
    resumable: bool = False
    written: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What /tokenize asks of a coordinator: the ids of a text or of a conversation, the one that is not None."""

    prompt: str | None
    messages: Sequence[Mapping[str, Any]] | None
    add_special_tokens: bool
    add_generation_prompt: bool
    return_token_strs: bool


class Spelled(NamedTuple):
    """A token as a client sees it: its text (U+FFFD where it has only a part of a character) and bytes.

    A token that never has a text in an answer (see `Detokenizer.silent`) has its name for a text, and no bytes.
    """

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


class Delta(NamedTuple):
    """What steps added to one choice.

    number: the choice's index; text: to be shown now; tokens: that the request pays for; reason: in the last one why it ended.
    entries: log-probabilities, where asked for, of the tokens whose text is shown. levels: (token id, level that chose it first), where
    asked for. ids: of the tokens, where the job is resumable.
    """

    number: int
    text: str = ""
    tokens: int = 0
    reason: str | None = None
    entries: tuple[Entry, ...] = ()
    calls: tuple[CallPart, ...] = ()
    levels: tuple[tuple[int, str], ...] = ()
    ids: tuple[int, ...] = ()


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
    """Why a request is not answered, or not to its end: the HTTP status and headers, and what stands in the body of OpenAI's errors."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: RequestError) -> Failure:
        """Return the failure of a request that cannot be honoured."""
        return cls(400, error.message, error.field, error.code)

    def named(self, fields: Mapping[str, str]) -> Failure:
        """Return it with the parameter under the name that a request has for it, where `fields` has one."""
        return self if self.param is None else replace(self, param=fields.get(self.param, self.param))


Item = Started | Failure | list[Delta]
"""What travels from a coordinator to an ingress: Started and then deltas until every choice has ended; or a Failure, as the last."""
