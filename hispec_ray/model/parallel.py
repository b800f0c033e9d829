"""Which part of a model a process has: its stage's layers, and its tensor-parallel rank's share of each of them.

Attention is cut by heads, the MLP by its inner columns (Megatron-LM; Shoeybi et al., arXiv 1909.08053), embedding and head by the
vocabulary. Each rank adds up the products of what it has, and one sum over the ranks follows attention and MLP each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch

from hispec_ray.model.architecture import Architecture

_UNITS = (64, 32, 16, 8, 4, 2, 1)
"""What is cut is cut between blocks of so many columns, the largest that leave each rank several: kernels read whole vectors."""
_BLOCKS = 16


class Collective(Protocol):
    """What the ranks of a stage do together. Every rank calls the same methods in the same order.

    size: ranks; rank: this one's number, from 0. Methods raise RuntimeError where another rank has gone.
    """

    size: int
    rank: int

    def sum(self, rows: torch.Tensor) -> None:
        """Put the sum over all ranks in place of fp32 or bf16 `[R, *]`, contiguous.

        Every rank gets the same bits. On a CPU each number is added in an order that does not depend on where in the tensor it stands.
        """

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's fp32 or bf16 `[*]`, which have one shape: `[size, *]`, by rank."""


class Alone:
    """One rank: see `Collective`."""

    size = 1
    rank = 0

    def sum(self, rows: torch.Tensor) -> None:
        pass

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part[None]


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one process has of a model.

    layers: of the model's, by number. heads, kv_heads, columns: of each layer's query heads, key-value heads and inner columns of the
        MLP. Where there are fewer key-value heads than ranks several ranks have the same one.
    vocabularies: every rank's ids.
    rank: among those that share the layers; rank 0 adds what is added once: biases and the rows that went in.
    embeds, reads: whether it turns tokens into hidden rows, and hidden rows into logits.
    """

    layers: range
    heads: range
    kv_heads: range
    columns: range
    vocabularies: tuple[range, ...]
    rank: int = 0
    embeds: bool = True
    reads: bool = True

    @property
    def vocabulary(self) -> range:
        """This rank's ids."""
        return self.vocabularies[self.rank]

    def architecture(self, whole: Architecture) -> Architecture:
        """Return the architecture of this piece's own layers: heads and columns are its own, `layers` still the model's."""
        return replace(whole, heads=len(self.heads), kv_heads=len(self.kv_heads), intermediate=len(self.columns))


def whole(architecture: Architecture) -> Piece:
    """Return the piece that is all of a model."""
    return piece_of(architecture, range(architecture.layers), 1, 0)


def piece_of(architecture: Architecture, layers: range, ranks: int, rank: int, *, embeds: bool = True, reads: bool = True) -> Piece:
    """Return what rank `rank` of `ranks` has of these layers.

    Heads go in whole groups as long as there are as many key-value heads as ranks. Where that is uneven, the MLP's columns make up for it.
    Raises ValueError where there are more ranks than heads, columns or ids to cut.
    """
    a = architecture
    check_ranks(a, ranks)
    kv_heads, heads = _heads(a, ranks, rank)
    columns = _columns(a, ranks)[rank]
    unit = _unit(a.vocabulary, ranks)
    ids = [_even(a.vocabulary // unit, ranks, other) for other in range(ranks)]
    vocabularies = tuple(range(part.start * unit, part.stop * unit) for part in ids)
    return Piece(layers, heads, kv_heads, columns, vocabularies, rank, embeds, reads)


def check_ranks(architecture: Architecture, ranks: int, name: str = "tp") -> None:
    """Raise ValueError, with the valid range, where a layer cannot be cut into so many ranks. name: what the number is called."""
    a = architecture
    most = min(a.heads, a.intermediate // 2, a.vocabulary)
    if not 1 <= ranks <= most:
        raise ValueError(
            f"{name} is {ranks}; it must be from 1 to {most} for this model of {a.heads} query heads, "
            f"{a.intermediate} MLP columns and {a.vocabulary} ids"
        )


def _even(count: int, parts: int, part: int) -> range:
    return range(count * part // parts, count * (part + 1) // parts)


def _unit(count: int, ranks: int) -> int:
    """The block between which a count is cut. An even count is cut into even parts: bf16 weights are packed in pairs."""
    fitting = [unit for unit in _UNITS if count % unit == 0 and count // unit >= ranks and (unit > 1 or count % 2 or count < 2 * ranks)]
    return next((unit for unit in fitting if count // unit >= _BLOCKS * ranks), fitting[-1])


def _heads(a: Architecture, ranks: int, rank: int) -> tuple[range, range]:
    """The key-value heads of a rank and the query heads that read them."""
    group = a.heads // a.kv_heads
    if ranks <= a.kv_heads:
        # the first ranks have one more where it is uneven
        kv = range(-(-a.kv_heads * rank // ranks), -(-a.kv_heads * (rank + 1) // ranks))
        return kv, range(kv.start * group, kv.stop * group)
    kv_head = rank * a.kv_heads // ranks
    sharers = [other for other in range(ranks) if other * a.kv_heads // ranks == kv_head]
    mine = _even(group, len(sharers), sharers.index(rank))
    return range(kv_head, kv_head + 1), range(kv_head * group + mine.start, kv_head * group + mine.stop)


def _columns(a: Architecture, ranks: int) -> list[range]:
    """The MLP's columns of every rank: so that all have about as many weights in a layer, but at least a few each."""
    unit = _unit(a.intermediate, ranks)
    blocks = a.intermediate // unit
    column = (3 if a.gated else 2) * a.width  # weights
    attention = [2 * a.head_dim * a.width * (len(kv) + len(heads)) for kv, heads in (_heads(a, ranks, r) for r in range(ranks))]
    share = (sum(attention) + column * a.intermediate) / ranks
    wanted = [max(unit, (share - mine) / column) for mine in attention]
    scale = a.intermediate / sum(wanted)
    ends, reached = [0], 0.0
    for number, columns in enumerate(wanted, 1):
        reached += columns * scale
        ends.append(min(max(round(reached / unit), ends[-1] + 1), blocks - (ranks - number)))
    return [range(first * unit, last * unit) for first, last in pairwise(ends)]


def gather_columns(collective: Collective, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Return the columns of all ranks side by side: fp32 `[R, sum(widths)]` of each one's `[R, widths[rank]]`."""
    if collective.size == 1:
        return part
    widest = max(widths)
    parts = collective.gather(torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous())
    return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], dim=1)
