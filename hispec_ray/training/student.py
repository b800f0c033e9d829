"""The model in training: a backbone, its exits, and the loss that teaches them the full depth's own distribution.

Two recipes. `heads` leaves the backbone as it is and trains a small network at each exit, before the shared norm and head.
`layerskip` trains the backbone itself (or low-rank adapters on it) with layer dropout that grows with depth and a loss at every
exit (LayerSkip; Elhoushi et al., arXiv 2404.16710). In both, an exit's target is the full depth's distribution, by KL divergence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hispec_ray.model.heads import ExitNetwork

IGNORED = -100  # a target that no loss is taken at


@dataclass(frozen=True, slots=True)
class Scores:
    """What a batch gave, as sums over its `tokens` positions with a target, so that batches and ranks add up.

    text: cross-entropy of the full depth, in nats. divergence, agreement: per exit, the KL divergence from the full depth, in
    nats, and the positions at which the exit's first choice is the full depth's.
    """

    tokens: torch.Tensor
    text: torch.Tensor
    divergence: torch.Tensor
    agreement: torch.Tensor


class ExitStudent(nn.Module):
    """A transformers causal language model that is read at several depths.

    networks: of the exits, in the exits' order, for the recipe `heads`; without them an exit is the shared norm and head alone.
    vocabulary: ids that the exits score, int64[V']; every id where None. The full depth is then compared over these ids alone.
    """

    def __init__(
        self,
        backbone: Any,
        exits: Sequence[int],
        *,
        networks: Sequence[ExitNetwork] | None = None,
        vocabulary: torch.Tensor | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.exits = tuple(exits)
        self.networks = None if networks is None else nn.ModuleList(networks)
        self.vocabulary: torch.Tensor | None
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self._decoder = backbone.get_decoder()
        self._norm = self._decoder.norm if hasattr(self._decoder, "norm") else self._decoder.final_layer_norm
        self._hidden: dict[int, torch.Tensor] = {}
        self._dropped: frozenset[int] = frozenset()
        for index, layer in enumerate(self._decoder.layers):
            run = torch.compile(layer.forward, dynamic=True) if compiled else layer.forward
            layer.forward = functools.partial(self._run_layer, index, run)

    def _run_layer(self, index: int, run: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = hidden if index in self._dropped else run(hidden, *args, **kwargs)
        if index + 1 in self.exits:
            self._hidden[index + 1] = out
        return out

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor,
        dropped: frozenset[int] = frozenset(),
        exit_weight: float = 1.0,
        text_weight: float = 1.0,
    ) -> tuple[torch.Tensor, Scores]:
        """Return the loss, summed over positions, and the scores.

        ids, targets: int64[B, T]; targets[b, t] is what follows ids[b, t], IGNORED where nothing is to be learned. Padding stands
        at the end of a line, where causal attention does not see it.
        dropped: layers that are skipped in this pass, numbered from 0.
        text_weight: of the full depth's cross-entropy with the targets. exit_weight: of each exit's divergence.
        """
        self._dropped = dropped
        frozen = self.networks is not None
        with torch.set_grad_enabled(not frozen and torch.is_grad_enabled()):
            last = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        learned = targets != IGNORED
        head = self.backbone.get_output_embeddings()
        full = self._logits(head, last[learned], every=True)
        wanted = targets[learned]
        text = F.cross_entropy(full, wanted, reduction="sum")
        loss = text * text_weight
        teacher = full.detach()
        choice = teacher.argmax(dim=-1)
        if self.vocabulary is not None:
            teacher = teacher[:, self.vocabulary]
        teacher = teacher.log_softmax(dim=-1)
        divergences, agreements = [], []
        for place, depth in enumerate(self.exits):
            hidden = self._hidden.pop(depth)
            if self.networks is not None:
                hidden = self.networks[place](hidden)
            logits = self._logits(head, self._norm(hidden[learned]))
            divergence = F.kl_div(logits.log_softmax(dim=-1), teacher, reduction="sum", log_target=True)
            loss = loss + exit_weight * divergence
            guess = logits.detach().argmax(dim=-1)
            if self.vocabulary is not None:
                guess = self.vocabulary[guess]
            divergences.append(divergence.detach())
            agreements.append((guess == choice).sum())
        count = learned.sum()
        return loss, Scores(count, text.detach(), torch.stack(divergences), torch.stack(agreements).float())

    def _logits(self, head: nn.Linear, rows: torch.Tensor, *, every: bool = False) -> torch.Tensor:
        """fp32 logits of normed rows [N, d]: over the whole vocabulary [N, V] or the exits' [N, V']."""
        weight = head.weight if every or self.vocabulary is None else head.weight[self.vocabulary]
        return F.linear(rows, weight).float()


def layers_to_drop(layers: int, rate: float, exits: Sequence[int], generator: torch.Generator) -> frozenset[int]:
    """Draw the layers that a batch skips: layer l of L with probability rate * (2^(l / (L - 1)) - 1), as LayerSkip has it.

    The same draw on every rank, for a generator seeded by the step.
    """
    if rate <= 0:
        return frozenset()
    draws = torch.rand(layers, generator=generator)
    return frozenset(layer for layer in range(layers) if draws[layer] < rate * (math.pow(2, layer / max(1, layers - 1)) - 1))
