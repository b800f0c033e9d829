"""What fixtures are made of, and the types that tests name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hispec_ray import LLM, Settings

MakeLLM = Callable[..., LLM]
Run = Callable[..., tuple[int, str, str]]
"""Runs the command line: status, stdout and stderr."""


def settings_of(
    model: dict[str, Any],
    method: str = "plain",
    draft: int | None = None,
    check: int | None = None,
    draft_tokens: int = 2,
    window: int = 4,
    *,
    blocks: int = 200,
    block_size: int = 16,
    prefix_caching: bool = True,
    pace: str = "fixed",
    heads: Path | None = None,
    branches: int = 0,
    **scheduler: int,
) -> Settings:
    speculation = {
        "method": method,
        "exits": {"draft": draft, "check": check, "heads": heads and str(heads)},
        "draft_tokens": draft_tokens,
        "window": window,
        "pace": pace,
        "branches": branches,
        "branch_below": 2.0 if branches else 0.0,
    }
    cache = {"blocks": blocks, "block_size": block_size, "prefix_caching": prefix_caching}
    return Settings.model_validate({"model": model, "speculation": speculation, "cache": cache, "scheduler": scheduler})
