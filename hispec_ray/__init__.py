"""Exact hierarchical speculative decoding as an OpenAI-compatible service on Ray."""

from typing import TYPE_CHECKING

from hispec_ray.config import Settings
from hispec_ray.request import FinishReason, RequestError, SamplingParams, TokenDelta

if TYPE_CHECKING:
    from hispec_ray.llm import LLM, Choice, Completion

__all__ = ["LLM", "Choice", "Completion", "FinishReason", "RequestError", "SamplingParams", "Settings", "TokenDelta"]


def __getattr__(name: str) -> object:
    if name in {"LLM", "Choice", "Completion"}:
        from hispec_ray import llm  # noqa: PLC0415  torch takes seconds, and the ingress and the settings do without it

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
