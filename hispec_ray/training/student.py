"""The model in training: a backbone, its exits, and the loss that teaches them the full depth's own distribution.

Two recipes. `heads` leaves the backbone as it is and trains a small network or a layer at each exit, before the shared norm and head.
`layerskip` trains the backbone itself (or low-rank adapters on it) with layer dropout that grows with depth and a loss at every
exit (LayerSkip; Elhoushi et al., arXiv 2404.16710). In both, an exit's target is the full depth's distribution, by KL divergence.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hispec_ray.model.heads import ExitNetwork

IGNORED = -100  # a target that no loss is taken at
LOGITS_AT_ONCE = {"cpu": 2**26, "cuda": 2**28}
"""Most logits of a depth that are held at a time: 256 MiB in fp32 on a CPU, 1365 rows of 49,152 ids; four times that on a GPU."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a batch gave, as sums over its `tokens` positions with a target, so that batches and ranks add up.

    text: cross-entropy of the full depth, in nats; 0 where it was not asked for. divergence, agreement: per exit, the KL
    divergence from the full depth, in nats, and the positions at which the exit's first choice is the full depth's among all ids.
    """

    tokens: torch.Tensor
    text: torch.Tensor
    divergence: torch.Tensor
    agreement: torch.Tensor


class ExitStudent(nn.Module):
    """A transformers causal language model that is read at several depths.

    networks, blocks: of the exits, in the exits' order, for the recipe `heads`; one of the two, blocks being layers of the model's
    family (see `next_layer`), which are called as the backbone calls its own. The backbone is then frozen, may be of another precision
    than they are, and is no module of this one: it has no gradients, and DeepSpeed neither casts, shards nor saves it.
    Without either an exit is the shared norm and head alone.
    vocabulary: ids that the exits score, int64[V'], only with networks or blocks; every id where None. The full depth is then
    compared over these ids alone.
    """

    backbone: Any
    _decoder: Any
    _norm: Any
    vocabulary: torch.Tensor | None
    exit_head: torch.Tensor | None  # the head's rows of the vocabulary, [V', d]

    def __init__(
        self,
        backbone: Any,
        exits: Sequence[int],
        *,
        networks: Sequence[ExitNetwork] | None = None,
        blocks: Sequence[nn.Module] | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        decoder = backbone.get_decoder()
        norm = decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm
        self._frozen = networks is not None or blocks is not None
        if self._frozen:
            backbone.requires_grad_(False).eval()
        for name, part in (("backbone", backbone), ("_decoder", decoder), ("_norm", norm)):
            (object.__setattr__ if self._frozen else setattr)(self, name, part)  # the first makes it no module of this one
        self.exits = tuple(exits)
        self.networks = None if networks is None else nn.ModuleList(networks)
        self.blocks = None if blocks is None else nn.ModuleList(blocks)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        head = None if vocabulary is None else backbone.get_output_embeddings().weight[vocabulary].detach()
        self.register_buffer("exit_head", head, persistent=False)
        self._hidden: dict[int, torch.Tensor] = {}
        self._arguments: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # that the layer after an exit was called with
        self._dropped: frozenset[int] = frozenset()
        for index, layer in enumerate(decoder.layers):
            layer.forward = functools.partial(self._run_layer, index, layer.forward)

    def _run_layer(self, index: int, run: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = hidden if index in self._dropped else run(hidden, *args, **kwargs)
        if index + 1 in self.exits:
            self._hidden[index + 1] = out
        if self.blocks is not None and index in self.exits:
            self._arguments[index] = args, kwargs
        return out

    def _exit_rows(self) -> list[torch.Tensor]:
        """What stands at each exit, [B, T, d], or what its block makes of it."""
        found = [self._hidden.pop(depth) for depth in self.exits]
        if self.blocks is None:
            return found
        calls = [self._arguments.pop(depth) for depth in self.exits]
        each = zip(self.blocks, found, calls, strict=True)
        return [block(hidden.float(), *args, **kwargs).to(hidden.dtype) for block, hidden, (args, kwargs) in each]

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor,
        dropped: frozenset[int] = frozenset(),
        exit_weight: float = 1.0,
        text_weight: float = 1.0,
        agreement: bool = True,
    ) -> tuple[torch.Tensor, Scores]:
        """Return the loss, summed over positions, and the scores.

        ids, targets: int64[B, T]; targets[b, t] is what follows ids[b, t], IGNORED where nothing is to be learned. Padding stands
        at the end of a line, where causal attention does not see it.
        dropped: layers that are skipped in this pass, numbered from 0.
        text_weight: of the full depth's cross-entropy with the targets. exit_weight: of each exit's divergence.
        agreement: count it. Without it and without the text, the full depth scores the exits' vocabulary alone.
        """
        self._dropped = dropped
        with torch.set_grad_enabled(not self._frozen and torch.is_grad_enabled()):
            last = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        learned = targets != IGNORED
        rows = [last[learned], targets[learned], *(hidden[learned] for hidden in self._exit_rows())]
        score = functools.partial(self._score, exit_weight, text_weight, agreement)
        few = self._few(agreement, text_weight)
        at_once = max(1, LOGITS_AT_ONCE[ids.device.type] // (self.backbone.config.vocab_size if few is None else len(few)))
        if len(rows[0]) <= at_once:
            loss, text, divergence, agreed = score(*rows)
        else:  # the logits of a piece are let go, and computed once more for its gradients
            pieces = zip(*(tensor.split(at_once) for tensor in rows), strict=True)
            each = [checkpoint(score, *piece, use_reentrant=False) for piece in pieces]
            loss, text, divergence, agreed = (torch.stack(parts).sum(dim=0) for parts in zip(*each, strict=True))
        return loss, Scores(learned.sum(), text.detach(), divergence.detach(), agreed)

    def _few(self, agreement: bool, text_weight: float) -> torch.Tensor | None:
        """The head's rows of the exits' vocabulary, where nothing else is asked of the full depth."""
        return None if agreement or text_weight else self.exit_head

    def _score(
        self, exit_weight: float, text_weight: float, agreement: bool, last: torch.Tensor, wanted: torch.Tensor, *exits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return loss, text, divergence and agreement of rows: last (normed) and each exit's, [N, d], and the targets, int64[N]."""
        head = self.backbone.get_output_embeddings()
        loss = text = last.new_zeros((), dtype=torch.float32)
        choice: torch.Tensor | None = None
        few = self._few(agreement, text_weight)
        if few is not None:
            teacher = F.linear(last.detach(), few).float()
        else:
            full = head(last).float()
            if text_weight:
                text = F.cross_entropy(full, wanted, reduction="sum")
                loss = text * text_weight
            teacher = full.detach()
            choice = teacher.argmax(dim=-1)
            if self.vocabulary is not None:
                teacher = teacher[:, self.vocabulary]
        teacher = teacher.log_softmax(dim=-1)
        divergences, agreements = [], []
        for place, hidden in enumerate(exits):
            normed = self._norm(hidden if self.networks is None else self.networks[place](hidden.float()).to(last.dtype))
            logits = (head(normed) if self.exit_head is None else F.linear(normed, self.exit_head)).float()
            divergence = F.kl_div(logits.log_softmax(dim=-1), teacher, reduction="sum", log_target=True)
            loss = loss + exit_weight * divergence
            divergences.append(divergence)
            guess = logits.detach().argmax(dim=-1)
            if self.vocabulary is not None:
                guess = self.vocabulary[guess]
            agreements.append(loss.new_zeros(()) if choice is None else (guess == choice).sum().float())
        return loss, text, torch.stack(divergences), torch.stack(agreements)


def next_layer(backbone: Any, depth: int) -> nn.Module:
    """Return a copy of the layer that follows `depth`, in fp32: an exit's block as it begins. To be made before a student of the backbone.

    With it the exit says at the start what an exit one layer deeper would say.
    """
    layer: nn.Module = copy.deepcopy(backbone.get_decoder().layers[depth])
    return layer.float().requires_grad_()


def layers_to_drop(layers: int, rate: float, generator: torch.Generator) -> frozenset[int]:
    """Draw the layers that a batch skips: layer l of L with probability rate * (2^(l / (L - 1)) - 1), as LayerSkip has it.

    The same draw on every rank, for a generator seeded by the step.
    """
    if rate <= 0:
        return frozenset()
    draws = torch.rand(layers, generator=generator)
    return frozenset(layer for layer in range(layers) if draws[layer] < rate * (math.pow(2, layer / max(1, layers - 1)) - 1))
