"""The decoder in plain torch: for GPUs, and for CPUs without a C++ compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hispec_ray.core.plan import Drafts, DraftStarts, IntArray, Rows
from hispec_ray.model.architecture import Architecture, rope_tables
from hispec_ray.model.attention import Attention, GatheredAttention, VarlenAttention, flash_attention_reads_blocks
from hispec_ray.model.cuda_graphs import Capture, GraphedLayers, capture_cuda
from hispec_ray.model.decoder import ChooseGuess, by_rule, draft_by_passes
from hispec_ray.model.heads import Columns, ExitWeights, Heads, exit_layers
from hispec_ray.model.kv_cache import KVCache
from hispec_ray.model.parallel import ALONE, Collective, Piece, whole

TILE = 8  # rows of every product on a CPU: with one shape only, a row cannot depend on how many rows there are


class TorchDecoder:
    """See `Decoder`. Hidden rows have the weights' dtype.

    weights: canonical tensors (see `hispec_ray.model.layout`) of the piece, moved to `device`. choose: the choice rule, for `draft`.
    piece, collective: this process's part and the other ranks of its stage; all of the model where not given.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: dict[str, torch.Tensor],
        *,
        positions: int,
        blocks: int,
        block_size: int,
        device: torch.device,
        choose: Callable[..., Any],
        heads: Heads | None = None,
        piece: Piece | None = None,
        collective: Collective = ALONE,
        capture: Capture | None = None,
    ) -> None:
        """capture: how a pass of few rows is made into a graph; on a GPU with flash attention as a CUDA graph where not given."""
        self.architecture = architecture
        self._piece = piece = piece or whole(architecture)
        self._own = piece.architecture(architecture)  # heads and columns of this rank
        self._collective = collective
        self._choose = choose
        self.blocks = blocks
        self.block_size = block_size
        self._device = device
        self._dtype = next(iter(weights.values())).dtype
        half = self._dtype == torch.bfloat16  # all that the flash kernels take
        self._flash = half and device.type == "cuda" and flash_attention_reads_blocks()
        capture = capture or (capture_cuda if self._flash else None)
        moved = {id(tensor): tensor.to(device) for tensor in weights.values()}  # a tied head is the embedding, there too
        self._weights = {name: moved[id(tensor)] for name, tensor in weights.items()}
        self._columns = Columns(piece, heads)
        self._exits: dict[int, ExitWeights] = {}
        self.exit_layers = exit_layers(heads, architecture.layers)
        if heads is not None:
            self._exits = {depth: exit.to(device) for depth, exit in heads.exits.items() if depth < architecture.layers}
            for depth, layer in self.exit_layers.items():
                self._weights |= {f"layers.{layer}.{name}": tensor for name, tensor in (self._exits[depth].block or {}).items()}
            head, kept = self._weights["head.weight"], self._columns.of_exits
            self._exit_head = head if kept is None else head[kept.to(device) - piece.vocabulary.start]
        a = architecture
        self._positions = positions
        self._capture = capture
        self.cache = self._pool()
        self._graphs = self._graphed()
        if not a.learned_positions:
            cosines, sines = rope_tables(a.config, positions)
            self._cosines, self._sines = (torch.cat((part, part), dim=-1).unsqueeze(1).to(device) for part in (cosines, sines))

    def twin(self, blocks: int) -> TorchDecoder:
        twin = copy.copy(self)
        twin.blocks = blocks
        twin.cache = twin._pool()
        twin._graphs = twin._graphed()
        return twin

    def _graphed(self) -> GraphedLayers | None:
        """Graphs over the cache's last block, which is nobody's; none where ranks add up between the layers."""
        if self._capture is None or self._collective.size > 1:
            return None
        shape = {"width": self.architecture.width, "table_width": -(-self._positions // self.block_size), "block_size": self.block_size}
        return GraphedLayers(self._layers, self._capture, **shape, spare_block=self.blocks, dtype=self._dtype, device=self._device)

    def _pool(self) -> KVCache:
        shape = {"kv_heads": self._own.kv_heads, "head_dim": self._own.head_dim}
        layers = len(self._piece.layers) + len(self.exit_layers)
        blocks = self.blocks + (self._capture is not None)
        return KVCache(layers, blocks, self.block_size, **shape, dtype=self._dtype, device=self._device)

    @staticmethod
    def block_bytes(architecture: Architecture, layers: int, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block of the cache, keys and values of so many layers."""
        return 2 * layers * architecture.kv_heads * block_size * architecture.head_dim * dtype.itemsize

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._device.type != "cpu":
            return F.linear(x, weight, bias)
        padded = F.pad(x, (0, 0, 0, -len(x) % TILE))
        return torch.cat([F.linear(tile, weight, bias) for tile in padded.split(TILE)])[: len(x)]

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"]
        if self.architecture.norm == "layer":
            return F.layer_norm(x, weight.shape, weight, self._weights[f"{name}.bias"], self.architecture.norm_eps)
        return self._rms(x, weight)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.architecture.norm_eps)).to(x.dtype)

    def _head_rows(self, x: torch.Tensor, norm: str, positions: torch.Tensor) -> torch.Tensor:
        """Norm (where the family has one) and rotate heads `[R, heads, head_dim]`."""
        if norm in self._weights:
            x = self._rms(x, self._weights[norm])
        if self.architecture.learned_positions:
            return x
        a, b = x.float().chunk(2, dim=-1)
        return (x.float() * self._cosines[positions] + torch.cat((-b, a), dim=-1) * self._sines[positions]).to(x.dtype)

    def empty_rows(self, count: int) -> torch.Tensor:
        return torch.empty(count, self.architecture.width, dtype=self._dtype, device=self._device)

    def embed(self, rows: Rows) -> torch.Tensor:
        tokens, ids = torch.from_numpy(rows.tokens).to(self._device), self._piece.vocabulary
        if self._collective.size == 1:
            hidden = self._weights["embed.weight"][tokens]
        else:  # each token's row comes from the rank that has it
            here = (tokens >= ids.start) & (tokens < ids.stop)
            hidden = self._weights["embed.weight"][(tokens - ids.start).clamp(0, len(ids) - 1)].masked_fill_(~here[:, None], 0)
            self._collective.sum(hidden)
        if self.architecture.learned_positions:
            positions = torch.from_numpy(rows.positions).to(self._device)
            hidden = hidden + self._weights["positions.weight"][positions + self.architecture.position_offset]
        return hidden

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        if self._graphs is not None and (done := self._graphs.run(first, last, hidden, rows)) is not None:
            return done
        positions, slots, slot_rows = (torch.from_numpy(part).to(self._device) for part in (rows.positions, rows.slots, rows.slot_rows))
        attention: Attention
        attention = VarlenAttention(rows, self._device) if self._flash else GatheredAttention(rows, self.block_size, self._device)
        return self._layers(first, last, hidden, positions, slots, attention, slot_rows)

    def _layers(
        self,
        first: int,
        last: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: Attention,
        slot_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """slot_rows: int64[S], the row of each slot; None where slot i is row i's."""
        a = self._own
        for i in range(first, last):
            at = self._place(i)
            normed = self._normed(f"layers.{i}.attn_norm", hidden)
            qkv = self._linear(f"layers.{i}.qkv", normed).view(len(hidden), -1, a.head_dim)
            queries, keys, values = qkv.split((a.heads, a.kv_heads, a.kv_heads), dim=1)
            queries = self._head_rows(queries, f"layers.{i}.q_norm.weight", positions)
            keys = self._head_rows(keys, f"layers.{i}.k_norm.weight", positions)
            if slot_rows is not None:
                keys, values = keys[slot_rows], values[slot_rows]
            self.cache.write(at, slots, keys, values)
            mixed = attention(at, queries, self.cache)
            hidden = hidden + self._summed(self._linear(f"layers.{i}.out", mixed.flatten(1)))
            inner = self._linear(f"layers.{i}.up", self._normed(f"layers.{i}.mlp_norm", hidden))
            if a.gated:
                gate, up = inner.chunk(2, dim=-1)
                inner = F.silu(gate) * up
            else:
                inner = F.relu(inner)
            hidden = hidden + self._summed(self._linear(f"layers.{i}.down", inner))
        return hidden

    def _summed(self, rows: torch.Tensor) -> torch.Tensor:
        self._collective.sum(rows)
        return rows

    def _place(self, layer: int) -> int:
        """Where a layer lies in the cache."""
        own, layers = self.architecture.layers, self._piece.layers
        return layer - layers.start if layer < own else len(layers) + layer - own

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        exit = self._exits.get(depth)
        if exit is None:
            return self._product(self._normed("norm", hidden), self._weights["head.weight"], self._weights.get("head.bias")).float()
        if exit.up is not None:
            wide = hidden.float()
            normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)).to(hidden.dtype)
            added = self._product(normed, exit.up)
            if exit.down is not None:
                gate, up = added.chunk(2, dim=-1)
                added = self._product(F.silu(gate) * up, exit.down)
            hidden = hidden + added
        return self._product(self._normed("norm", hidden), self._exit_head).float()

    def vocabulary(self, depth: int) -> torch.Tensor | None:
        return self._columns.vocabulary(trained=depth in self._exits)

    def whole(self, depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._columns.whole(logits, self._collective, trained=depth in self._exits)

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        size = self.block_size
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            self.cache.pool[:, :, b // size, b % size] = self.cache.pool[:, :, a // size, a % size]

    def draft(self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: ChooseGuess | None = None) -> Drafts:
        return draft_by_passes(self, choose or by_rule(self._choose, starts), depth, starts, held, stop)
