"""Trained exits: the small networks before the shared norm and head, the file they come in, and its card."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

Kind = Literal["linear", "mlp"]


class ExitNetwork(nn.Module):
    """What an exit adds to its hidden rows before the shared norm: x + f(x), f linear or a gated MLP; zero at the start.

    The input is normed by its own root mean square (no weight), so that layers whose rows grow along the depth start alike.
    """

    def __init__(self, width: int, kind: Kind, inner: int) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(width, 2 * inner if kind == "mlp" else width, bias=False)
        self.down = nn.Linear(inner, width, bias=False) if kind == "mlp" else None
        nn.init.zeros_((self.down or self.up).weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden, hidden.shape[-1:])
        added = self.up(normed)
        if self.down is not None:
            gate, up = added.chunk(2, dim=-1)
            added = self.down(F.silu(gate) * up)
        return hidden + added
