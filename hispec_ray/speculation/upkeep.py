"""Exits' own layers, which are run late: a row that passes an exit goes through its layer when somebody is to guess there, or look.

A later row of that layer attends to the keys of all rows before it, so none may be left out for good; but where nobody guesses, which is
plain decoding, a layer more for every token is a tax. So rows wait, and go through it together: before the exit is used again, and at the
latest when they fill a block of the cache, for a full block may be another sequence's prefix next. Rows that are rejected never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hispec_ray.core.plan import LevelCounts, StepPlan
from hispec_ray.speculation.levels import Hierarchy, Model
from hispec_ray.speculation.state import RoundState, SequenceState, in_order, pick


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Rows of one sequence that wait from round to round. position: of the next row; tokens: the last before it.

    rows[level]: of the last of these, as the level's exit reads them `[R, width]`.
    """

    position: int
    tokens: list[int]
    rows: dict[int, torch.Tensor]


class Upkeep:
    """Lets rows wait for the layers that exits of this hierarchy have to themselves, and runs them there in time."""

    def __init__(self, model: Model, cast: Hierarchy, clock: Callable[[], float]) -> None:
        self._model = model
        self._own = {level: each.own for level, each in enumerate(cast.levels) if each.own is not None}
        self._source = cast.source
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}

    def begin(self, plan: StepPlan) -> dict[int, list[int]]:
        """Forget sequences that are over, or go on elsewhere than they stood; return the tokens whose rows wait, by sequence."""
        for id in plan.ended:
            self._waiting.pop(id, None)
        for sequence in plan.sequences if self._waiting else ():
            waiting = self._waiting.get(sequence.id)
            if waiting and waiting.position != sequence.start:
                del self._waiting[sequence.id]
        return {id: waiting.tokens for id, waiting in self._waiting.items()}

    def take_up(self, state: RoundState) -> None:
        """Put the rows that wait into a new round."""
        for s in state.sequences if self._waiting else ():
            waiting = self._waiting.pop(s.plan.id, None)
            for level, rows in waiting.rows.items() if waiting else ():
                s.owned[level] = -len(rows)
                state.owing(level)[s.home - len(rows) : s.home] = rows

    def catch_up(self, state: RoundState, levels: Sequence[int], states: Sequence[SequenceState], counts: list[LevelCounts]) -> float:
        """Run all rows that have passed these levels' exits through their layers, and return the seconds that took."""
        begun: float | None = None
        for level in levels:
            own = self._own.get(level)
            behind = [s for s in states if s.owned[level] < s.marks[level]] if own is not None else []
            if not behind or own is None:
                continue
            if begun is None:
                begun = self._clock()
            rows, homes = state.rows_between(behind, [(s.owned[level], s.marks[level]) for s in behind])
            self._model.run(own, own + 1, pick(state.owing(level), in_order(homes)), rows)
            counts[level + self._source].layers += 1
            for s in behind:
                s.owned[level] = s.marks[level]
        return 0.0 if begun is None else self._clock() - begun

    def end(self, state: RoundState, counts: list[LevelCounts]) -> float:
        """Run rows that fill blocks, and let the others wait for a later round; return the seconds that running took.

        The sequences' watermarks are those of rows whose tokens are committed.
        """
        seconds, size = 0.0, self._model.block_size
        for level in self._own:
            full = [s for s in state.sequences if (s.plan.start + s.owned[level]) // size < (s.plan.start + s.marks[level]) // size]
            seconds += self.catch_up(state, (level,), full, counts) if full else 0.0
        for s in state.sequences if self._own else ():
            end = s.marks[-1]  # as far as the full depth has run, all others have
            rows = {
                level: state.owing(level)[s.home + s.owned[level] : s.home + end].clone() for level in self._own if s.owned[level] < end
            }
            if rows:
                first = min(s.owned[level] for level in rows)
                self._waiting[s.plan.id] = _Waiting(s.plan.start + end, s.between(first, end), rows)
        return seconds
