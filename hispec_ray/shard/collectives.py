"""How the ranks of a stage add up and compare: torch.distributed's groups, and DeepSpeed's shared memory on one machine's CPUs."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_SHARED = Path("/dev/shm")
_WORKSPACE_BYTES = 70 << 20
"""What DeepSpeed takes of the shared memory for each rank."""
_PIECE = 1 << 17
"""Numbers that are summed at once: below DeepSpeed's threshold, above which ranks share the work and the order of sums changes."""
_VECTOR = 32
"""Numbers in the longest vector: what is left over behind the last whole one would be summed in another order."""


class Watched:
    """Knows how long this process has been waiting for other ranks. For a thread beside, which ends a process that waits in vain."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._queued: deque[tuple[float, Any]] = deque()  # when a GPU was given a collective, and an event behind it

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def queue(self, event: Any) -> None:
        """Take down that a GPU has been given a collective. event: of torch.cuda, recorded behind it, which is not waited for."""
        self._queued.append((time.monotonic(), event))

    def seconds(self) -> float:
        """Return how long the call that runs now has waited, or a GPU has not got behind a collective; 0 where there is none."""
        while self._queued and self._queued[0][1].query():
            self._queued.popleft()
        began = [since for since in (self._since, *(since for since, _ in list(self._queued)[:1])) if since is not None]
        return time.monotonic() - min(began) if began else 0.0


class Group:
    """A `Collective` over a process group of torch.distributed: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup, watched: Watched) -> None:
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._group = group
        self._watched = watched
        if torch.cuda.is_available() and "nccl" in dist.get_backend_config(group):  # it connects in the first call, for seconds
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            torch.cuda.synchronize()

    def sum(self, rows: torch.Tensor) -> None:
        if rows.device.type == "cuda" or self.size <= 2:  # of two numbers there is one sum
            with self._watched.waiting():
                dist.all_reduce(rows, group=self._group)
            self._queued(rows)
            return
        parts = self.gather(rows).float()  # gloo's order of sums depends on where a number stands
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        rows.copy_(total)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = torch.empty(self.size * part.numel(), dtype=part.dtype, device=part.device)
        with self._watched.waiting():
            dist.all_gather_single(parts, part.flatten(), group=self._group)
        self._queued(parts)
        return parts.view(self.size, *part.shape)

    def _queued(self, rows: torch.Tensor) -> None:
        """On a GPU the call has only queued the work: what hangs there shows in that the GPU does not get behind it."""
        if rows.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._watched.queue(event)


class SharedMemory:
    """A `Collective` on DeepSpeed's all-reduce in shared memory: microseconds where gloo takes a millisecond. One in a process.

    It spins while it waits: each rank wants a core of its own.
    """

    def __init__(self, size: int, rank: int, name: str, watched: Watched, meet: Callable[[], None]) -> None:
        """name: of the memory, unlike any other's on this machine. meet: returns when all ranks have called it.

        Raises RuntimeError where the extension cannot be built or used here; the message says why.
        """
        self.size = size
        self.rank = rank
        self._watched = watched
        library = _load()
        before = {key: os.environ.get(key) for key in ("LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        os.environ.update(LOCAL_SIZE=str(size), MASTER_ADDR="hispec", MASTER_PORT=name)  # what it names its memory by
        try:
            library.initialize(size, rank)
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
        try:
            meet()
        finally:
            for path in _SHARED.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_hispec_{name}_{rank}"):
                path.unlink()  # all ranks have it open, or never will: with the last of them it is gone, however that ends
        self._sum = torch.ops.deepspeed.inference_all_reduce_.default
        self._scratch = torch.zeros(_PIECE)

    def sum(self, rows: torch.Tensor) -> None:
        flat = rows.view(-1)
        with self._watched.waiting():
            if rows.dtype == torch.float32 and len(flat) % _VECTOR == 0:
                for start in range(0, len(flat), _PIECE):
                    self._sum(flat[start : start + _PIECE])
                return
            for start in range(0, len(flat), _PIECE):  # other dtypes need instructions that not every processor has
                piece = flat[start : start + _PIECE]
                padded = self._scratch[: -(-len(piece) // _VECTOR) * _VECTOR]
                padded.zero_()
                padded[: len(piece)] = piece
                self._sum(padded)
                piece.copy_(padded[: len(piece)])

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = torch.zeros(self.size, *part.shape, dtype=part.dtype)
        parts[self.rank] = part
        self.sum(parts)  # zero changes no number
        return parts


def _load() -> Any:
    """DeepSpeed's extension, built at first use (about a minute). Raises RuntimeError where that fails."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.op_builder import ShareMemCommBuilder  # noqa: PLC0415  (takes a second, and prints)

        library = ShareMemCommBuilder().load(verbose=False)
    except Exception as error:  # whatever a missing package, compiler or folder raises
        raise RuntimeError(f"DeepSpeed's shared-memory extension cannot be built: {' '.join(str(error).split())}") from error
    if library.vector_kernel_level() < 1:
        raise RuntimeError("DeepSpeed's shared-memory extension needs a processor with AVX2")
    return library


def shared_memory_problem(ranks: int = 2) -> str | None:
    """Return why ranks on this machine cannot add up in shared memory, None where they can. Builds the extension, about a minute."""
    try:
        _load()
    except RuntimeError as error:
        return str(error)
    free, needed = shutil.disk_usage(_SHARED).free, ranks * _WORKSPACE_BYTES
    return f"{_SHARED} has {free >> 20} MiB free; {ranks} ranks take {needed >> 20} MiB" if free < needed else None


def collective_on_one_machine(group: dist.ProcessGroup, name: str, watched: Watched) -> Group | SharedMemory:
    """Return the fastest collective for ranks that are on the CPUs of one machine. Says in the log where that is not the fast one.

    All ranks of the group call it together, and come to the same: where one cannot, none does.
    """
    gloo = Group(group, watched)

    def meet() -> None:
        dist.barrier(group)

    problem = shared_memory_problem(gloo.size)
    able = torch.tensor([0 if problem else 1])
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=group)
    if able.item():
        return SharedMemory(gloo.size, gloo.rank, name, watched, meet)
    logger.warning("ranks on one machine add up by gloo, a hundred times slower than shared memory: %s", problem or "another rank cannot")
    return gloo
