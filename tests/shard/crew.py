"""Ranks as threads of this process: what several shards compute together, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hispec_ray.config import Settings
from hispec_ray.core.plan import StepPlan, StepResult
from hispec_ray.model.parallel import Collective, piece_of
from hispec_ray.model.weights import ModelSource
from hispec_ray.shard.shard import Shard

T = TypeVar("T")
_PATIENCE = 60


class Meeting:
    """Where the ranks of a stage put their parts down for the others to read."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self.sums = 0


class Threads:
    """A `Collective` of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.size = len(meeting.parts)
        self.rank = rank
        self._meeting = meeting

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self._meeting.parts[self.rank] = part
        self._meeting.barrier.wait()
        parts = torch.stack(self._meeting.parts)
        self._meeting.barrier.wait()
        return parts

    def sum(self, rows: torch.Tensor) -> None:
        assert rows.is_contiguous()
        parts = self.gather(rows)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        rows.copy_(total)
        self._meeting.sums += self.rank == 0


def together(size: int, work: Callable[[Collective], T]) -> list[T]:
    """Run the work once for each rank, each in a thread of its own; what each returned. Raises what one of them raises."""
    meeting = Meeting(size)

    def rank(number: int) -> T:
        try:
            return work(Threads(meeting, number))
        except BaseException:
            meeting.barrier.abort()  # the others wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(rank, number) for number in range(size)]
        errors = [one.exception() for one in running]
        first = next((e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)), None)
        if first is not None:
            raise first
        return [one.result() for one in running]


class Crew:
    """An executor over one stage of ranks that are threads. results: of the last plan, by rank."""

    def __init__(self, settings: Settings, source: ModelSource, ranks: int) -> None:
        a = source.architecture
        self.ranks = ranks
        self.meeting = Meeting(ranks)

        def make(collective: Collective) -> Shard:
            piece = piece_of(a, range(a.layers), ranks, collective.rank)
            return Shard(settings, source, piece=piece, collective=Threads(self.meeting, collective.rank))

        self.shards: list[Shard] = together(ranks, make)
        first = self.shards[0]
        self.blocks, self.sources, self.grammars, self.window = first.blocks, first.sources, first.grammars, first.levels[-1].window
        self.results: Sequence[StepResult] = ()
        self._timings = None

    def execute(self, plan: StepPlan) -> StepResult:
        timed = StepPlan(plan.sequences, plan.ended, self._timings)
        self.results = together(self.ranks, lambda collective: self.shards[collective.rank].execute(timed))
        for other in self.results[1:]:
            assert [s.tokens for s in other.sequences] == [s.tokens for s in self.results[0].sequences], "ranks disagree"
        self._timings = self.results[0].timings
        return self.results[0]
