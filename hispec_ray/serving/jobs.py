"""What the ingress asks of a coordinator: small plain data that crosses between their processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hispec_ray.engine.tools import ToolUse
from hispec_ray.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of a coordinator: prompts as text or token ids, or else the messages of a chat.

    stream: whether the answer is wanted as it comes; else the ends of its choices are enough.
    tools: what the answer may call. echo: whether it begins with the prompt. trace: whether to tell the level that chose each token.
    method: the method of speculation that the client asked for, if it did.
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


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What /tokenize asks of a coordinator: the ids of a text or of a conversation, the one that is not None."""

    prompt: str | None
    messages: Sequence[Mapping[str, Any]] | None
    add_special_tokens: bool
    add_generation_prompt: bool
    return_token_strs: bool
