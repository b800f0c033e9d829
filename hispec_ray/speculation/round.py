"""One round of hierarchical speculation for a batch of sequences (HiSpec, arXiv 2510.01336).

The levels are exits of one model, shallow to deep; the last is the full depth. A level advances a sequence in two steps:

1. Fill: the level below advances until the level's window is full of tentative tokens.
2. Verify: every token known so far is run through the level's own segment, on top of the hidden rows that the levels
   below left; the level makes its own choice at each tentative position, keeps the tentative tokens that equal its
   choices, and adds its own choice after them: a correction where one differed, the next token where none did.

The shallowest level has no window: it just adds one token at a time, which is drafting. One level alone is plain
decoding, two are single-exit speculation, three are HiSpec. What the full depth keeps is committed.

No layer runs twice for a token that survives: the rows of a segment are those between its watermark and the last
known token, and a rejected token only lowers watermarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hispec_ray.core.plan import LevelCounts, Rows, SequencePlan, SequenceResult, StepPlan, StepResult
from hispec_ray.speculation.choice import Choose


class Model(Protocol):
    """What a round needs of a decoder; see `hispec_ray.model.decoder.Decoder`."""

    block_size: int

    def embed(self, rows: Rows) -> torch.Tensor: ...

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor: ...

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Level:
    """An exit that takes part: its name in traces, its depth in layers, the most tentative tokens it lets gather before it looks."""

    name: str
    depth: int
    window: int


class _Sequence:
    """A sequence during a round. Counts are relative to the plan's start.

    tokens: known tokens, tentative ones last; origins[i] is the level that chose tentative token i.
    settled[l]: tokens that level l has chosen or kept. marks[l]: rows that segment l has run: the watermark.
    held[l]: hidden rows marks[l + 1] .. marks[l] in pieces, waiting for the next segment: the only memory that the hierarchy adds.
    line: the sequence's line in the block tables.
    """

    __slots__ = ("held", "line", "marks", "origins", "plan", "settled", "tokens")

    def __init__(self, plan: SequencePlan, line: int, levels: int) -> None:
        self.plan = plan
        self.line = line
        self.held: list[list[torch.Tensor]] = [[] for _ in range(levels)]
        self.tokens = list(plan.tokens)
        self.origins: list[int] = []
        self.settled = [len(plan.tokens)] * levels
        self.marks = [0] * levels


class Round:
    """Runs step plans through the levels of a model.

    levels: shallow to deep, the last at the model's full depth. Windows of all but the first are at least 1.
    peak_held_bytes: most bytes of hidden rows that waited between segments at once, since the start.
    """

    def __init__(self, model: Model, levels: Sequence[Level], choose: Choose) -> None:
        depths = [level.depth for level in levels]
        if depths != sorted(depths):
            raise ValueError(f"levels have depths {depths}; each must be at least as deep as the one before")
        self._model = model
        self._levels = tuple(levels)
        self._choose = choose
        self._top = len(levels) - 1
        self.peak_held_bytes = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Commit at least one token for every sequence that samples, and at most `room + 1`."""
        self._counts = [LevelCounts() for _ in self._levels]
        self._tables = np.zeros((len(plan.sequences), max(len(s.blocks) for s in plan.sequences)), dtype=np.int64)
        states = self._states = [_Sequence(sequence, line, len(self._levels)) for line, sequence in enumerate(plan.sequences)]
        for line, sequence in enumerate(plan.sequences):
            self._tables[line, : len(sequence.blocks)] = sequence.blocks
        self._advance(self._top, states)
        results = [SequenceResult(s.plan.id, s.tokens[len(s.plan.tokens) :], s.origins) for s in states]
        return StepResult(results, self._counts)

    def _advance(self, level: int, states: list[_Sequence]) -> None:
        while open_states := [s for s in states if self._space(level, s) > 0]:
            self._advance(level - 1, open_states)
        self._verify(level, states)

    def _space(self, level: int, s: _Sequence) -> int:
        """How many more tentative tokens the level's window takes. Each level above keeps a place for the choice of the one below it."""
        known = len(s.tokens)
        space = s.plan.room - (known - s.settled[self._top]) - (self._top - level)
        for above in range(level, self._top + 1):
            space = min(space, self._levels[above].window - (known - s.settled[above]) - (above - level))
        return space

    def _verify(self, level: int, states: list[_Sequence]) -> None:
        hidden, starts = self._run_segments(level, states)
        read: list[int] = []  # rows whose logits matter, as indices into hidden
        scored: list[_Sequence] = []
        row = 0
        for s, start in zip(states, starts, strict=True):
            known = len(s.tokens)
            if s.plan.samples:
                first = s.settled[level] - 1
                read.extend(range(row + first - start, row + known - start))
                scored.append(s)
            row += known - start
        if not scored:
            return
        rows = hidden if len(read) == len(hidden) else hidden[torch.tensor(read)]
        logits = self._model.logits(self._levels[level].depth, rows)
        counts = [len(s.tokens) - s.settled[level] + 1 for s in scored]
        choices = self._choose(
            logits,
            [s.plan.temperature for s, n in zip(scored, counts, strict=True) for _ in range(n)],
            [s.plan.seed for s, n in zip(scored, counts, strict=True) for _ in range(n)],
            [s.plan.start + s.settled[level] + i for s, n in zip(scored, counts, strict=True) for i in range(n)],
        )
        at = 0
        for s, n in zip(scored, counts, strict=True):
            self._settle(level, s, choices[at : at + n])
            at += n

    def _settle(self, level: int, s: _Sequence, choices: list[int]) -> None:
        """Keep the tentative tokens that equal the level's choices, put its own after them, lower the watermarks of what fell."""
        first, tentative = s.settled[level], len(s.tokens) - s.settled[level]
        kept = 0
        while kept < tentative and s.tokens[first + kept] == choices[kept]:
            kept += 1
        del s.tokens[first + kept :]
        del s.origins[first + kept - len(s.plan.tokens) :]
        s.tokens.append(choices[kept])
        s.origins.append(level)
        for below in range(level + 1):
            s.settled[below] = len(s.tokens)
            s.marks[below] = len(s.tokens) - 1
        if level < self._top:
            s.held[level] = _trim(s.held[level], s.marks[level] - s.marks[level + 1])
        count = self._counts[level]
        count.seen += tentative
        count.accepted += kept
        count.own += 1

    def _run_segments(self, level: int, states: list[_Sequence]) -> tuple[torch.Tensor, list[int]]:
        """Bring every known token up to the level. Returns the level's new hidden rows and, for each sequence, the first of them."""
        hidden: torch.Tensor | None = None
        starts: list[int] = []
        for segment in range(level + 1):
            before, starts = starts, [s.marks[segment] for s in states]
            rows = self._rows(states, starts)
            if hidden is None:
                hidden = self._model.embed(rows)
            elif starts != before:
                hidden = _join(hidden, segment - 1, before, states)
            first = self._levels[segment - 1].depth if segment else 0
            hidden = self._model.run(first, self._levels[segment].depth, hidden, rows)
            self._counts[segment].rows += len(rows)
            for s in states:
                s.marks[segment] = len(s.tokens)
        self._counts[level].passes += 1
        assert hidden is not None
        if level < self._top:
            row = 0
            for s, start in zip(states, starts, strict=True):
                end = row + len(s.tokens) - start
                s.held[level].append(hidden[row:end])
                row = end
            held = sum(piece.nbytes for s in self._states for pieces in s.held for piece in pieces)
            self.peak_held_bytes = max(self.peak_held_bytes, held)
        return hidden, starts

    def _rows(self, states: list[_Sequence], starts: list[int]) -> Rows:
        """The rows from each sequence's start to its last known token."""
        tokens: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        slots: list[int] = []
        size = self._model.block_size
        for s, start in zip(states, starts, strict=True):
            known, blocks = len(s.tokens), s.plan.blocks
            place = range(s.plan.start + start, s.plan.start + known)
            tokens += s.tokens[start:]
            positions += place
            lines += [s.line] * len(place)
            slots += [blocks[p // size] * size + p % size for p in place]
        columns = np.array((tokens, positions, lines, slots, range(len(tokens))), dtype=np.int64)
        return Rows(columns[0], columns[1], columns[2], self._tables, columns[3], columns[4])


def _join(fresh: torch.Tensor, segment: int, starts: list[int], states: list[_Sequence]) -> torch.Tensor:
    """Return the rows that wait after a segment and the fresh ones behind them, sequence by sequence, and let the waiting ones go."""
    pieces: list[torch.Tensor] = []
    row = 0
    for s, start in zip(states, starts, strict=True):
        end = row + len(s.tokens) - start
        pieces += (*s.held[segment], fresh[row:end])
        s.held[segment] = []
        row = end
    return torch.cat(pieces)


def _trim(pieces: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """Return the first `rows` rows of the pieces."""
    kept: list[torch.Tensor] = []
    for piece in pieces:
        if rows > 0:
            kept.append(piece[:rows])
        rows -= len(piece)
    return kept
