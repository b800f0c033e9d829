"""The shard in the engine's own process."""

from __future__ import annotations

from hispec_ray.config import Settings
from hispec_ray.core.plan import StepPlan, StepResult
from hispec_ray.model.weights import ModelSource
from hispec_ray.shard.shard import Shard


class InlineExecutor:
    """Runs plans on one shard, on the thread that asks. blocks: of the key-value pool; sources: see `Round`; grammars: the shard's."""

    def __init__(self, settings: Settings, source: ModelSource, like: InlineExecutor | None = None) -> None:
        self.shard: Shard = Shard(settings, source, like.shard if like else None)
        self.blocks = self.shard.blocks
        self.sources = self.shard.sources
        self.grammars = self.shard.grammars
        self.window = self.shard.levels[-1].window

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one round; one SequenceResult for each sequence of the plan, in its order."""
        return self.shard.execute(plan)
