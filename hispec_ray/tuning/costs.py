"""What passes cost on this machine: seconds of layers and heads by rows, of runs of guesses by their number, and of what is around them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from hispec_ray.core.plan import DraftStarts, Rows, SequencePlan, StepPlan, Timings
from hispec_ray.llm import LLM
from hispec_ray.model.decoder import Decoder
from hispec_ray.speculation.choice import Choose
from hispec_ray.speculation.cost import Cost
from hispec_ray.speculation.levels import Level, segment_layers
from hispec_ray.speculation.pace import LAST_ROW, Look, Pace

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_RUNS = (1, 8)
"""Guesses of the runs that are timed alone."""
_PACED_ROUNDS, _PACED_SECONDS = 100, 2.0
"""Rounds in which the pace is timed: so many, or as many as so many seconds hold."""
_ENOUGH = 8
"""Passes of one kind and number of rows that must have been seen in rounds before what they took is believed."""


@dataclass(slots=True)
class Work:
    """What a plan did: seconds of its passes, passes and runs of guesses, rounds, tokens written, lookups.

    paced: rounds that had a pace.
    """

    in_passes: float = 0.0
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
    """Seconds. layer: of one layer by rows; heads[depth]: of an exit's head and choice by rows; runs[depth]: of a run of guesses by their
    number, at batch 1.

    begin: of a pass before its first layer, as far as `layer` does not have it.
    own: by depth, the layers that exits have to themselves, see `Decoder`.
    besides: of what else takes time, see `Work`; pace: of a round's pace.
    """

    layer: Cost = field(default_factory=Cost)
    heads: dict[int, Cost] = field(default_factory=dict)
    runs: dict[int, Cost] = field(default_factory=dict)
    begin: float = 0.0
    own: dict[int, int] = field(default_factory=dict)
    besides: Besides = field(default_factory=Besides)
    pace: float = 0.0

    def seconds(self, work: Work) -> float:
        """Return what so much work takes."""
        b = self.besides
        around = work.passes * b.a_pass + work.rounds * b.a_round + work.tokens * b.a_token + work.lookups * b.a_lookup
        return work.in_passes + around + work.paced * self.pace


class Seen(NamedTuple):
    """A pass in a round. what: layers, a head, or a run of guesses; of: how many layers, or the exit's depth.

    rows: of a run its guesses.
    """

    what: Literal["layers", "head", "run"]
    of: int
    rows: int
    seconds: float


def seen_in(passes: Iterable[tuple[int, int, float, float]], levels: Sequence[Level]) -> Iterator[Seen]:
    """Yield the passes of rounds of one sequence at these levels. passes: as `Timings` has them.

    Segments that ran the same rows one after the other were one pass. Passes of exits' own layers are left out.
    """
    layers = segment_layers(levels)
    joined, last = Seen("layers", 0, 0, 0.0), -1
    for number, rows, seconds, times in passes:
        kind, at = divmod(number, len(levels))
        if kind == 0 and number == last + 1 and rows == joined.rows and levels[last].own is None:
            joined = Seen("layers", joined.of + layers[at], rows, joined.seconds + seconds)
        elif joined.of:
            yield joined
            joined = Seen("layers", 0, 0, 0.0)
        last = -1
        if kind == 0:
            last = number
            joined = joined if joined.of else Seen("layers", layers[at], rows, seconds)
        elif kind == 1:
            yield Seen("head", levels[at].depth, rows, seconds)
        elif number == 2 * len(levels) and times > 1:
            yield Seen("run", levels[at].depth, round(times - LAST_ROW), seconds * times)
    if joined.of:
        yield joined


def measure(llm: LLM, depths: Sequence[int], choose: Choose, *, context: int, rows: Sequence[int] = ROWS, repeats: int = 9) -> Costs:
    """Time layers, heads and runs of guesses alone, at a context of so many tokens, in rows of one sequence.

    Medians of sweeps over all of them: a machine that is slow for a second is slow for all alike. What rounds take may differ by half and
    more, for a pass of one row that follows one of many finds its caches full of what that one needed: see `correct`.
    Uses the cache of an engine that has nothing else to do.
    """
    decoder = llm.engine.shard.decoder
    layers = decoder.architecture.layers
    costs = Costs(own=dict(decoder.exit_layers))
    size = decoder.block_size
    table = np.arange(min(decoder.blocks, -(-(context + 64) // size)), dtype=np.int64)[None]
    most = min(table.size * size, llm.engine.max_model_len)
    context = min(context, most - max(rows) - max(_RUNS))
    if context < 0:
        raise ValueError(
            f"passes of {max(rows)} rows are to be timed, and the context of {most} tokens does not hold them and {max(_RUNS)} guesses; "
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
    held = decoder.empty_rows(max(_RUNS) + 1)
    for steps, depth in itertools.product(_RUNS, depths):
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
        actions["run", depth, steps] = partial(decoder.draft, depth, starts, held, 0.0)
    costs.pace = _pace_seconds(actions["layers", layers, rows[0]])
    for (what, depth, count), seconds in _medians(repeats, actions).items():
        if what == "layers":
            costs.layer.add(count, seconds / layers)
        elif what == "head":
            costs.heads.setdefault(depth, Cost()).add(count, seconds)
        else:
            costs.runs.setdefault(depth, Cost()).add(count, seconds)
    return costs


def correct(costs: Costs, seen: Iterable[Seen]) -> None:
    """Put what passes took in rounds in the place of what they took alone.

    begin is what is left of a pass at no layers, on the line through passes of few layers and of many. Layers take so many times as long
    as alone, by rows. Heads and runs of guesses do too, and something more that does not grow with them, for what lies around them is
    timed with them: of a depth that was not seen, what it is for the others. Between the numbers of rows that were seen often enough all
    this lies on lines, and beyond them it stays.
    """
    found: dict[tuple[str, int, int], list[float]] = {}
    for one in seen:
        found.setdefault((one.what, one.of, one.rows), []).append(one.seconds)
    found = {key: seconds for key, seconds in found.items() if len(seconds) >= _ENOUGH}
    layers = {(of, rows): seconds for (what, of, rows), seconds in found.items() if what == "layers"}
    if not layers:
        return
    most = max(of for of, _ in layers)
    begins = []
    for (few, rows), short in layers.items():
        if 2 * few < most and (long := layers.get((most, rows))):
            each = (statistics.median(long) - statistics.median(short)) / (most - few)
            begins.append(statistics.median(short) - few * each)
    costs.begin = max(0.0, statistics.median(begins)) if begins else 0.0
    far = {key: seconds for key, seconds in layers.items() if 2 * key[0] >= most}
    slower = _by_rows((rows, (one - costs.begin) / of / costs.layer.of(rows)) for (of, rows), each in far.items() for one in each)
    costs.layer = _changed(costs.layer, slower, {})
    for what, exits, times in (("head", costs.heads, slower), ("run", costs.runs, {1: slower[min(slower)]})):
        more = {
            (of, rows): statistics.median(seconds) - _at(rows, times, 1.0) * exits[of].of(rows)
            for (kind, of, rows), seconds in found.items()
            if kind == what and of in exits
        }
        shared = _by_rows((rows, seconds) for (_, rows), seconds in more.items())
        for depth, alone in exits.items():
            own = _by_rows((rows, seconds) for (of, rows), seconds in more.items() if of == depth)
            exits[depth] = _changed(alone, times, own or shared)


def _by_rows(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The median of the values of each number of rows, the fewest rows first."""
    found: dict[int, list[float]] = {}
    for rows, value in values:
        found.setdefault(rows, []).append(value)
    return {rows: statistics.median(found[rows]) for rows in sorted(found)}


def _at(rows: int, known: Mapping[int, float], without: float) -> float:
    """What is known at so many rows, on lines between; `without` where nothing is."""
    return float(np.interp(rows, list(known), list(known.values()))) if known else without


def _changed(cost: Cost, times: Mapping[int, float], more: Mapping[int, float]) -> Cost:
    """A cost that is so many times as high, and so many seconds more, by rows."""
    changed = Cost()
    for rows in sorted({*ROWS, *times, *more}):
        before = _at(rows, times, 1.0) * cost.of(rows)
        changed.add(rows, max(before + _at(rows, more, 0.0), 0.1 * before))
    return changed


def fit(costs: Costs, works: Sequence[Work], seconds: Sequence[float]) -> None:
    """Set what lies around passes so that the works take about these seconds.

    Non-negative least squares, in proportion to each work's seconds, by trying every set of terms that are not zero.
    """
    names = [f.name for f in fields(Work) if f.name not in ("in_passes", "paced")]
    rows = np.array([[getattr(work, name) / spent for name in names] for work, spent in zip(works, seconds, strict=True)])
    wanted = np.array([1 - work.in_passes / spent for work, spent in zip(works, seconds, strict=True)])
    best, least = np.zeros(len(names)), math.inf
    for kept in itertools.product((False, True), repeat=len(names)):
        columns = np.flatnonzero(kept)
        found = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0] if len(columns) else np.zeros(0)
        error = float(np.sum((rows[:, columns] @ found - wanted) ** 2))
        if (found >= 0).all() and error < least - 1e-9:
            best = np.zeros(len(names))
            best[columns] = found
            least = error
    costs.besides = Besides(*best.tolist())


@torch.inference_mode()
def _pace_seconds(between: Callable[[], object]) -> float:
    """Time what a pace takes in a round of one sequence with guesses. between: what runs between its turns, and leaves it cold memory."""
    pace = Pace((0, 4, 8), drafts=True)
    plan = StepPlan((SequencePlan(0, (0,), 0, (0,), True, 8, 0.0, 0),))
    times: list[float] = []
    until = time.perf_counter() + _PACED_SECONDS
    for number in range(_PACED_ROUNDS):
        if times and time.perf_counter() > until:
            break
        between()
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
