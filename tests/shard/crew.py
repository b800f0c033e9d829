"""Ranks as threads of this process: what several shards compute together, without processes."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from hispec_ray.config import ParallelSettings, Settings
from hispec_ray.core.plan import Done, StepPlan, StepResult
from hispec_ray.model.parallel import Collective
from hispec_ray.model.weights import ModelSource
from hispec_ray.shard.ray_group import merged
from hispec_ray.shard.shard import Shard
from hispec_ray.shard.stages import Stage, deepest_exit, stages_of

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
    """An executor over stages of ranks that are threads. results: by stage and rank, of the last round."""

    def __init__(self, settings: Settings, source: ModelSource, *ranks: int, layers: Sequence[int] = (), lanes: int = 1) -> None:
        """ranks: of each stage; layers: of each stage, where there are several."""
        asked = [{"tp": tp, "layers": count} for tp, count in zip(ranks, layers or (None,), strict=True)]
        a = source.architecture
        parallel = ParallelSettings.model_validate({"stages": asked})
        self.stages = stages_of(parallel, a, deepest_exit(settings.speculation, a.layers))
        self.meetings = [Meeting(count) for count in ranks]
        self.shards: list[list[Shard]] = []
        for stage, meeting in zip(self.stages, self.meetings, strict=True):

            def make(collective: Collective, stage: Stage = stage, meeting: Meeting = meeting) -> Shard:
                return Shard(settings, source, piece=stage.pieces[collective.rank], collective=Threads(meeting, collective.rank))

            self.shards.append(together(len(stage.pieces), make))
        first = self.shards[0][0]
        self.blocks = min(shard.blocks for ranks in self.shards for shard in ranks)
        self.sources, self.grammars, self.window = first.sources, first.grammars, first.levels[-1].window
        self.lanes = lanes
        self.results: list[list[StepResult]] = []
        self.most_in_flight = 0
        self._flying: deque[tuple[StepPlan, list[Any]]] = deque()
        self._done: list[Done] = []

    def submit(self, plan: StepPlan) -> None:
        """The first stage's part of the round is done at once, as if the others were slow."""
        plan = replace(plan, done=tuple(self._done))
        self._done.clear()
        one = len(self.stages) == 1
        said = self._on(0, lambda shard: ([], None, shard.execute(plan)) if one else shard.ask(plan))
        self._flying.append((plan, said))
        self.most_in_flight = max(self.most_in_flight, len(self._flying))

    def collect(self) -> StepResult:
        plan, said = self._flying.popleft()
        self.results = [[result for _, _, result in said]]
        asked, hidden, _ = said[0]
        asked = pickle.loads(pickle.dumps(asked))  # it crosses a process
        for stage in range(1, len(self.stages)):
            answers = self._on(stage, lambda shard, rows=hidden: shard.answer(plan, asked, rows.clone()))
            hidden = answers[0][0]
            assert all(torch.equal(hidden, other) for other, _ in answers[1:]), "ranks disagree"
            self.results.append([result for _, result in answers])
        for ranks in self.results:
            tokens = [[s.tokens for s in result.sequences] for result in ranks]
            assert all(other == tokens[0] for other in tokens[1:]), "ranks disagree"
        result = merged([ranks[0] for ranks in self.results])
        self._done.append(Done(result.timings, result.verdicts))
        return result

    def forget(self) -> None:
        self._flying.clear()

    def check(self) -> None:
        pass

    def look_ahead(self) -> None:
        if len(self.stages) > 1:
            self._on(0, lambda shard: shard.look_ahead())

    def _on(self, stage: int, work: Callable[[Shard], Any]) -> list[Any]:
        return together(len(self.stages[stage].pieces), lambda collective: work(self.shards[stage][collective.rank]))
