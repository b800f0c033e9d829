"""What passes cost on this machine: seconds of layers, heads and guesses by rows, and of what lies around them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import numpy as np
import torch

from hispec_ray.core.plan import DraftStarts, Rows, SequencePlan, StepPlan, Timings
from hispec_ray.llm import LLM
from hispec_ray.model.decoder import Decoder
from hispec_ray.speculation.choice import Choose
from hispec_ray.speculation.cost import Cost
from hispec_ray.speculation.pace import Look, Pace

_STEPS = 8  # guesses of a run that is timed
_PACED_ROUNDS = 300
LEAST_SCALE = 0.5
"""Passes in rounds are not much faster than alone, but the machine may have been slow when they were timed."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(slots=True)
class Work:
    """What a plan did: seconds of its passes, timed alone, outside of rounds; passes, rounds, tokens written, lookups.

    A run of guesses counts as half a pass. paced: rounds that had a pace.
    """

    alone: float = 0.0
    passes: float = 0.0
    rounds: float = 0.0
    tokens: float = 0.0
    lookups: float = 0.0
    paced: float = 0.0


@dataclass(frozen=True, slots=True)
class Besides:
    """Seconds around the passes."""

    a_pass: float = 0.0
    a_round: float = 0.0
    a_token: float = 0.0
    a_lookup: float = 0.0


@dataclass(slots=True)
class Costs:
    """Seconds. layer: of one layer by rows; heads[depth]: of an exit's head and choice by rows; guesses[depth]: of one guess of a run.

    own: by depth, the layers that exits have to themselves, see `Decoder`.
    besides: of what else takes time, see `Work`; pace: of a round's pace.
    scale: how many times as long passes take in a round as alone, when they were timed.
    """

    layer: Cost = field(default_factory=Cost)
    heads: dict[int, Cost] = field(default_factory=dict)
    guesses: dict[int, Cost] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    besides: Besides = field(default_factory=Besides)
    scale: float = 1.0
    pace: float = 0.0

    def last_row(self, depth: int) -> float:
        """Return what the row of a run's last guess takes, which has no head."""
        return (depth + (depth in self.own)) * self.layer.of(1)

    def seconds(self, work: Work) -> float:
        """Return what so much work takes."""
        b = self.besides
        passes = self.scale * work.alone + work.passes * b.a_pass
        return passes + work.rounds * b.a_round + work.tokens * b.a_token + work.lookups * b.a_lookup + work.paced * self.pace


def measure(llm: LLM, depths: Sequence[int], choose: Choose, *, context: int, rows: Sequence[int] = ROWS, repeats: int = 9) -> Costs:
    """Time layers, heads and guesses at a context of so many tokens, in rows of one sequence.

    Medians of sweeps over all of them: a machine that is slow for a second is slow for all alike.
    Uses the cache of an engine that has nothing else to do.
    """
    decoder = llm.engine.shard.decoder
    layers = decoder.architecture.layers
    costs = Costs(own=dict(decoder.exit_layers), pace=_pace_seconds())
    size = decoder.block_size
    table = np.arange(min(decoder.blocks, -(-(context + 64) // size)), dtype=np.int64)[None]
    most = min(table.size * size, llm.engine.max_model_len)
    context = min(context, most - max(rows) - _STEPS)
    if context < 0:
        raise ValueError(
            f"passes of {max(rows)} rows are to be timed, and the context of {most} tokens does not hold them and {_STEPS} guesses; "
            "raise model.max_model_len or cache.blocks"
        )
    actions: dict[tuple[str, int, int], Callable[[], object]] = {}
    for count in rows:
        positions = np.arange(context, context + count, dtype=np.int64)
        part = Rows(
            np.ones(count, dtype=np.int64), positions, np.zeros(count, dtype=np.int64), table, positions, np.arange(count, dtype=np.int64)
        )
        hidden = decoder.embed(part)
        actions["layers", layers, count] = partial(_run, decoder, hidden, part)
        for depth in {*depths, layers}:
            actions["head", depth, count] = partial(_say, decoder, choose, depth, hidden)
    steps = _STEPS
    held = decoder.empty_rows(steps + 1)
    starts = DraftStarts(
        tokens=np.array([1]),
        positions=np.array([context]),
        table=np.array([0]),
        tables=table,
        steps=np.array([steps]),
        homes=np.arange(steps + 1)[None],
        temperatures=[0.0],
        seeds=[0],
        ends=[frozenset()],
    )
    actions |= {("guesses", depth, steps): partial(decoder.draft, depth, starts, held, 0.0) for depth in depths}
    for (what, depth, count), seconds in _medians(repeats, actions).items():
        if what == "layers":
            costs.layer.add(count, seconds / layers)
        elif what == "head":
            costs.heads.setdefault(depth, Cost()).add(count, seconds)
        else:
            costs.guesses.setdefault(depth, Cost()).add(1, max(0.0, seconds - costs.last_row(depth)) / count)
    return costs


def fit(costs: Costs, works: Sequence[Work], seconds: Sequence[float]) -> None:
    """Set the scale and what lies around passes so that the works take about these seconds, in proportion to each.

    Non-negative least squares, by trying every set of terms that are not zero. One of the terms is the scale's excess over LEAST_SCALE.
    """
    names = [f.name for f in fields(Work) if f.name != "paced"]
    rows = np.array([[getattr(work, name) / spent for name in names] for work, spent in zip(works, seconds, strict=True)])
    wanted = 1 - LEAST_SCALE * rows[:, 0]
    best, least = np.zeros(len(names)), math.inf
    for kept in itertools.product((False, True), repeat=len(names)):
        columns = np.flatnonzero(kept)
        found = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0] if len(columns) else np.zeros(0)
        error = float(np.sum((rows[:, columns] @ found - wanted) ** 2))
        if (found >= 0).all() and error < least - 1e-9:
            best = np.zeros(len(names))
            best[columns] = found
            least = error
    scale, a_pass, a_round, a_token, a_lookup = best.tolist()
    costs.scale, costs.besides = LEAST_SCALE + scale, Besides(a_pass, a_round, a_token, a_lookup)


def _pace_seconds() -> float:
    """Time what a pace takes in a round of one sequence with guesses."""
    pace = Pace((0, 4, 8), drafts=True)
    plan = StepPlan((SequencePlan(0, (0,), 0, (0,), True, 8, 0.0, 0),))
    times = []
    for number in range(_PACED_ROUNDS):
        begun = time.perf_counter()
        started = pace.begin(plan)
        chosen = pace.windows(0)
        kept = [0, *chosen[1:]]
        rows = ((0, 1), (1, chosen[1] + 1), (2, chosen[2] + 1), (4, chosen[1] + 1), (5, chosen[2] + 1), (6, 1))
        passes = [(cost, count, 1e-3 * (1 + 0.01 * count), 1.0) for cost, count in rows]
        looks = [Look(0, chosen[2] + 1, 0, kept, kept)] if chosen[2] else []
        pace.learn(started, looks, Timings(0.01 * number, 0.01 * number + 0.009, passes=passes))
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _run(decoder: Decoder, hidden: torch.Tensor, rows: Rows) -> None:
    decoder.run(0, decoder.architecture.layers, hidden.clone(), rows)


def _say(decoder: Decoder, choose: Choose, depth: int, hidden: torch.Tensor) -> None:
    count = len(hidden)
    choose(decoder.logits(depth, hidden), [0.0] * count, [0] * count, list(range(count)), decoder.vocabulary(depth))


def _medians(repeats: int, actions: Mapping[tuple[str, int, int], Callable[[], object]]) -> dict[tuple[str, int, int], float]:
    """Take every action in turn, `repeats` times after once that does not count; return the median of each one's seconds."""
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in actions}
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for key, action in actions.items():
                start = time.perf_counter()
                action()
                if turn:
                    times[key].append(time.perf_counter() - start)
    return {key: statistics.median(found) for key, found in times.items()}
