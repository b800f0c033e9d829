"""Exits' own layers, which are run late: a row that passes an exit goes through its layer when somebody is to guess there, or look.

A later row of that layer attends to the keys of all rows before it, so none may be left out for good; but where nobody guesses, which is
plain decoding, a layer more for every token is a tax. So rows wait, and go through it together: before the exit is used again, and at the
latest when they fill a block of the cache, for a full block may be another sequence's prefix next. Rows that are rejected never do.
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
    """Lets rows wait for the layers that exits of this hierarchy have to themselves, and runs them there in time."""

    def __init__(self, model: Model, cast: Hierarchy, clock: Callable[[], float]) -> None:
        self._model = model
        self._own = {level: each.own for level, each in enumerate(cast.levels) if each.own is not None}
        self._source = cast.source
        self._clock = clock
        self._later: dict[int, _Later] = {}

    def begin(self, plan: StepPlan) -> dict[int, list[int]]:
        """Forget sequences that are over, or go on elsewhere than they stood; return the tokens whose rows wait, by sequence."""
        if not self._own:
            return {}
        for id in plan.ended:
            self._later.pop(id, None)
        for sequence in plan.sequences:
            later = self._later.get(sequence.id)
            if later and later.position != sequence.start:
                del self._later[sequence.id]
        return {id: later.tokens for id, later in self._later.items()}

    def take_up(self, state: RoundState) -> None:
        """Put the rows that wait into a new round."""
        for s in state.sequences if self._own else ():
            later = self._later.pop(s.plan.id, None)
            s.waits = later.waits if later else {level: Waiting() for level in self._own}

    def catch_up(self, state: RoundState, levels: Sequence[int], states: Sequence[SequenceState], counts: list[LevelCounts]) -> float:
        """Run all rows that have passed these levels' exits through their layers, and return the seconds that took."""
        begun: float | None = None
        for level in levels:
            behind = [s for s in states if len(s.waits[level])] if level in self._own else []
            if not behind:
                continue
            if begun is None:
                begun = self._clock()
            own, hidden = self._own[level], torch.cat([rows for s in behind for rows in s.waits[level].rows()])
            rows, _ = state.rows_between(behind, [(s.unowned(level), s.marks[level]) for s in behind])
            self._model.run(own, own + 1, hidden, rows)
            counts[level + self._source].layers += 1
            for s in behind:
                s.waits[level].cut(0)
        return 0.0 if begun is None else self._clock() - begun

    def end(self, state: RoundState, counts: list[LevelCounts]) -> float:
        """Run rows that fill blocks, and let the others wait for a later round; return the seconds that running took.

        The sequences' watermarks are those of rows whose tokens are committed, alike for all levels.
        """
        seconds, size = 0.0, self._model.block_size
        for level in self._own:
            full = [s for s in state.sequences if (s.plan.start + s.unowned(level)) // size < (s.plan.start + s.marks[level]) // size]
            seconds += self.catch_up(state, (level,), full, counts) if full else 0.0
        for s in state.sequences if self._own else ():
            first, end = min(map(s.unowned, self._own)), s.marks[-1]
            if first < end:
                self._later[s.plan.id] = _Later(s.plan.start + end, s.between(first, end), s.waits)
        return seconds
