"""The paged key-value cache of the torch decoder."""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of every layer in one pool of blocks, shared by all sequences and all levels.

    One block table a sequence serves every layer: block b holds positions of the same tokens in all of them.
    """

    def __init__(
        self, layers: int, blocks: int, block_size: int, *, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pool = torch.zeros(2, layers, blocks, block_size, kv_heads, head_dim, dtype=dtype, device=device)

    def keys(self, layer: int) -> torch.Tensor:
        """Return `[blocks, block_size, kv_heads, head_dim]`."""
        return self.pool[0, layer]

    def values(self, layer: int) -> torch.Tensor:
        """Return `[blocks, block_size, kv_heads, head_dim]`."""
        return self.pool[1, layer]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write `[S, kv_heads, head_dim]` at slots `int64[S]` (block * block_size + offset)."""
        self.keys(layer).flatten(0, 1)[slots] = keys
        self.values(layer).flatten(0, 1)[slots] = values
