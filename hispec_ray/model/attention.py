"""Attention of ragged rows over the paged cache: gathered blocks anywhere, flash attention on a GPU that has it."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from torch.nn.attention import activate_flash_attention_impl

from hispec_ray.core.plan import Rows
from hispec_ray.model.kv_cache import KVCache

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """Attention for the rows of one pass; made anew for each pass, called once a layer."""

    def __call__(self, layer: int, queries: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Return `[R, heads, head_dim]` for queries `[R, heads, head_dim]`: row r sees its table's positions 0 .. positions[r]."""


class GatheredAttention:
    """For any device, slow: each row gathers its own keys and runs two products around an fp32 softmax.

    A row's shapes depend on its position alone, so its result does not depend on its neighbours.
    """

    def __init__(self, rows: Rows, block_size: int, device: torch.device) -> None:
        self._contexts = [int(position) + 1 for position in rows.positions]
        used = [-(-context // block_size) for context in self._contexts]
        self._blocks = [torch.from_numpy(rows.tables[table, :count]).to(device) for table, count in zip(rows.table, used, strict=True)]

    def __call__(self, layer: int, queries: torch.Tensor, cache: KVCache) -> torch.Tensor:
        keys, values = cache.keys(layer), cache.values(layer)
        kv_heads, head_dim = keys.shape[2:]
        out = torch.empty_like(queries)
        for row, (blocks, context) in enumerate(zip(self._blocks, self._contexts, strict=True)):
            k = keys[blocks].flatten(0, 1)[:context].transpose(0, 1)  # [kv_heads, context, head_dim]
            v = values[blocks].flatten(0, 1)[:context].transpose(0, 1)
            q = queries[row].view(kv_heads, -1, head_dim)  # [kv_heads, group, head_dim]
            scores = torch.matmul(q, k.transpose(1, 2)).float() * head_dim**-0.5
            weights = torch.softmax(scores, dim=-1).to(v.dtype)
            out[row] = torch.matmul(weights, v).view(-1, head_dim)
        return out


class SingleRows:
    """For CUDA graphs: every row is a sequence of one query, described by tensors that stay where they are.

    positions: int64[B]; tables: int32[B, T], each row's own line, wide enough for the longest context.
    """

    def __init__(self, positions: torch.Tensor, tables: torch.Tensor) -> None:
        self._positions = positions
        self._tables = tables
        self._cu_rows = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)

    def __call__(self, layer: int, queries: torch.Tensor, cache: KVCache) -> torch.Tensor:
        keys, values = cache.keys(layer), cache.values(layer)
        if queries.device.type != "cuda":  # where a graph is only played, step by step
            lines = np.arange(len(queries))
            rows = Rows(lines, self._positions.numpy(), lines, self._tables.long().numpy(), lines, lines)
            return GatheredAttention(rows, keys.shape[1], queries.device)(layer, queries, cache)
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  it registers CUDA operators

        out = varlen_attn(
            queries,
            keys,
            values,
            self._cu_rows,
            None,
            1,
            self._tables.shape[1] * keys.shape[1],
            window_size=(-1, 0),
            enable_gqa=queries.shape[1] != keys.shape[2],
            seqused_k=(self._positions + 1).int(),
            block_table=self._tables,
            num_splits=1,
        )
        assert isinstance(out, torch.Tensor)
        return out


def runs_flash_attention() -> bool:
    """Return whether this process's GPU is of the one kind that Flash Attention 3 runs on: Hopper, compute capability 9."""
    return torch.cuda.get_device_capability()[0] == 9


def flash_attention_reads_blocks() -> bool:
    """Switch torch to Flash Attention 3, the one whose kernels read a block table; False, with a warning, where it cannot be had."""
    if not runs_flash_attention():  # torch would find out in the first pass
        logger.warning(
            "attention on the GPU gathers blocks row by row, which is slow: Flash Attention 3 runs on Hopper alone (compute capability 9), "
            "and this GPU's is %d.%d",
            *torch.cuda.get_device_capability(),
        )
        return False
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        logger.warning("attention on the GPU gathers blocks row by row, which is slow: Flash Attention 3 is not to be had (%s)", error)
        return False
    return True


class VarlenAttention:
    """For CUDA with Flash Attention 3: `torch.nn.attention.varlen.varlen_attn` over the block table, rows of one sequence in one run.

    num_splits = 1 keeps a sequence's result independent of the batch around it.
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        starts = np.flatnonzero(np.diff(rows.table, prepend=-1) | (np.diff(rows.positions, prepend=-2) != 1))
        ends = np.append(starts[1:], len(rows))
        self._longest = int((ends - starts).max())
        self._context = int(rows.positions.max()) + 1

        def put(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device, non_blocking=True)

        self._cu_rows = put(np.append(starts, len(rows)))
        self._contexts = put(rows.positions[ends - 1] + 1)
        self._tables = put(rows.tables[rows.table[starts]])

    def __call__(self, layer: int, queries: torch.Tensor, cache: KVCache) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  it registers CUDA operators

        out = varlen_attn(
            queries,
            cache.keys(layer),
            cache.values(layer),
            self._cu_rows,
            None,
            self._longest,
            self._context,
            window_size=(-1, 0),
            enable_gqa=queries.shape[1] != cache.keys(layer).shape[2],
            seqused_k=self._contexts,
            block_table=self._tables,
            num_splits=1,
        )
        assert isinstance(out, torch.Tensor)
        return out
