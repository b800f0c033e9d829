"""The decoder on a CPU: weights packed once into panels, a run of layers in one native call."""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hispec_ray.core.plan import Drafts, DraftStarts, IntArray, Rows
from hispec_ray.model.architecture import Architecture, rope_tables
from hispec_ray.model.decoder import ChooseGuess, by_rule, draft_by_passes
from hispec_ray.model.heads import Columns, ExitWeights, Heads, exit_layers
from hispec_ray.model.parallel import ALONE, Collective, Piece, whole
from hispec_ray.native import library

_pointer, _int64, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


_SUM = ctypes.CFUNCTYPE(None, _pointer, _int64)
_NO_SUM = _SUM()


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
        *((name, _int64) for name in ("layer_norm", "bf16_weights", "keeps")),
        *((name, _float) for name in ("norm_eps", "scale")),
        *((name, _pointer) for name in ("cosines", "sines")),
        ("sum", _SUM),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("rows", "slots_count", "table_width")),
        *((name, _pointer) for name in ("positions", "table", "tables", "slots", "slot_rows")),
    )


class _Embedding(ctypes.Structure):
    _fields_ = (
        ("tied", _Matrix),
        *((name, _pointer) for name in ("table", "positions")),
        *((name, _int64) for name in ("offset", "first", "count")),
    )


class _Network(ctypes.Structure):
    _fields_ = tuple((name, _Matrix) for name in ("up", "gate", "down"))


class _Exit(ctypes.Structure):
    _fields_ = (("network", _Network), ("head", _Matrix), ("ids", _pointer))


class _Drafts(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("sequences", "most")),
        *((name, _pointer) for name in ("tokens", "positions", "table", "steps", "temperatures", "seeds", "homes", "held")),
        ("stop", _float),
        *((name, _pointer) for name in ("ends", "ends_from", "guesses", "seconds", "gaps", "made")),
    )


def _address(array: np.ndarray[Any, Any]) -> int:
    """Where a writable array of at least one entry lies. What `array.ctypes.data` says, five times sooner."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # an array is a buffer


def _padded(head_dim: int) -> int:
    """Return the head's size in the cache: a multiple of the kernels' chunk."""
    chunk = int(library.load().hispec_chunk())
    return -(-head_dim // chunk) * chunk


class NativeDecoder:
    """See `Decoder`. Hidden rows are fp32 whatever the weights' dtype; keys and values have the weights' dtype.

    weights: canonical tensors (see `hispec_ray.model.layout`) of the piece; emptied while they are packed, so that the model is
        never in memory twice. piece, collective: this process's part and the other ranks of its stage; all of the model where not given.
    choose: the choice rule over all ranks' columns, for `draft` where there are several.
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
        piece: Piece | None = None,
        collective: Collective = ALONE,
        choose: Callable[..., Any] | None = None,
    ) -> None:
        self.architecture = architecture
        self._piece = piece = piece or whole(architecture)
        self._collective = collective
        self._choose = choose
        self.blocks = blocks
        self.block_size = block_size
        self._library = library.load()
        self._panel = int(self._library.hispec_panel())
        self._kept: list[torch.Tensor] = []  # what the native side points to
        self._scratch = torch.empty(0)
        self._summed = torch.empty(0)  # rows that are being run
        self._failure: Exception | None = None  # of a sum, on its way through the kernels
        a = piece.architecture(architecture)
        dtype = next(iter(weights.values())).dtype
        padded_head = _padded(a.head_dim)
        self.exit_layers = exit_layers(heads, a.layers)
        self.cache = self._pool(dtype)
        cosines, sines = (None, None) if a.learned_positions else rope_tables(a.config, positions)
        self._model = _Model(
            a.width, a.heads, a.kv_heads, a.head_dim, padded_head, a.intermediate, block_size, threads,
            a.norm == "layer", dtype == torch.bfloat16, piece.rank == 0, a.norm_eps, a.head_dim**-0.5,
            self._keep(cosines), self._keep(sines), self._summing(),
        )  # fmt: skip
        # scratch of a row: the layers' own, or an exit's network and norm
        self._row_floats = a.width + (2 * a.heads + 2 * a.kv_heads) * a.head_dim + 2 * a.intermediate
        position_rows = weights.pop("positions.weight", None)
        layers = [self._layer(weights, a, f"layers.{i}.", at) for at, i in enumerate(piece.layers)]
        if heads is not None:
            own = (dict(heads.exits[depth].block or {}) for depth in self.exit_layers)
            layers += [self._layer(block, a, "", at) for at, block in enumerate(own, len(layers))]
        self._layers = (_Layer * len(layers))(*layers)
        self._norm = self._norm_of(weights, "norm") if piece.reads else _Norm()
        embedding = weights.pop("embed.weight", None)
        head = weights.pop("head.weight", embedding)
        packed = _Matrix() if head is None else self._matrix(head, None)
        tied = head is embedding  # its panels then serve both ends
        ids = piece.vocabulary
        self._embedding = _Embedding(
            packed if tied else _Matrix(), None if tied else self._keep(embedding), self._keep(position_rows if piece.rank == 0 else None),
            a.position_offset, ids.start, len(ids),
        )  # fmt: skip
        self._full = _Exit(_Network(), packed, None)
        self._exits: dict[int, _Exit] = {}
        self._columns = Columns(piece, heads)
        if heads is not None and head is not None:
            smaller, kept = packed, self._columns.of_exits
            if kept is not None:
                smaller = self._matrix(head[kept - ids.start], None)
            self._exits = {
                depth: _Exit(self._network(exit), smaller, self._keep(kept)) for depth, exit in heads.exits.items() if depth < a.layers
            }

    def twin(self, blocks: int) -> NativeDecoder:
        assert self._collective.size == 1, "the kernels' sums are bound to one decoder"
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
        layers = len(self._piece.layers) + len(self.exit_layers)
        each = self.block_bytes(self._piece.architecture(self.architecture), 1, self.block_size, dtype) // 2
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

    def _layer(self, weights: dict[str, torch.Tensor], architecture: Architecture, prefix: str, index: int) -> _Layer:
        """Pack the layer whose tensors' names begin with the prefix. architecture: of the piece; index: its place in the cache."""

        def take(name: str) -> torch.Tensor | None:
            return weights.pop(prefix + name, None)

        def packed(name: str) -> _Matrix:
            weight = take(f"{name}.weight")
            assert weight is not None
            return self._matrix(weight, take(f"{name}.bias"))

        a = architecture
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
        inner = 0 if exit.down is None else exit.down.shape[1]
        self._row_floats = max(self._row_floats, 3 * self.architecture.width + 2 * inner)
        if exit.down is None:
            return _Network(up=self._matrix(exit.up, None))
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
        self._collective.sum(hidden)
        return hidden

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        count = len(rows)
        hidden = hidden.contiguous()
        self._summed = hidden
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
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return hidden

    def _summing(self) -> Any:
        """What the kernels call to have the rows that they run summed over the ranks."""
        if self._collective.size == 1:
            return _NO_SUM

        def add_up(_: int, __: int) -> None:
            if self._failure is None:
                try:
                    self._collective.sum(self._summed)
                except Exception as error:  # ctypes would print it and go on
                    self._failure = error

        return _SUM(add_up)

    def _layer_at(self, index: int) -> Any:
        own = self.architecture.layers
        place = index - self._piece.layers.start if index < own else len(self._piece.layers) + index - own
        return ctypes.byref(self._layers, place * ctypes.sizeof(_Layer))

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
        return self._columns.vocabulary(trained=depth in self._exits)

    def whole(self, depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._columns.whole(logits, self._collective, trained=depth in self._exits)

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
        if choose is None and self._collective.size > 1:
            assert self._choose
            choose = by_rule(self._choose, starts)
        if choose is not None:
            return draft_by_passes(self, choose, depth, starts, held, stop)
        count, most = len(starts.homes), starts.homes.shape[1] - 1
        exit, own = self._exits.get(depth, self._full), self.exit_layers.get(depth)
        words = np.empty((2 * count, most), dtype=np.int64)
        gaps = np.empty((count, most), dtype=np.float32)
        made = np.empty(count, dtype=np.int64)
        temperatures, seeds = np.array(starts.temperatures, dtype=np.float32), np.array(starts.seeds, dtype=np.int64)
        ends = np.array([*itertools.chain.from_iterable(starts.ends), -1], dtype=np.int64)  # one more: an array of none has no address
        ends_from = np.array([0, *itertools.accumulate(map(len, starts.ends))], dtype=np.int64)
        drafts = _Drafts(
            count, most,
            *(_address(part) for part in (starts.tokens, starts.positions, starts.table, starts.steps)),
            _address(temperatures), _address(seeds), _address(starts.homes), held.data_ptr(), stop, _address(ends), _address(ends_from),
            _address(words), _address(words[count:]), _address(gaps), _address(made),
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
        lengths = made.tolist()
        guesses, gap_lists = words.tolist(), gaps.tolist()
        return Drafts(
            [line[:length] for line, length in zip(guesses[:count], lengths, strict=True)],
            [line[:length] for line, length in zip(guesses[count:], lengths, strict=True)],
            [line[:length] for line, length in zip(gap_lists, lengths, strict=True)],
        )
