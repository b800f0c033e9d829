"""Guessing on while the stages above still look at a window: as if all of it were kept, and the next token were the one guessed.

Where that comes true the next round begins with what was guessed, its rows run; else it is forgotten. Watermarks alone decide: nothing
that was run ahead is ever read by a round that did not take it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hispec_ray.core.plan import LevelCounts, SequencePlan, StepPlan
from hispec_ray.speculation.look import Turn
from hispec_ray.speculation.state import Memory, RoundState, SequenceState, Waiting


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was guessed ahead: a turn whose sequences begin with the last token of the window that is being looked at."""

    turn: Turn

    @classmethod
    def of(cls, turn: Turn, windows: Sequence[int], sources: int, memory: Memory) -> Ahead | None:
        """Begin behind a turn that has been asked about; None where nothing can be guessed there.

        Needs room in the blocks that the plan has. Shapes and branches are left out: theirs is more state than a window.
        """
        plans: list[SequencePlan] = []
        kept: list[SequenceState] = []
        for s in turn.state.sequences:
            base = s.plan.start + len(s.tokens) - 1
            room = min(windows[-1] + 1, len(s.plan.blocks) * memory.block_size - base - 1)
            if s.plan.samples and s.plan.room and s.windows[-1] and s.plan.shape is None and not s.branches and room > 0 and not s.over:
                p = s.plan
                plans.append(SequencePlan(p.id, (s.tokens[-1],), base, p.blocks, True, room, p.temperature, p.seed, ends=p.ends))
                kept.append(s)
        if not plans:
            return None
        plan = StepPlan(tuple(plans))
        ahead = Turn(plan, RoundState(plan, windows, 0, memory), [LevelCounts() for _ in range(sources)])
        for mine, s in zip(ahead.state.sequences, kept, strict=True):
            mine.waits = {level: Waiting() for level in s.waits}
            mine.windows = (*s.windows[:-1], s.windows[-1] + 1)  # the first guess becomes the next round's own token
        return cls(ahead)

    def hand_over(self, turn: Turn) -> None:
        """Give a new turn's sequences what was guessed for them, where it came true."""
        guessed = {a.plan.id: a for a in self.turn.state.sequences}
        for s in turn.state.sequences:
            a = guessed.get(s.plan.id)
            if a is not None and len(a.tokens) > 1 and _came_true(a, s):
                self._give(a, s, turn.state)
        for total, more in zip(turn.counts, self.turn.counts, strict=True):  # work is work, whether it was of use or not
            total.add(more)

    def _give(self, a: SequenceState, s: SequenceState, state: RoundState) -> None:
        """Shift by one: the token that the full depth has put there is no guess any more."""
        count = min(len(a.tokens) - 2, s.plan.room, s.windows[-1])
        s.tokens += a.tokens[2 : 2 + count]
        s.origins += a.origins[1 : 1 + count]
        known = len(s.tokens)
        for level in range(len(s.marks) - 1):
            s.marks[level] = min(max(0, a.marks[level] - 1), known - 1)  # a round always has the last token to run
            if level in s.waits:
                first = a.unowned(level)  # the row that is no longer guessed falls away
                s.waits[level].extend(a.waits[level].part(max(0, 1 - first), s.marks[level] + 1 - first))
            s.settled[level] = min(max(s.first, a.settled[level] - 1), known)
        state.held()[s.home : s.home + known] = self.turn.state.held()[a.home + 1 : a.home + 1 + known]


def _came_true(a: SequenceState, s: SequenceState) -> bool:
    same = s.plan.start == a.plan.start + 1 and s.plan.tokens == (a.tokens[1],) and s.plan.history is None
    table = s.plan.blocks[: len(a.plan.blocks)]
    return same and table == a.plan.blocks[: len(table)] and s.plan.room > 0 and s.windows[-1] > 0 and not s.direct
