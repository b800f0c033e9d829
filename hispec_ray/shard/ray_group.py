"""Shards as Ray actors: one group of them behind an `Executor`, watched, torn down and started anew when one is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hispec_ray.config import Settings
from hispec_ray.core.plan import Done, LevelCounts, StepPlan, StepResult
from hispec_ray.model.weights import ModelSource
from hispec_ray.shard.executor import ShardsLostError
from hispec_ray.shard.member import Facts, Member, Seat
from hispec_ray.shard.placement import reserve
from hispec_ray.shard.shard import resources_of_rank
from hispec_ray.shard.stages import deepest_exit, stages_of
from hispec_ray.speculation.grammar import Grammars

logger = logging.getLogger(__name__)

_START_S = 120.0
"""For resources that are promised but not free yet, such as those of a group that has just been torn down."""
_LOADING_S = 30.0
"""For a sign of life while members import, build, meet and read weights, which may keep a process from anything else for a while."""
_LOOK_S = 1.0
"""How often to ask whether everybody is alive while a round takes its time."""


class Actor(Member):
    """A member that answers, on a thread beside, that its process is alive."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, ray.util.get_node_ip_address())

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def alive(self) -> int:
        return os.getpid()


class RayExecutor:
    """See `Executor`: a group of actors in the Ray cluster that this process is part of.

    actor: the class of the group's members.
    Raises ValueError where the settings do not fit the model, the machine or the cluster; before any weight is read where they fit nowhere.
    """

    actor: type[Actor] = Actor

    def __init__(self, settings: Settings, source: ModelSource) -> None:
        assert settings.parallel
        a = source.architecture
        model = settings.model.model_copy(update={"threads": settings.model.threads or 1})
        self._settings = settings.model_copy(update={"model": model})
        self._patience = settings.parallel.patience_s
        self._stages = stages_of(settings.parallel, a, deepest_exit(settings.speculation, a.layers))
        self._group: PlacementGroup | None = None
        self._members: list[Any] = []
        self.lanes = min(2, len(self._stages))  # so that two stages both work
        self._flying: deque[tuple[float, list[Any]]] = deque()  # rounds that have begun: when, and the calls
        self._left = False  # rounds were dropped in the middle: the members are not in step any more
        self._done: list[Done] = []  # rounds that ended since the last plan
        self.grammars: Grammars = Grammars(source.byte_tokenizer)
        self.blocks, self.facts = self._start(None)
        self.sources, self.window = self.facts[0].sources, self.facts[0].window

    def _start(self, blocks: int | None) -> tuple[int, list[Facts]]:
        """Start the group, with a cache of so many blocks or as many as fit; return their number and what each member says of itself."""
        threads = self._settings.model.thread_count()
        each = resources_of_rank(self._settings)
        try:
            # whoever has been there once may come back
            self._group, places = reserve([len(stage.pieces) for stage in self._stages], each, _START_S, may_grow=blocks is not None)
            actor = ray.remote(concurrency_groups={"watch": 1})(self.actor)
            where = [(s, r, place) for s, ranks in enumerate(places) for r, place in enumerate(ranks)]
            self._members = [
                actor.options(  # type: ignore[attr-defined]
                    num_cpus=each["CPU"],
                    num_gpus=each.get("GPU", 0),
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle),
                    runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
                ).remote(self._settings)
                for _, _, place in where
            ]
            seats = ray.get([member.seat.remote() for member in self._members], timeout=_START_S)
            order = seated([s for s, _, _ in where], seats)
            self._members = [self._members[at] for at in order]
            machines = [[seats[at].machine for at in order if where[at][0] == stage] for stage in range(len(places))]
            (address,) = self._wait([self._members[0].bind.remote(len(self._members))], _LOADING_S)
            name = uuid.uuid4().hex
            self._wait(
                [m.join.remote(s, r, address, name, machines) for m, (s, r, _) in zip(self._members, where, strict=True)], _LOADING_S
            )
            pieces = [piece for stage in self._stages for piece in stage.pieces]
            room = min(self._wait([m.room.remote(piece) for m, piece in zip(self._members, pieces, strict=True)], _LOADING_S))
            blocks = blocks or room
            return blocks, self._wait([member.load.remote(blocks) for member in self._members], _LOADING_S)
        except RayError as error:
            self.close()
            cause = getattr(error, "cause", None)
            if isinstance(cause, ValueError):  # the settings' fault, not the cluster's
                raise ValueError(str(cause)) from error
            raise ShardsLostError(f"the shards did not come up: {_one_line(error)}") from error
        except BaseException:
            self.close()
            raise

    def submit(self, plan: StepPlan) -> None:
        if self._left:
            raise ShardsLostError("the shards were left in the middle of a round")
        plan = replace(plan, done=tuple(self._done))
        self._done.clear()
        try:
            calls = [member.execute.remote(plan) for member in self._members]
        except RayError as error:
            raise ShardsLostError(f"a shard is lost: {_one_line(error)}") from error
        self._flying.append((time.perf_counter(), calls))

    def collect(self) -> StepResult:
        begun, calls = self._flying.popleft()
        try:
            answers = self._wait(calls, self._patience)
        except RayError as error:
            raise ShardsLostError(f"a shard is lost: {_one_line(error)}") from error
        results: list[StepResult] = []
        first = 0
        for number, stage in enumerate(self._stages):
            said = answers[first : first + len(stage.pieces)]
            if len({digest for digest, _ in said}) > 1:
                raise ShardsLostError(f"the ranks of stage {number} came to different tokens")
            results.append(said[0][1])
            first += len(stage.pieces)
        result = merged(results)
        if len(results) > 1:  # their clocks may differ: by this one
            result.timings.start, result.timings.end = begun, time.perf_counter()
        self._done.append(Done(result.timings, result.verdicts))
        return result

    def _wait(self, calls: list[Any], patience_s: float) -> list[Any]:
        """What members answer. Raises RayError where one has died or failed, ShardsLostError where one gives no sign of life that long."""
        while True:
            try:
                return list(ray.get(calls, timeout=_LOOK_S))
            except GetTimeoutError:
                self._check(patience_s)

    def forget(self) -> None:
        self._flying.clear()
        self._left = True

    def check(self) -> None:
        self._check(self._patience)

    def _check(self, patience_s: float) -> None:
        try:
            ray.get([member.alive.remote() for member in self._members], timeout=max(1.0, patience_s - _LOOK_S))
        except RayError as error:
            raise ShardsLostError(f"a shard does not answer: {_one_line(error)}") from error

    def look_ahead(self) -> None:
        for member in self._members[: len(self._stages[0].pieces)] if len(self._stages) > 1 else ():
            member.look_ahead.remote()  # what goes wrong there shows in the next round

    def sent_bytes(self) -> int:
        """Return how many bytes have gone from stage to stage since the group was started."""
        return sum(ray.get([member.sent_bytes.remote() for member in self._members]))

    def rebuild(self) -> None:
        started = time.monotonic()
        self.close()
        self._flying.clear()
        self._done.clear()
        self._left = False
        try:
            self._start(self.blocks)
        except ValueError as error:  # a cluster that has become too small
            raise ShardsLostError(str(error)) from error
        logger.warning("the shards were started anew in %.1f s", time.monotonic() - started)

    def close(self) -> None:
        members, self._members = self._members, []
        for member in members:
            with contextlib.suppress(RayError):
                ray.kill(member)
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)


def seated(stages: Sequence[int], seats: Sequence[Seat]) -> list[int]:
    """Return the order in which members become ranks: those of a stage by machine and then by the links of their GPUs.

    stages: of each member, ascending; seats: where each runs.
    """
    first = {seat.machine: at for at, seat in reversed(list(enumerate(seats)))}  # machines keep their order
    return sorted(range(len(seats)), key=lambda at: (stages[at], first[seats[at].machine], seats[at].place, at))


def merged(results: Sequence[StepResult]) -> StepResult:
    """Return what the stages have done of a round together, from the lowest to the last, which knows what came of it."""
    last, counts = results[-1], [LevelCounts() for _ in results[0].levels]
    for result in results:
        for total, part in zip(counts, result.levels, strict=True):
            total.add(part)
    passes = list(results[0].timings.passes)
    for result in results[1:]:
        for cost, rows, seconds, times in result.timings.passes:
            # a pass whose layers lie in several stages is one
            at = next((i for i, one in enumerate(passes) if one[:2] == (cost, rows)), None)
            if at is None:
                passes.append((cost, rows, seconds, times))
            else:
                passes[at] = (cost, rows, passes[at][2] + seconds, times)
    timings = replace(results[0].timings, end=last.timings.end, passes=passes)
    return StepResult(last.sequences, counts, timings, last.verdicts)


def _one_line(error: Exception) -> str:
    """What happened, without the traceback that a member's own error brings along."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"
