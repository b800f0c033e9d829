"""The stages above the first: they run their layers on the rows that come from below, and the last one looks for the full depth."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from hispec_ray.core.plan import Done, LevelCounts, StepPlan, StepResult, Tentative, Verdict
from hispec_ray.speculation.choice import Choose
from hispec_ray.speculation.grammar import Grammars
from hispec_ray.speculation.levels import Doubt, Hierarchy, Level, Model
from hispec_ray.speculation.look import Looker, Turn, places_of, unrun_of
from hispec_ray.speculation.shaping import Shaper
from hispec_ray.speculation.state import RoundState


class Upper:
    """A stage's part in rounds that another process began with `Round.ask`.

    first, end: its layers are [first, end); those of the last stage end at the full depth. The others as in `Round`.
    """

    def __init__(
        self,
        model: Model,
        levels: Sequence[Level],
        choose: Choose,
        doubt: Doubt,
        *,
        lookup: bool,
        first: int,
        end: int,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
    ) -> None:
        self._cast = Hierarchy(levels, lookup=lookup)
        self._model = model
        self._doubt = doubt
        self._first, self._end = first, end
        self._looks = end == levels[-1].depth
        self._clock = clock
        self._shaper = Shaper(grammars)
        self._looker = Looker(model, self._cast, choose, self._shaper, doubt, clock, end)
        self._open: deque[RoundState] = deque()
        self.sources = self._cast.sources

    def answer(self, plan: StepPlan, asked: Sequence[Tentative], hidden: torch.Tensor) -> tuple[torch.Tensor, StepResult]:
        """Run the rows `[R, width]` that were asked about; return them, and what was done.

        In the last stage that has sequences and verdicts.
        """
        self._take(plan.done or ())
        top = self._cast.top
        turn = Turn(plan, RoundState(plan, self._cast.windows, self._doubt.branches, self._model), [LevelCounts() for _ in self.sources])
        states = turn.state.sequences
        for s, tentative in zip(states, asked, strict=True):
            turn.state.restore(s, tentative)
        begun = turn.timings.start = self._clock()
        unrun = unrun_of(top, states)
        rows, _ = turn.state.rows(top, states)
        hidden = self._model.run(self._first, self._end, hidden, rows)
        turn.counts[top + self._cast.source].layers += self._end - self._first
        turn.timed(top, len(rows), self._clock() - begun)
        result = StepResult([], turn.counts, turn.timings)
        if self._looks:
            self._shaper.begin(plan)
            self._looker.judge(turn, top, states, hidden, places_of(top, states, unrun))
            verdicts = []
            for s in states:
                done = self._looker.outcome(s)
                result.sequences.append(done)
                adopted = None if s.adopted is None else s.branches.index(s.adopted)
                verdicts.append(Verdict(done.tokens, s.seconds, adopted, s.seen[top], s.kept[top]))
            result.verdicts = tuple(verdicts)
        else:
            self._open.append(turn.state)
        turn.timings.end = self._clock()
        return hidden, result

    def _take(self, done: Sequence[Done]) -> None:
        """Go on from the branches that the last stage went on from; it has done so itself."""
        for one in done if not self._looks else ():
            state = self._open.popleft()
            for s, verdict in zip(state.sequences, one.verdicts, strict=True):
                if verdict.adopted is not None:
                    state.adopt(s, s.branches[verdict.adopted], held=False)
