"""The way from the engine to the shards, wherever they run."""

from __future__ import annotations

from typing import Protocol

from hispec_ray.core.plan import StepPlan, StepResult
from hispec_ray.speculation.grammar import Grammars


class ShardsLostError(RuntimeError):
    """A shard has died, hangs or failed, and what the shards held is lost: `Executor.rebuild` starts them anew, empty."""


class Executor(Protocol):
    """Runs plans on the shards.

    blocks: of the key-value pool. lanes: plans that may be in flight at once, of different sequences. sources: see `Round`.
    window: most tentative tokens of a round. grammars: compiles those of requests.
    """

    blocks: int
    lanes: int
    sources: tuple[str, ...]
    window: int
    grammars: Grammars

    def submit(self, plan: StepPlan) -> None:
        """Begin a round. Raises ShardsLostError."""

    def collect(self) -> StepResult:
        """Wait for the round that began first; one SequenceResult for each sequence of its plan, in its order. Raises ShardsLostError."""

    def forget(self) -> None:
        """Drop the rounds in flight: something was raised in the middle of one, and nobody will collect them."""

    def check(self) -> None:
        """Raise ShardsLostError where a shard has died or does not answer. Called now and then while nothing is in flight."""

    def look_ahead(self) -> None:
        """Use the time until the round in flight ends, where there is a way to: called when nothing else can be begun."""

    def rebuild(self) -> None:
        """Start the shards anew after they were lost: same weights, empty caches. Raises ShardsLostError where they do not come up."""

    def close(self) -> None:
        """End the shards. Afterwards nothing else is called."""
