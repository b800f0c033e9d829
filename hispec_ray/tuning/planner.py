"""Picks a plan: predicts many by replaying recorded texts, runs the best few, keeps the fastest."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from hispec_ray.config import Settings, SpeculationSettings
from hispec_ray.llm import LLM
from hispec_ray.request import SamplingParams
from hispec_ray.shard.shard import levels_for
from hispec_ray.tuning.contest import Decoded, contest, engine_for
from hispec_ray.tuning.costs import Costs, Seen, correct, fit, seen_in
from hispec_ray.tuning.recording import Recording
from hispec_ray.tuning.replay import replay

PLAIN = SpeculationSettings(method="plain")
GRID: dict[str, tuple[int | float, ...]] = {
    "draft_tokens": (1, 2, 3, 4, 5, 6, 8, 10, 12, 16),
    "window": (2, 3, 4, 5, 6, 8, 10, 12, 16, 24),
    "stop_below": (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0),
    "branches": (0, 1, 2, 3),
}
"""The values that a plan's numbers may take."""
_BRANCH_BELOW = 1.0
_CALIBRATION_TURNS = 3
_CALIBRATION_SECONDS = 20.0


@dataclass(slots=True)
class Plan:
    """Settings, the tokens a second that they are expected to make, and what they made where they were run. At batch 1.

    Expected is against plain decoding, whose own speed is that of the same minutes. turns: how many times plain decoding's speed, in
    each turn in which it was run beside it.
    """

    speculation: SpeculationSettings
    predicted: float
    measured: float | None = None
    turns: Sequence[float] = ()

    def name(self) -> str:
        return describe(self.speculation)


def describe(speculation: SpeculationSettings) -> str:
    """A plan in a few words, as tables and figures have it."""
    s = speculation
    if s.method == "plain":
        return "plain"
    exits = "" if s.drafter == "lookup" else str(s.exits.draft)
    if s.method == "hispec":
        exits += f"{'-' if exits else ''}{s.exits.check}"
    words = [s.method, *([s.drafter] if s.drafter != "exit" else []), *([exits] if exits else [])]
    words.append(f"{s.draft_tokens}" + (f"/{s.window}" if s.method == "hispec" else ""))
    if s.drafter != "exit" and s.pace == "fixed":
        words.append(f"p {s.lookup_confidence:g}")
    if s.stop_below:
        words.append(f"stop {s.stop_below:g}")
    if s.branches and s.branch_below:
        words.append(f"branches {s.branches}")
    return " ".join(words)


def families(
    depths: Sequence[int], *, heads: str | None, methods: Sequence[str], drafters: Sequence[str], phrases: str | None = None
) -> Iterator[SpeculationSettings]:
    """Yield a plan of every shape: method, drafter and exits, with middling numbers. heads, phrases: files, as in the settings."""
    for method, drafter in itertools.product(methods, drafters):
        drafts: Sequence[int | None] = (None,) if drafter == "lookup" else depths
        checks: Sequence[int | None] = depths if method == "hispec" else (None,)
        for draft, check in itertools.product(drafts, checks):
            if draft is not None and check is not None and draft >= check:
                continue
            tree: dict[str, object] = {"exits": {"draft": draft, "check": check, "heads": heads}}
            if drafter != "exit":
                tree["phrases"] = phrases
            numbers = {"draft_tokens": 3, "window": 6} if method == "hispec" else {"draft_tokens": 4}
            yield SpeculationSettings.model_validate({"method": method, "drafter": drafter, **tree, **numbers})


def far(plan: SpeculationSettings) -> SpeculationSettings:
    """The same shape with numbers that suit guesses which are seldom wrong."""
    return plan.model_copy(update={"draft_tokens": 8, "window": 16 if plan.method == "hispec" else plan.window})


def climb(start: SpeculationSettings, score: Callable[[SpeculationSettings], float]) -> tuple[float, SpeculationSettings]:
    """Move each number of a plan along its grid while the score rises, in turn, until none moves."""
    fields = ["draft_tokens"]
    if start.method == "hispec":
        fields.append("window")
    if not (start.method == "single" and start.drafter == "lookup"):
        fields += ["stop_below", "branches"]
    best, top = start, score(start)
    moved = True
    while moved:
        moved = False
        for field in fields:
            values = GRID[field]
            for step in (1, -1):
                while True:
                    at = min(range(len(values)), key=lambda i: abs(values[i] - getattr(best, field))) + step
                    if not 0 <= at < len(values):
                        break
                    update: dict[str, int | float] = {field: values[at]}
                    if field == "branches":
                        update["branch_below"] = _BRANCH_BELOW if values[at] else 0.0
                    tried = best.model_copy(update=update)
                    found = score(tried)
                    if found <= top:
                        break
                    best, top, moved = tried, found, True
    return top, best


def predict(
    recordings: Sequence[Recording], costs: Costs, layers: int, starts: Sequence[SpeculationSettings], tell: Callable[[int], None]
) -> list[Plan]:
    """Return the best plan of every shape and plain decoding, fastest first."""
    known: dict[SpeculationSettings, float] = {}

    def score(speculation: SpeculationSettings) -> float:
        if speculation not in known:
            known[speculation] = replay(speculation, recordings, costs, layers)[0]
        return known[speculation]

    plans = [Plan(PLAIN, score(PLAIN))]
    for number, start in enumerate(starts):
        top, best = max((climb(begin, score) for begin in (start, far(start))), key=lambda found: found[0])
        plans.append(Plan(best, top))
        tell(number + 1)
    return sorted(plans, key=lambda plan: -plan.predicted)


class Bench:
    """Lets plans write the recorded texts one by one, on engines that share the weights of `like`."""

    def __init__(self, settings: Settings, recordings: Sequence[Recording], max_tokens: int, like: LLM) -> None:
        self._like = like
        self._settings = settings
        self._prompts = [recording.tokens[: recording.prompt] for recording in recordings]
        self._params = [SamplingParams(max_tokens=max_tokens, temperature=r.temperature, seed=r.seed) for r in recordings]
        self._tokens = max(map(len, self._prompts)) + max_tokens

    def compare(
        self,
        plans: Sequence[SpeculationSettings],
        runs: int,
        seconds: float = 0.0,
        tell: Callable[[int, int], None] = lambda done, total: None,
        *,
        passes: bool = False,
    ) -> list[list[Decoded]]:
        """Run plans beside each other in turns, after one that does not count; return what each one made in each turn.

        runs: turns at least; more until so many seconds are over. tell: is told how many answers have ended, and of how many.
        passes: keep what each one's passes took. Raises ValueError where an engine has no second step, for then it has no speed.
        """
        total = (runs + 1) * len(plans) * len(self._prompts)
        done = 0

        def ended(count: int) -> None:
            nonlocal done
            done = min(total, done + count)
            tell(done, total)

        def turn() -> list[Decoded]:
            engines = [engine_for(self._settings, plan, 1, self._tokens, self._like) for plan in plans]
            found = contest(engines, self._prompts, self._params, ended)
            for decoded in found:
                if not decoded.tokens:
                    raise ValueError("the model's answers are written in one step each: too short to measure; give other prompts")
                if not passes:
                    decoded.passes.clear()
            return found

        turn()
        turns: list[list[Decoded]] = []
        begun = time.perf_counter()
        while len(turns) < runs or time.perf_counter() - begun < seconds:
            turns.append(turn())
        return [list(found) for found in zip(*turns, strict=True)]


def against_first(turns: Sequence[Sequence[Decoded]]) -> list[list[float]]:
    """Return how many times the first plan's speed each one had in each turn. turns: as of `Bench.compare`."""
    return [[one.speed / first.speed for one, first in zip(found, turns[0], strict=True)] for found in turns]


def steady(turns: Sequence[Sequence[Decoded]]) -> list[float]:
    """Return each plan's speed where the first one runs at its median: by ratios in the same turn, for machines are fast and slow in turns.

    turns: as of `Bench.compare`.
    """
    usual = statistics.median(decoded.speed for decoded in turns[0])
    return [usual * statistics.median(ratios) for ratios in against_first(turns)]


def calibrate(
    bench: Bench,
    recordings: Sequence[Recording],
    costs: Costs,
    layers: int,
    probes: Sequence[SpeculationSettings],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run plain decoding and some other plans, and learn from them what passes cost in rounds and what lies around these.

    The bench writes these recordings' texts.
    """
    plans = [PLAIN, *(probe.model_copy(update={"pace": "fixed"}) for probe in probes)]
    turns = bench.compare(plans, _CALIBRATION_TURNS, _CALIBRATION_SECONDS, tell, passes=True)
    seen: list[Seen] = []
    for plan, found in zip(plans, turns, strict=True):
        levels = levels_for(plan, layers, costs.own)
        seen += chain.from_iterable(seen_in(decoded.passes, levels) for decoded in found)
    correct(costs, seen)
    works = [replay(plan, recordings, costs, layers)[2] for plan in plans]
    fit(costs, works, [work.tokens / speed for work, speed in zip(works, steady(turns), strict=True)])


def probes_of(starts: Sequence[SpeculationSettings]) -> list[SpeculationSettings]:
    """One plan of every method and drafter, and where exits guess also one that guesses far."""
    first: dict[tuple[str, str], SpeculationSettings] = {}
    for start in starts:
        first.setdefault((start.method, start.drafter), start)
    return [*first.values(), *(far(start) for (_, drafter), start in first.items() if drafter == "exit")]
