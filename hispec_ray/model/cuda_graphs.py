"""Passes of few rows as CUDA graphs: one launch for a run of layers, where launching kernel by kernel takes longer than they run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hispec_ray.core.plan import Rows
from hispec_ray.model.attention import Attention, SingleRows

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows that have a graph; a pass is padded to the next one, and runs without a graph where it has more."""

Layers = Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor, Attention], torch.Tensor]
"""(first, last, hidden [B, width], positions int64[B], slots int64[B], attention) -> hidden rows behind layers [first, last)."""
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""What is done once -> what does it again, and the tensor that the result is in afterwards."""


def capture_cuda(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """Capture work on static tensors as a CUDA graph (torch's own recipe: warm up on a stream beside, then capture)."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph.replay, result


class _Static:
    """The tensors that a graph reads, for a bucket of rows."""

    def __init__(self, rows: int, width: int, table_width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.zeros(rows, width, dtype=dtype, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = torch.zeros(rows, table_width, dtype=torch.int32, device=device)
        self.attention = SingleRows(self.positions, self.tables)


class GraphedLayers:
    """Runs layers by graphs, captured at first use for each run of layers and bucket.

    Each row attends as a sequence of its own: keys of all rows are in the cache before any attends, so that is the same.
    """

    def __init__(
        self, layers: Layers, capture: Capture, *, width: int, table_width: int, spare_block: int, block_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """table_width: blocks of the longest sequence; more of a pass's tables is not read.
        spare_block: that padding rows write to and read, nobody else's.
        """
        self._layers = layers
        self._capture = capture
        self._shape = (width, table_width, dtype, device)
        self._spare = spare_block
        self._block_size = block_size
        self._static: dict[int, _Static] = {}
        self._graphs: dict[tuple[int, int, int], tuple[Callable[[], object], torch.Tensor]] = {}

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor | None:
        """Return what layers [first, last) make of hidden `[R, width]`; None where the pass is none for a graph."""
        count = len(rows)
        if count > BUCKETS[-1] or len(rows.slots) != count or first == last:
            return None
        bucket = next(size for size in BUCKETS if size >= count)
        if bucket not in self._static:
            self._static[bucket] = _Static(bucket, *self._shape)
        static = self._static[bucket]
        lines = rows.tables[rows.table, : static.tables.shape[1]]  # spare blocks may stand beyond the context; no row reads them there
        tables = torch.full((bucket, lines.shape[1]), self._spare, dtype=torch.int32)
        tables[:count] = torch.from_numpy(lines)
        positions, slots = torch.zeros(bucket, dtype=torch.int64), torch.full((bucket,), self._spare * self._block_size, dtype=torch.int64)
        positions[:count], slots[torch.from_numpy(rows.slot_rows)] = torch.from_numpy(rows.positions), torch.from_numpy(rows.slots)
        static.hidden[:count].copy_(hidden)
        static.positions.copy_(positions, non_blocking=True)
        static.slots.copy_(slots, non_blocking=True)
        static.tables[:, : tables.shape[1]].copy_(tables, non_blocking=True)
        key = first, last, bucket
        if key not in self._graphs:
            self._graphs[key] = self._capture(
                lambda: self._layers(first, last, static.hidden, static.positions, static.slots, static.attention)
            )
        replay, result = self._graphs[key]
        replay()
        return result[:count].clone()  # the next replay writes there
