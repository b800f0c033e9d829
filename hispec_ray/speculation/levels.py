"""Who takes part in a round: the levels, what they do where they are unsure, and the model that they are depths of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hispec_ray.core.plan import Drafts, DraftStarts, Rows
from hispec_ray.speculation.choice import Choices
from hispec_ray.speculation.state import Memory


class Model(Memory, Protocol):
    """What a round needs of a decoder; see `hispec_ray.model.decoder.Decoder`."""

    def embed(self, rows: Rows) -> torch.Tensor: ...

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor: ...

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor: ...

    def vocabulary(self, depth: int) -> torch.Tensor | None: ...

    def whole(self, depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def draft(
        self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: Callable[..., Choices] | None = None
    ) -> Drafts: ...


@dataclass(frozen=True, slots=True)
class Level:
    """An exit that takes part: its name in traces, its depth in layers, the most tentative tokens it lets gather before it looks.

    A first level with window 0 under others is the draft exit: it looks at nobody's guesses, and makes its own.
    own: the layer that the exit has to itself, as the model numbers it; None where it has none.
    """

    name: str
    depth: int
    window: int
    own: int | None = None


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a level below the top does where it is unsure: where its first choice's score leads its second's by little.

    stop: with a lead below this it guesses no further, and lets the next level look. branch: with a lead below this it offers the
    second choice too. branches: most second choices of one sequence at a time. Leads are in units of score (logit / T + noise); 0 is never.
    """

    stop: float = 0.0
    branch: float = 0.0
    branches: int = 0


NO_DOUBT = Doubt()


def segment_layers(levels: Sequence[Level], end: int | None = None) -> list[int]:
    """How many layers each level's segment runs, from the depth of the one before on; none above `end`, and none that is an exit's own."""
    depths = [level.depth if end is None else min(level.depth, end) for level in levels]
    return [depth - below for depth, below in zip(depths, (0, *depths), strict=False)]


class Hierarchy:
    """Levels, shallow to deep, the last at the model's full depth, beneath them who guesses.

    windows: of the levels. top: the last one's number.
    bottom: the lowest level that looks. sources: "lookup" where there is a drafter, then the levels' names: what results and counts
    refer to; source: of level 0 among them.
    Raises ValueError when the levels are out of order.
    """

    def __init__(self, levels: Sequence[Level], *, lookup: bool) -> None:
        depths = [level.depth for level in levels]
        if depths != sorted(depths):
            raise ValueError(f"levels have depths {depths}; each must be at least as deep as the one before")
        self.levels = tuple(levels)
        self.windows = tuple(level.window for level in levels)
        self.top = len(levels) - 1
        self.bottom = 1 if levels[0].window == 0 and self.top else 0
        self.sources = (*(("lookup",) if lookup else ()), *(level.name for level in levels))
        self.source = len(self.sources) - len(levels)
