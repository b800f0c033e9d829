"""Trained exits: networks or layers before the shared norm and head, a smaller vocabulary, the file they come in, and its card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from hispec_ray.config import Group
from hispec_ray.model.architecture import Architecture
from hispec_ray.model.layout import layer_layout
from hispec_ray.model.parallel import Collective, Piece, gather_columns, whole

Kind = Literal["linear", "mlp", "block"]


class ExitNetwork(nn.Module):
    """What an exit adds to its hidden rows before the shared norm: x + f(x), f linear or a gated MLP; zero at the start.

    The input is divided by its own root mean square (no weight), so that layers whose rows grow along the depth start alike.
    """

    def __init__(self, width: int, kind: Literal["linear", "mlp"], inner: int) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(width, 2 * inner if kind == "mlp" else width, bias=False)
        self.down = nn.Linear(inner, width, bias=False) if kind == "mlp" else None
        nn.init.zeros_((self.down or self.up).weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(F.rms_norm(hidden, hidden.shape[-1:], eps=torch.finfo(torch.float32).eps))
        if self.down is not None:
            gate, up = added.chunk(2, dim=-1)
            added = self.down(F.silu(gate) * up)
        return hidden + added

    def weights(self) -> ExitWeights:
        """Return what has been trained, as a decoder wants it."""
        return ExitWeights(self.up.weight, None if self.down is None else self.down.weight)


class Card(Group):
    """What a file of trained exits is for and what came of the training; stands beside it as JSON.

    base: sha256 of the model's weight files, as `ModelSource.fingerprint` makes it; with layerskip those of the model that it began with.
    kind: of an exit's network: linear, a gated MLP, or a block: one layer of the model's own family. inner: of an MLP.
    vocabulary: how many ids the exits score. data, tokens: the files, and how many tokens were learned from them.
    acceptance: per exit, the share of held-out positions at which its first choice was the full depth's.
    """

    base: str = Field(pattern=r"^[0-9a-f]{64}$")
    exits: tuple[int, ...] = Field(min_length=1)
    recipe: Literal["heads", "layerskip"]
    kind: Kind | None = None
    inner: int | None = None
    vocabulary: int | None = None
    data: str = ""
    tokens: int = 0
    acceptance: dict[int, float] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExitWeights:
    """One exit as a decoder wants it: up `[width, width]` or `[2 inner, width]` (gate, up), down `[width, inner]`; None for none.

    block: the tensors of a layer of the exit's own, as `weights.layer_layout` names them.
    """

    up: torch.Tensor | None = None
    down: torch.Tensor | None = None
    block: Mapping[str, torch.Tensor] | None = None

    def to(self, place: torch.dtype | torch.device) -> ExitWeights:
        """Return the same in another dtype or on another device."""
        up, down = (None if tensor is None else tensor.to(place) for tensor in (self.up, self.down))
        return ExitWeights(up, down, None if self.block is None else {name: tensor.to(place) for name, tensor in self.block.items()})


@dataclass(frozen=True, slots=True)
class Heads:
    """The trained exits of a model. vocabulary: ids that they score, int64[V'] ascending, None for all."""

    exits: dict[int, ExitWeights]
    vocabulary: torch.Tensor | None = None


class Columns:
    """Which ids the columns of a rank's logits stand for: all of its own, or at trained exits those of a reduced vocabulary.

    of_exits: this rank's of the reduced vocabulary, int64 ascending; None where the exits score every id.
    """

    def __init__(self, piece: Piece, heads: Heads | None) -> None:
        reduced = None if heads is None else heads.vocabulary
        parts = [torch.arange(ids.start, ids.stop) for ids in piece.vocabularies]
        kept = None
        if reduced is not None and len(parts) == 1:
            kept = [reduced]
        elif reduced is not None:
            kept = [part[torch.isin(part, reduced)] for part in parts]
            # a rank that none fall to scores one: every rank then has a best
            kept = [found if len(found) else part[:1] for found, part in zip(kept, parts, strict=True)]
        self.of_exits = None if kept is None else kept[piece.rank]
        self._full = None if len(parts) == 1 else parts
        self._exits = kept or self._full
        self._rank = piece.rank

    def vocabulary(self, *, trained: bool) -> torch.Tensor | None:
        """Return the ids of this rank's columns, int64 ascending on the CPU, None where they are 0 .. V - 1. trained: at a trained exit."""
        parts = self._exits if trained else self._full
        return None if parts is None else parts[self._rank]

    def whole(self, logits: torch.Tensor, collective: Collective, *, trained: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return all ranks' columns for this rank's `[R, *]`, and their ids as `vocabulary` does."""
        parts = self._exits if trained else self._full
        if parts is None or len(parts) == 1:
            return logits, self.vocabulary(trained=trained)
        all_columns = gather_columns(collective, logits, [len(part) for part in parts])
        return all_columns, torch.cat(list(parts)) if trained and self.of_exits is not None else None


def piece_of_heads(heads: Heads, architecture: Architecture, piece: Piece) -> Heads:
    """Return the heads with each block cut as the piece's layers are."""
    cuts = layer_layout(architecture, piece)
    exits = {
        depth: replace(exit, block=None if exit.block is None else {name: cuts[name].of(exit.block[name]) for name in cuts})
        for depth, exit in heads.exits.items()
    }
    return Heads(exits, heads.vocabulary)


def exit_layers(heads: Heads | None, layers: int) -> dict[int, int]:
    """Number the layers that exits below the full depth have to themselves, on from the model's: the layer, by the exit's depth."""
    depths = [depth for depth, exit in heads.exits.items() if exit.block is not None and depth < layers] if heads else []
    return {depth: layers + place for place, depth in enumerate(depths)}


def card_path(weights: Path) -> Path:
    """Where the card of a file of exits stands."""
    return weights.with_suffix(".json")


def load_heads(path: Path, fingerprint: str, *, needed: Sequence[int], architecture: Architecture, dtype: torch.dtype) -> Heads:
    """Read a file of trained exits.

    Raises ValueError, in one line that names `speculation.exits.heads`, where the file or its card cannot be read, belongs to another
    model, was not trained for an exit that is needed, lacks a tensor that its card promises or has one of another shape or with numbers
    that are not finite, or names ids outside the vocabulary.
    """
    card = read_card(path)
    if card.base != fingerprint:
        raise _refused(path, f"it was trained for weights with sha256 {card.base}; this model's have {fingerprint}")
    missing = [depth for depth in needed if depth not in card.exits]
    if missing:
        trained = ", ".join(map(str, card.exits))
        raise _refused(path, f"it has no exit at depth {missing[0]}; it was trained for {trained}")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _refused(path, f"it cannot be read: {error}") from error
    ids = _read_vocabulary(path, card, tensors.get("vocabulary"), architecture)
    read = {"linear": _read_linear, "mlp": _read_mlp, "block": _read_block}.get(card.kind or "")
    if read is None:
        raise _refused(path, "its card names no kind; it must be linear, mlp or block")
    return Heads({depth: read(path, tensors, depth, architecture, card).to(dtype) for depth in card.exits}, ids)


def _read_vocabulary(path: Path, card: Card, ids: torch.Tensor | None, architecture: Architecture) -> torch.Tensor | None:
    if ids is None and card.vocabulary is None:
        return None
    if ids is None or ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        found = "missing" if ids is None else f"{ids.dtype} of shape {list(ids.shape)}"
        raise _refused(path, f"its vocabulary is {found}; it must be one row of whole numbers")
    ids = ids.to(torch.int64)
    if len(ids) < 1 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= architecture.vocabulary:
        raise _refused(path, f"its vocabulary must be ascending ids from 0 to {architecture.vocabulary - 1}")
    if len(ids) != card.vocabulary:
        raise _refused(path, f"its vocabulary has {len(ids)} ids; its card says {card.vocabulary}")
    return ids


def _take(path: Path, tensors: Mapping[str, torch.Tensor], name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that must be there, in this shape, of finite numbers."""
    tensor = tensors.get(name)
    if tensor is None:
        raise _refused(path, f"it has no {name}; expected one of shape {list(shape)}")
    if list(tensor.shape) != list(shape):
        raise _refused(path, f"{name} has shape {list(tensor.shape)}; the model asks for {list(shape)}")
    if not tensor.is_floating_point():
        raise _refused(path, f"{name} is {tensor.dtype}; it must be bfloat16, float16 or float32")
    if not bool(tensor.isfinite().all()):
        raise _refused(path, f"{name} has numbers that are not finite")
    return tensor


def _read_linear(path: Path, tensors: Mapping[str, torch.Tensor], depth: int, architecture: Architecture, _: Card) -> ExitWeights:
    return ExitWeights(_take(path, tensors, f"exits.{depth}.up", (architecture.width, architecture.width)))


def _read_mlp(path: Path, tensors: Mapping[str, torch.Tensor], depth: int, architecture: Architecture, card: Card) -> ExitWeights:
    width, inner = architecture.width, card.inner
    if inner is None:
        raise _refused(path, "its card names no inner width; an mlp has one")
    up, down = f"exits.{depth}.up", f"exits.{depth}.down"
    return ExitWeights(_take(path, tensors, up, (2 * inner, width)), _take(path, tensors, down, (width, inner)))


def _read_block(path: Path, tensors: Mapping[str, torch.Tensor], depth: int, architecture: Architecture, _: Card) -> ExitWeights:
    layout = layer_layout(architecture, whole(architecture))
    block = {name: _take(path, tensors, f"exits.{depth}.block.{name}", parts.shape) for name, parts in layout.items()}
    return ExitWeights(block=block)


def exits_in(path: Path, architecture: Architecture, piece: Piece) -> tuple[int, int]:
    """Return what a file of trained exits adds to a piece: layers that exits have to themselves, and numbers in all. Reads no tensor.

    Raises ValueError, in one line that names `speculation.exits.heads`, where the file or its card cannot be read.
    """
    card = read_card(path)
    if card.kind == "block":
        own = sum(depth < architecture.layers for depth in card.exits)
        return own, own * sum(parts.numbers for parts in layer_layout(architecture, piece).values())
    try:
        with safe_open(path, framework="pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys() if name != "vocabulary"]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _refused(path, f"it cannot be read: {error}") from error
    return 0, sum(math.prod(shape) for shape in shapes)


def read_card(path: Path) -> Card:
    """Read the card of a file of exits. Raises ValueError as `load_heads`."""
    try:
        return Card.model_validate(json.loads(card_path(path).read_text()))
    except (OSError, ValueError, RecursionError) as error:  # a ValueError is what pydantic, json and a decoder of text raise
        words = str(error)
        if isinstance(error, ValidationError):
            words = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        raise _refused(path, f"its card {card_path(path)} cannot be read: {words}") from error


def head_tensors(heads: Heads, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Name the tensors of trained exits as `load_heads` reads them."""
    tensors = {}
    for depth, exit in heads.exits.items():
        block = {f"block.{name}": tensor for name, tensor in (exit.block or {}).items()}
        for name, tensor in {"up": exit.up, "down": exit.down, **block}.items():
            if tensor is not None:
                tensors[f"exits.{depth}.{name}"] = tensor.detach().to("cpu", dtype).contiguous()
    if heads.vocabulary is not None:
        tensors["vocabulary"] = heads.vocabulary.to("cpu", torch.int32)
    return tensors


def block_weights(layer: nn.Module, architecture: Architecture) -> ExitWeights:
    """Return a transformers layer of the model's family as a decoder wants an exit's block."""
    stored, wanted = layer.state_dict(), layer_layout(architecture, whole(architecture))
    return ExitWeights(block={name: torch.cat([stored[part] for part in parts.names]) for name, parts in wanted.items()})


def _refused(path: Path, why: str) -> ValueError:
    return ValueError(f"speculation.exits.heads is {str(path)!r}: {why}")
