"""The decoder on a CPU: weights packed once into panels, a run of layers in one native call."""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import numpy as np
import torch

from hispec_ray.core.plan import Drafts, DraftStarts, IntArray, Rows
from hispec_ray.model.architecture import Architecture, rope_tables
from hispec_ray.model.decoder import ChooseGuess, draft_by_passes
from hispec_ray.model.heads import ExitWeights, Heads, exit_layers
from hispec_ray.native import library

_pointer, _int64, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _pointer), ("bias", _pointer))


class _Matrix(ctypes.Structure):
    _fields_ = (("panels", _pointer), ("bias", _pointer), ("inputs", _int64), ("outputs", _int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("attention_norm", "mlp_norm")),
        *((name, _pointer) for name in ("query_norm", "key_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, _pointer) for name in ("keys", "values")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("width", "heads", "kv_heads", "head_size", "padded_head", "intermediate", "block_size", "threads")),
        *((name, _int64) for name in ("layer_norm", "bf16_weights")),
        *((name, _float) for name in ("norm_eps", "scale")),
        *((name, _pointer) for name in ("cosines", "sines")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("rows", "slots_count", "table_width")),
        *((name, _pointer) for name in ("positions", "table", "tables", "slots", "slot_rows")),
    )


class _Embedding(ctypes.Structure):
    _fields_ = (("tied", _Matrix), *((name, _pointer) for name in ("table", "positions")), ("offset", _int64))


class _Network(ctypes.Structure):
    _fields_ = tuple((name, _Matrix) for name in ("up", "gate", "down"))


class _Exit(ctypes.Structure):
    _fields_ = (("network", _Network), ("head", _Matrix), ("ids", _pointer))


class _Drafts(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("sequences", "most")),
        *((name, _pointer) for name in ("tokens", "positions", "table", "steps", "temperatures", "seeds", "homes", "held")),
        ("stop", _float),
        *((name, _pointer) for name in ("guesses", "seconds", "gaps", "made")),
    )


def _address(array: IntArray) -> int:
    return int(array.ctypes.data)


def _padded(head_dim: int) -> int:
    """Return the head's size in the cache: a multiple of the kernels' chunk."""
    chunk = int(library.load().hispec_chunk())
    return -(-head_dim // chunk) * chunk


class NativeDecoder:
    """See `Decoder`. Hidden rows are fp32 whatever the weights' dtype; keys and values have the weights' dtype.

    weights: canonical tensors (see `hispec_ray.model.weights`); emptied while they are packed, so that the model is
        never in memory twice.
    Raises NativeUnavailableError where the kernels cannot be built, ValueError where bfloat16 weights have an odd number of inputs.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: dict[str, torch.Tensor],
        *,
        positions: int,
        blocks: int,
        block_size: int,
        threads: int,
        heads: Heads | None = None,
    ) -> None:
        self.architecture = architecture
        self.blocks = blocks
        self.block_size = block_size
        self._library = library.load()
        self._panel = int(self._library.hispec_panel())
        self._kept: list[torch.Tensor] = []  # what the native side points to
        self._scratch = torch.empty(0)
        a = architecture
        dtype = weights["embed.weight"].dtype
        padded_head = _padded(a.head_dim)
        self.exit_layers = exit_layers(heads, a.layers)
        self.cache = self._pool(dtype)
        cosines, sines = (None, None) if a.learned_positions else rope_tables(a.config, positions)
        self._model = _Model(
            a.width, a.heads, a.kv_heads, a.head_dim, padded_head, a.intermediate, block_size, threads,
            a.norm == "layer", dtype == torch.bfloat16, a.norm_eps, a.head_dim**-0.5, self._keep(cosines), self._keep(sines),
        )  # fmt: skip
        # scratch of a row: the layers' own, or an exit's network and norm
        self._row_floats = a.width + (2 * a.heads + 2 * a.kv_heads) * a.head_dim + 2 * a.intermediate
        position_rows = weights.pop("positions.weight", None)
        layers = [self._layer(weights, f"layers.{i}.", i) for i in range(a.layers)]
        if heads is not None:
            layers += [self._layer(dict(heads.exits[depth].block or {}), "", i) for depth, i in self.exit_layers.items()]
        self._layers = (_Layer * len(layers))(*layers)
        self._norm = self._norm_of(weights, "norm")
        embedding = weights.pop("embed.weight")
        head = weights.pop("head.weight", embedding)
        packed = self._matrix(head, None)
        tied = head is embedding  # its panels then serve both ends
        self._embedding = _Embedding(
            packed if tied else _Matrix(), None if tied else self._keep(embedding), self._keep(position_rows), a.position_offset
        )
        self._full = _Exit(_Network(), packed, None)
        self._exits: dict[int, _Exit] = {}
        self._ids = None if heads is None else heads.vocabulary
        if heads is not None:
            smaller, ids = packed, None
            if self._ids is not None:
                smaller, ids = self._matrix(head[self._ids], None), self._keep(self._ids)
            self._exits = {depth: _Exit(self._network(exit), smaller, ids) for depth, exit in heads.exits.items() if depth < a.layers}

    def twin(self, blocks: int) -> NativeDecoder:
        twin = copy.copy(self)
        twin.blocks = blocks
        twin.cache = twin._pool(self.cache.dtype)
        twin._scratch = torch.empty(0)
        twin._layers = (_Layer * len(self._layers))(*self._layers)
        for index, layer in enumerate(twin._layers):
            layer.keys, layer.values = twin.cache[0, index].data_ptr(), twin.cache[1, index].data_ptr()
        return twin

    def _pool(self, dtype: torch.dtype) -> torch.Tensor:
        """Pages that are zero without being touched: the pool takes memory as it fills."""
        layers = self.architecture.layers + len(self.exit_layers)
        each = self.block_bytes(self.architecture, 1, self.block_size, dtype) // 2
        pool = np.zeros((2, layers, self.blocks, each), dtype=np.uint8)
        return torch.from_numpy(pool).view(dtype)

    @staticmethod
    def block_bytes(architecture: Architecture, layers: int, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block of the cache, keys and values of so many layers."""
        return 2 * layers * architecture.kv_heads * block_size * _padded(architecture.head_dim) * dtype.itemsize

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _norm_of(self, weights: dict[str, torch.Tensor], name: str) -> _Norm:
        weight, bias = weights.pop(f"{name}.weight").float(), weights.pop(f"{name}.bias", None)
        return _Norm(self._keep(weight), self._keep(None if bias is None else bias.float()))

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Matrix:
        """Pack `[out, in]` into panels `[out / panel, in / 2, panel, 2]` (bf16) or `[out / panel, in, panel]` (fp32), padded with zeros."""
        outputs, inputs = weight.shape
        steps = 2 if weight.dtype == torch.bfloat16 else 1
        if inputs % steps:
            raise ValueError(
                f"a matrix has {inputs} inputs; bfloat16 needs an even number: set model.dtype to float32 or model.kernels to torch"
            )
        missing = -outputs % self._panel
        padded = torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
        panels = padded.view(-1, self._panel, inputs // steps, steps).transpose(1, 2).contiguous()
        return _Matrix(self._keep(panels), self._keep(None if bias is None else bias.float()), inputs, outputs)

    def _layer(self, weights: dict[str, torch.Tensor], prefix: str, index: int) -> _Layer:
        """Pack the layer whose tensors' names begin with the prefix; index: its place in the cache."""

        def take(name: str) -> torch.Tensor | None:
            return weights.pop(prefix + name, None)

        def packed(name: str) -> _Matrix:
            weight = take(f"{name}.weight")
            assert weight is not None
            return self._matrix(weight, take(f"{name}.bias"))

        a = self.architecture
        query_norm, key_norm = take("q_norm.weight"), take("k_norm.weight")
        up, up_bias = take("up.weight"), take("up.bias")
        assert up is not None
        gate = self._matrix(up[: a.intermediate], None if up_bias is None else up_bias[: a.intermediate]) if a.gated else _Matrix()
        return _Layer(
            attention_norm=self._norm_of(weights, f"{prefix}attn_norm"),
            mlp_norm=self._norm_of(weights, f"{prefix}mlp_norm"),
            query_norm=self._keep(None if query_norm is None else query_norm.float()),
            key_norm=self._keep(None if key_norm is None else key_norm.float()),
            qkv=packed("qkv"),
            out=packed("out"),
            gate=gate,
            up=self._matrix(up[-a.intermediate :], None if up_bias is None else up_bias[-a.intermediate :]),
            down=packed("down"),
            keys=self.cache[0, index].data_ptr(),
            values=self.cache[1, index].data_ptr(),
        )

    def _network(self, exit: ExitWeights) -> _Network:
        if exit.up is None:
            return _Network()
        if exit.down is None:
            return _Network(up=self._matrix(exit.up, None))
        inner = exit.down.shape[1]
        self._row_floats = max(self._row_floats, 3 * self.architecture.width + 2 * inner)
        return _Network(
            up=self._matrix(exit.up[inner:], None), gate=self._matrix(exit.up[:inner], None), down=self._matrix(exit.down, None)
        )

    def _scratch_for(self, floats: int) -> int:
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(floats)
        return self._scratch.data_ptr()

    def empty_rows(self, count: int) -> torch.Tensor:
        return torch.empty(count, self.architecture.width)

    def embed(self, rows: Rows) -> torch.Tensor:
        hidden = torch.empty(len(rows), self.architecture.width)
        self._library.hispec_embed(
            ctypes.byref(self._model),
            ctypes.byref(self._embedding),
            _int64(len(rows)),
            _pointer(_address(rows.tokens)),
            _pointer(_address(rows.positions)),
            _pointer(hidden.data_ptr()),
        )
        return hidden

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        count = len(rows)
        native = _Rows(
            count, len(rows.slots), rows.tables.shape[1],
            *(_address(part) for part in (rows.positions, rows.table, rows.tables, rows.slots, rows.slot_rows)),
        )  # fmt: skip
        self._library.hispec_run_layers(
            ctypes.byref(self._model),
            self._layer_at(first),
            _int64(last - first),
            ctypes.byref(native),
            _pointer(hidden.data_ptr()),
            _pointer(self._scratch_for(count * self._row_floats)),
        )
        return hidden

    def _layer_at(self, index: int) -> Any:
        return ctypes.byref(self._layers, index * ctypes.sizeof(_Layer))

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        count = len(hidden)
        exit = self._exits.get(depth, self._full)
        logits = torch.empty(count, exit.head.outputs)
        self._library.hispec_run_exit(
            ctypes.byref(self._model),
            ctypes.byref(self._norm),
            ctypes.byref(exit),
            _int64(count),
            _pointer(hidden.data_ptr()),
            _pointer(self._scratch_for(count * self._row_floats)),
            _pointer(logits.data_ptr()),
        )
        return logits

    def vocabulary(self, depth: int) -> torch.Tensor | None:
        return self._ids if depth in self._exits else None

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        self._library.hispec_copy_slots(
            ctypes.byref(self._model),
            ctypes.byref(self._layers),
            _int64(len(self._layers)),
            _int64(len(source)),
            _pointer(_address(source)),
            _pointer(_address(target)),
        )

    def draft(self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: ChooseGuess | None = None) -> Drafts:
        if choose is not None:
            return draft_by_passes(self, choose, depth, starts, held, stop)
        count, most = starts.homes.shape
        exit, own = self._exits.get(depth, self._full), self.exit_layers.get(depth)
        words = np.empty((2 * count, most), dtype=np.int64)
        gaps = np.empty((count, most), dtype=np.float32)
        made = np.empty(count, dtype=np.int64)
        temperatures, seeds = np.array(starts.temperatures, dtype=np.float32), np.array(starts.seeds, dtype=np.int64)
        drafts = _Drafts(
            count, most,
            *(_address(part) for part in (starts.tokens, starts.positions, starts.table, starts.steps)),
            temperatures.ctypes.data, _address(seeds), _address(starts.homes), held.data_ptr(), stop,
            _address(words), _address(words[count:]), gaps.ctypes.data, _address(made),
        )  # fmt: skip
        self._library.hispec_draft(
            ctypes.byref(self._model),
            ctypes.byref(self._embedding),
            ctypes.byref(self._layers),
            _int64(depth),
            None if own is None else self._layer_at(own),
            ctypes.byref(self._norm),
            ctypes.byref(exit),
            _pointer(_address(starts.tables)),
            _int64(starts.tables.shape[1]),
            ctypes.byref(drafts),
            _int64(self._row_floats),
            _pointer(self._scratch_for(count * (self.architecture.width + self._row_floats + exit.head.outputs))),
        )
        ends = made.tolist()
        guesses, gap_lists = words.tolist(), gaps.tolist()
        return Drafts(
            [line[:end] for line, end in zip(guesses[:count], ends, strict=True)],
            [line[:end] for line, end in zip(guesses[count:], ends, strict=True)],
            [line[:end] for line, end in zip(gap_lists, ends, strict=True)],
        )
