"""Exits' own layers, which are run late: a row that passes an exit goes through its layer when somebody is to guess there, or look.

A later row of that layer attends to the keys of all rows before it, so none may be left out for good; but where nobody guesses, which is
plain decoding, a layer more for every token is a tax. So rows wait, and go through it together: before the exit is used again, and at the
latest when they fill a block of the cache, for a full block may be another sequence's prefix next. Rows that are rejected before never do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hispec_ray.core.plan import LevelCounts, StepPlan
from hispec_ray.speculation.levels import Hierarchy, Model
from hispec_ray.speculation.state import RoundState, SequenceState, Waiting


@dataclass(frozen=True, slots=True)
class _Later:
    """What waits of a sequence from round to round. position: of its next row; tokens, waits: as before and waits in `SequenceState`."""

    position: int
    tokens: list[int]
    waits: Mapping[int, Waiting]


class Upkeep:
    """Lets rows wait for the layers that exits of this hierarchy have to themselves, and runs them there in time.

    seconds: that this has taken, and nobody was told of yet.
    """

    def __init__(self, model: Model, cast: Hierarchy, clock: Callable[[], float]) -> None:
        self._model = model
        self._own = {level: each.own for level, each in enumerate(cast.levels) if each.own is not None}
        self._source = cast.source
        self._clock = clock
        self._later: dict[int, _Later] = {}
        self.seconds = 0.0
        self._passes = dict.fromkeys(self._own, 0)

    def begin(self, plan: StepPlan, state: RoundState) -> None:
        """Put the rows that wait into a new round."""
        if not self._own:
            return
        for id in plan.ended:
            self._later.pop(id, None)
        for s in state.sequences:
            later = self._later.pop(s.plan.id, None)
            if later and later.position == s.plan.start:
                s.waits, s.before = later.waits, later.tokens
            else:
                s.waits = {level: Waiting() for level in self._own}

    def catch_up(self, state: RoundState, levels: Sequence[int], states: Sequence[SequenceState]) -> None:
        """Run all rows that have passed these levels' exits through their layers."""
        for level in levels:
            behind = [s for s in states if len(s.waits[level])] if level in self._own else []
            if not behind:
                continue
            begun, own = self._clock(), self._own[level]
            hidden = torch.cat([rows for s in behind for rows in s.waits[level].rows()])
            rows, _ = state.rows_between(behind, [(s.unowned(level), s.marks[level]) for s in behind])
            self._model.run(own, own + 1, hidden, rows)
            for s in behind:
                s.waits[level].cut(0)
            self._passes[level] += 1
            self.seconds += self._clock() - begun

    def end(self, state: RoundState) -> None:
        """Run rows that fill blocks, and let the others wait for a later round.

        The sequences' watermarks are those of rows whose tokens are committed, alike for all levels.
        """
        size = self._model.block_size
        for level in self._own:
            full = [s for s in state.sequences if (s.plan.start + s.unowned(level)) // size < (s.plan.start + s.marks[level]) // size]
            self.catch_up(state, (level,), full)
        for s in state.sequences if self._own else ():
            first, end = min(map(s.unowned, self._own)), s.marks[-1]
            if first < end:
                for waiting in s.waits.values():
                    waiting.let_go()
                self._later[s.plan.id] = _Later(s.plan.start + end, s.between(first, end), s.waits)

    def told(self, counts: Sequence[LevelCounts]) -> float:
        """Add the passes since this was last asked to the counts of their levels; return their seconds."""
        for level, passes in self._passes.items():
            counts[level + self._source].layers += passes
            self._passes[level] = 0
        seconds, self.seconds = self.seconds, 0.0
        return seconds
