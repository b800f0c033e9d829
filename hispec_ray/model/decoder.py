"""What every decoder offers: one model, driven by its own config, run a run of layers at a time."""

from __future__ import annotations

from typing import Protocol

import torch

from hispec_ray.core.plan import Rows
from hispec_ray.model.architecture import Architecture


class Decoder(Protocol):
    """A model's layers, its exits' heads and its paged key-value cache, on one device.

    Hidden rows are `[R, width]` in a dtype of the decoder's own choosing. A row's result is the same to the bit
    whichever rows stand beside it (on a CPU). Layers are numbered from 0; an exit at depth k reads what layer k - 1 wrote.
    """

    architecture: Architecture
    blocks: int  # of the cache
    block_size: int  # tokens a block holds

    def embed(self, rows: Rows) -> torch.Tensor:
        """Return the hidden rows `[R, width]` that enter layer 0."""

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Run layers [first, last) on hidden `[R, width]`, write their keys and values at the rows' slots, return `[R, width]`.

        May write into `hidden`. All rows' keys are written before any row attends, so that rows of one pass see each other.
        """

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits `[R, vocabulary]` of the exit at `depth` for hidden `[R, width]`."""
