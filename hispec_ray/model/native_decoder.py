"""The decoder on a CPU: weights packed once into panels, a run of layers in one native call."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from hispec_ray.core.plan import IntArray, Rows
from hispec_ray.model.architecture import Architecture, rope_tables
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
        self, architecture: Architecture, weights: dict[str, torch.Tensor], *, positions: int, blocks: int, block_size: int, threads: int
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
        # pages that are zero without being touched: the pool takes memory as it fills
        pool = np.zeros((2, a.layers, blocks, self.block_bytes(a, block_size, dtype) // (2 * a.layers)), dtype=np.uint8)
        self.cache = torch.from_numpy(pool).view(dtype)
        cosines, sines = (None, None) if a.learned_positions else rope_tables(a.config, positions)
        self._model = _Model(
            a.width, a.heads, a.kv_heads, a.head_dim, padded_head, a.intermediate, block_size, threads,
            a.norm == "layer", dtype == torch.bfloat16, a.norm_eps, a.head_dim**-0.5, self._keep(cosines), self._keep(sines),
        )  # fmt: skip
        self._row_floats = a.width + (2 * a.heads + 2 * a.kv_heads) * a.head_dim + 2 * a.intermediate
        self._positions = weights.pop("positions.weight", None)
        self._layers = (_Layer * a.layers)(*(self._layer(weights, i) for i in range(a.layers)))
        self._norm = self._norm_of(weights, "norm")
        embedding = weights.pop("embed.weight")
        head = weights.pop("head.weight", embedding)
        self._head = self._matrix(head, None)
        self._embedding = None if head is embedding else embedding  # a tied head's panels serve both ends

    @staticmethod
    def block_bytes(architecture: Architecture, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block of the cache, keys and values of all layers."""
        return 2 * architecture.layers * architecture.kv_heads * block_size * _padded(architecture.head_dim) * dtype.itemsize

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
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % self._panel))
        panels = padded.view(-1, self._panel, inputs // steps, steps).transpose(1, 2).contiguous()
        return _Matrix(self._keep(panels), self._keep(None if bias is None else bias.float()), inputs, outputs)

    def _layer(self, weights: dict[str, torch.Tensor], index: int) -> _Layer:
        def take(name: str) -> torch.Tensor | None:
            return weights.pop(f"layers.{index}.{name}", None)

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
            attention_norm=self._norm_of(weights, f"layers.{index}.attn_norm"),
            mlp_norm=self._norm_of(weights, f"layers.{index}.mlp_norm"),
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

    def _scratch_for(self, floats: int) -> int:
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(floats)
        return self._scratch.data_ptr()

    def embed(self, rows: Rows) -> torch.Tensor:
        if self._embedding is None:
            hidden = torch.empty(len(rows), self.architecture.width)
            self._library.hispec_embed(
                ctypes.byref(self._model),
                ctypes.byref(self._head),
                _int64(len(rows)),
                _pointer(_address(rows.tokens)),
                _pointer(hidden.data_ptr()),
            )
        else:
            hidden = self._embedding[torch.from_numpy(rows.tokens)].float()
        if self._positions is not None:
            hidden += self._positions[torch.from_numpy(rows.positions) + self.architecture.position_offset].float()
        return hidden

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        count = len(rows)
        native = _Rows(
            count, len(rows.slots), rows.tables.shape[1],
            *(_address(part) for part in (rows.positions, rows.table, rows.tables, rows.slots, rows.slot_rows)),
        )  # fmt: skip
        self._library.hispec_run_layers(
            ctypes.byref(self._model),
            ctypes.byref(self._layers, first * ctypes.sizeof(_Layer)),
            _int64(last - first),
            ctypes.byref(native),
            _pointer(hidden.data_ptr()),
            _pointer(self._scratch_for(count * self._row_floats)),
        )
        return hidden

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        del depth  # every exit shares the final norm and head
        count, width = hidden.shape
        logits = torch.empty(count, self.architecture.vocabulary)
        self._library.hispec_run_head(
            ctypes.byref(self._model),
            ctypes.byref(self._norm),
            ctypes.byref(self._head),
            _int64(count),
            _pointer(hidden.data_ptr()),
            _pointer(self._scratch_for(count * width)),
            _pointer(logits.data_ptr()),
        )
        return logits
