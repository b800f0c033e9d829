"""The shard in the engine's own process."""

from __future__ import annotations

from collections import deque

from hispec_ray.config import Settings
from hispec_ray.core.plan import StepPlan, StepResult
from hispec_ray.model.weights import ModelSource
from hispec_ray.shard.shard import Shard


class InlineExecutor:
    """See `Executor`: one shard, on the thread that asks. It is lost only with the engine."""

    def __init__(self, settings: Settings, source: ModelSource, like: InlineExecutor | None = None) -> None:
        self.shard: Shard = Shard(settings, source, like.shard if like else None)
        self.blocks = self.shard.blocks
        self.sources = self.shard.sources
        self.grammars = self.shard.grammars
        self.window = self.shard.levels[-1].window
        self.lanes = 1
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        return self.shard.execute(self._plans.popleft())

    def forget(self) -> None:
        self._plans.clear()

    def check(self) -> None:
        pass

    def look_ahead(self) -> None:
        pass

    def rebuild(self) -> None:
        raise AssertionError("a shard in this process is never lost")

    def close(self) -> None:
        pass
