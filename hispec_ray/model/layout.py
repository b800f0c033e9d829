"""The canonical tensors of a decoder: their names and shapes, where a checkpoint has them, and which part of each a process reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from hispec_ray.model.architecture import Architecture
from hispec_ray.model.parallel import Piece


@dataclass(frozen=True, slots=True)
class Cut:
    """What is taken of a tensor: along dimension 0 or 1, for each of the tensors it is made of, a range."""

    dimension: int
    ranges: tuple[range, ...]

    def index(self, part: int) -> tuple[slice, ...]:
        """What takes it of part number `part`."""
        taken = slice(self.ranges[part].start, self.ranges[part].stop)
        return (taken,) if self.dimension == 0 else (slice(None), taken)


@dataclass(frozen=True, slots=True)
class Parts:
    """A canonical tensor as the checkpoint has it: tensors `names`, of `shapes`, stacked along dimension 0.

    cut: what of them is taken; None for all.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The canonical tensor's own, as it is taken."""
        rows, *others = sum(shape[0] for shape in self.shapes), *self.shapes[0][1:]
        if self.cut is None:
            return (rows, *others)
        lengths = [len(taken) for taken in self.cut.ranges]
        return (sum(lengths), *others) if self.cut.dimension == 0 else (rows, lengths[0])

    @property
    def numbers(self) -> int:
        """How many numbers that is."""
        return math.prod(self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is taken of a canonical tensor that has all."""
        if self.cut is None:
            return tensor
        parts = tensor.split([shape[0] for shape in self.shapes])
        return torch.cat([part[self.cut.index(number)] for number, part in enumerate(parts)])


def layout(architecture: Architecture, piece: Piece) -> dict[str, Parts]:
    """Name a piece's canonical tensors and where each comes from. d width, V vocabulary; of both, and of what is below, the piece's part.

    embed.weight [V, d]; positions.weight [max_positions + position_offset, d] with learned positions (row `position + offset`);
    layers.{i}.: see `layer_layout`, i as the model numbers them; norm.weight [d], and a bias where it is a layer norm; head.weight [V, d],
    left out here where it is tied.
    """
    a = architecture
    opt = a.family == "opt"
    root = "model.decoder." if opt else "model."
    ids = Cut(0, (piece.vocabulary,)) if len(piece.vocabulary) < a.vocabulary else None
    tensors: dict[str, Parts] = {}
    if piece.embeds or (piece.reads and a.tied_head):
        tensors["embed.weight"] = Parts((f"{root}embed_tokens.weight",), ((a.vocabulary, a.width),), ids)
    if piece.embeds and a.learned_positions:
        tensors["positions.weight"] = Parts((f"{root}embed_positions.weight",), ((a.max_positions + a.position_offset, a.width),))
    each = layer_layout(a, piece)
    for layer in piece.layers:
        for name, parts in each.items():
            tensors[f"layers.{layer}.{name}"] = replace(parts, names=tuple(f"{root}layers.{layer}.{part}" for part in parts.names))
    if piece.reads:
        for kind in ("weight", "bias") if a.norm == "layer" else ("weight",):
            tensors[f"norm.{kind}"] = Parts((f"{root}{'final_layer_norm' if opt else 'norm'}.{kind}",), ((a.width,),))
        if not a.tied_head:
            tensors["head.weight"] = Parts(("lm_head.weight",), ((a.vocabulary, a.width),), ids)
    return tensors


def weight_bytes(architecture: Architecture, piece: Piece, dtype: torch.dtype) -> int:
    """Return the bytes of a piece's weights, trained exits not counted."""
    return sum(parts.numbers for parts in layout(architecture, piece).values()) * dtype.itemsize


def layer_layout(architecture: Architecture, piece: Piece) -> dict[str, Parts]:
    """Name a piece's canonical tensors of one layer, and where each comes from in the checkpoint's layer. D head_dim, I intermediate.

    attn_norm.weight [d], qkv.weight [(heads + 2 kv_heads) D, d] (q, k, v), q_norm.weight and k_norm.weight [D] with qk_norm,
    out.weight [d, heads D], mlp_norm.weight [d], up.weight [2 I, d] (gate, up) or [I, d] where not gated, down.weight [d, I].
    Each `.bias` as the architecture says; layer norms have one; those of out and down only rank 0 has.
    """
    a = architecture
    query, key = a.heads * a.head_dim, a.kv_heads * a.head_dim
    queries, keys = (range(heads.start * a.head_dim, heads.stop * a.head_dim) for heads in (piece.heads, piece.kv_heads))
    opt = a.family == "opt"
    norm_bias = a.norm == "layer"
    # canonical name: the checkpoint's modules, their outputs, their inputs (None: a norm), has a bias
    modules: dict[str, tuple[tuple[str, ...], tuple[int, ...], int | None, bool]] = {
        "attn_norm": (("self_attn_layer_norm" if opt else "input_layernorm",), (a.width,), None, norm_bias),
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (query, key, key), a.width, a.qkv_bias),
        "out": (("self_attn.out_proj" if opt else "self_attn.o_proj",), (a.width,), query, a.out_bias and piece.rank == 0),
        "mlp_norm": (("final_layer_norm" if opt else "post_attention_layernorm",), (a.width,), None, norm_bias),
        "up": (("mlp.gate_proj", "mlp.up_proj") if a.gated else ("fc1",), (a.intermediate,) * (1 + a.gated), a.width, a.mlp_bias),
        "down": (("mlp.down_proj" if a.gated else "fc2",), (a.width,), a.intermediate, a.mlp_bias and piece.rank == 0),
    }
    if a.qk_norm:
        modules |= {name: ((f"self_attn.{name}",), (a.head_dim,), None, False) for name in ("q_norm", "k_norm")}
    rows: dict[str, tuple[range, ...]] = {"qkv": (queries, keys, keys), "up": (piece.columns,) * (1 + a.gated)}
    columns = {"out": queries, "down": piece.columns}

    tensors = {}
    for name, (sources, outputs, inputs, has_bias) in modules.items():
        for kind in ("weight", "bias") if has_bias else ("weight",):
            shapes = tuple((length,) if inputs is None or kind == "bias" else (length, inputs) for length in outputs)
            cut: Cut | None = None
            if name in rows and any(len(taken) < length for taken, length in zip(rows[name], outputs, strict=True)):
                cut = Cut(0, rows[name])
            elif name in columns and kind == "weight" and len(columns[name]) < (inputs or 0):
                cut = Cut(1, (columns[name],))
            tensors[f"{name}.{kind}"] = Parts(tuple(f"{source}.{kind}" for source in sources), shapes, cut)
    return tensors
