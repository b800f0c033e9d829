"""Exact hierarchical speculative decoding as an OpenAI-compatible service on Ray."""

from hispec_ray.config import Settings
from hispec_ray.llm import LLM, Choice, Completion
from hispec_ray.request import FinishReason, RequestError, SamplingParams, TokenDelta

__all__ = ["LLM", "Choice", "Completion", "FinishReason", "RequestError", "SamplingParams", "Settings", "TokenDelta"]
