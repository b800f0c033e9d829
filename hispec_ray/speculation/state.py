"""What a round has before it: each sequence's tentative tokens and branches, the block tables, and the hidden rows between segments.

A branch is a second candidate for one token of a sequence. It has a line of its own in the block tables, which is the sequence's but
for the block that the token is in: that one is the branch's own, and begins as a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from hispec_ray.core.plan import IntArray, Rows, SequencePlan, StepPlan, Tentative
from hispec_ray.request import TokenLogprob
from hispec_ray.speculation.drafters import Guess


class Memory(Protocol):
    """What is needed of a decoder here; see `hispec_ray.model.decoder.Decoder`."""

    block_size: int

    def empty_rows(self, count: int) -> torch.Tensor: ...

    def copy_slots(self, source: IntArray, target: IntArray) -> None: ...


_CROWD = 32
"""Rows of a pass that may be kept for few of them."""


class Waiting:
    """Hidden rows of consecutive tokens that wait for a layer, as parts of the passes that they came from."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, int, int]] = []

    def __len__(self) -> int:
        return sum(end - first for _, first, end in self._parts)

    def add(self, rows: torch.Tensor, first: int, end: int) -> None:
        """Let rows[first:end] of `[R, width]` wait behind the others."""
        self._parts.append((rows, first, end))

    def extend(self, other: Waiting) -> None:
        self._parts += other._parts

    def cut(self, count: int) -> None:
        """Keep the first, so many."""
        self._parts = self.part(0, count)._parts

    def part(self, first: int, end: int) -> Waiting:
        """Those from the first up to the end."""
        found, place = Waiting(), 0
        for rows, begin, over in self._parts:
            low, high = max(first - place, 0), min(end - place, over - begin)
            if low < high:
                found.add(rows, begin + low, begin + high)
            place += over - begin
        return found

    def let_go(self) -> None:
        """Copy rows out of passes of many others, which then need not be kept for them."""
        self._parts = [
            (rows[first:end].clone(), 0, end - first) if len(rows) > max(_CROWD, 4 * (end - first)) else (rows, first, end)
            for rows, first, end in self._parts
        ]

    def rows(self) -> list[torch.Tensor]:
        """What to put one behind the other."""
        return [rows[first:end] for rows, first, end in self._parts]


@dataclass(slots=True, eq=False)
class Branch:
    """A second candidate for the token at `index`; nothing follows it.

    ran: segments that its row has been through. waits[l]: its row, where it has passed level l and not been through the layer that the exit
    of level l has to itself.
    """

    index: int
    token: int
    origin: int
    line: int  # of the block tables
    home: int  # line of the held rows
    block: int  # its own, in place of the sequence's at this index
    ran: int = 0
    waits: dict[int, Waiting] = field(default_factory=dict)


class SequenceState:
    """A sequence during a round. Counts and indices are relative to the plan's start.

    tokens: known tokens, tentative ones last; origins[i] is the source of tentative token i.
    windows: most tentative tokens of each level. direct: guesses of the drafter for the top to look at first, with no others.
    settled[l]: tokens that level l has chosen or kept. marks[l]: rows that segment l has run: the watermark.
    waits[l]: of these the last, that have not been through the layer that the exit of level l has to itself.
    before: tokens of those of them that were run in earlier rounds, the last before the plan's start.
    ready: a level below the top is unsure, and the next one should look.
    line: the sequence's line in the block tables; home: of its first token in the held rows.
    seen[l], kept[l]: guesses that level l looked at, up to the first that it did not keep; see `Looker._judged`.
    spare: (line of the block tables, line of the held rows, block) that a branch may take. seconds: the top's second choices at the end.
    adopted: the branch that was gone on from last.
    rows: of what the top looked at, those whose choices were committed. logprobs, prompt_logprobs: see `SequenceResult`.
    """

    __slots__ = (
        "adopted", "before", "branches", "direct", "first", "home", "kept", "line", "logprobs", "marks", "origins",
        "plan", "prompt_logprobs", "ready", "rows", "seconds", "seen", "settled", "spare", "tokens", "waits", "windows",
    )  # fmt: skip

    def __init__(self, plan: SequencePlan, line: int, home: int, windows: Sequence[int]) -> None:
        levels = len(windows)
        self.plan = plan
        self.line = line
        self.home = home
        self.windows = windows
        self.direct: Sequence[Guess] = ()
        self.tokens = list(plan.tokens)
        self.first = len(plan.tokens)
        self.origins: list[int] = []
        self.settled = [self.first] * levels
        self.marks = [0] * levels
        self.waits: Mapping[int, Waiting] = {}
        self.before: Sequence[int] = ()
        self.ready = False
        self.branches: list[Branch] = []
        self.adopted: Branch | None = None
        self.spare: list[tuple[int, int, int]] = []
        self.seconds: list[int] = []
        self.rows: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.seen = [0] * levels
        self.kept = [0] * levels

    @property
    def over(self) -> bool:
        """Whether a tentative token ends the sequence."""
        return bool(self.plan.ends) and not self.plan.ends.isdisjoint(self.tokens[self.first :])

    def between(self, first: int, end: int) -> list[int]:
        """The known tokens [first, end); those before the plan's start have negative indices."""
        return [*self.before[len(self.before) + first :], *self.tokens[:end]] if first < 0 else self.tokens[first:end]

    def unowned(self, level: int) -> int:
        """Index of the first row that has not been through the layer that the level's exit has to itself."""
        return self.marks[level] - len(self.waits[level])

    def row_waits(self, index: int) -> dict[int, Waiting]:
        """What `Branch` has as waits, of the row at `index`."""
        places = {level: index - self.unowned(level) for level in self.waits if self.unowned(level) <= index < self.marks[level]}
        return {level: self.waits[level].part(place, place + 1) for level, place in places.items()}

    def fall_back(self, known: int) -> None:
        """Lower the watermarks to where the tokens from `known` on are let go."""
        for level, waiting in self.waits.items():
            if self.marks[level] > known:
                waiting.cut(len(waiting) - (self.marks[level] - known))
        self.marks = [min(mark, known) for mark in self.marks]

    def drop(self, branches: Sequence[Branch]) -> None:
        for branch in branches:
            self.branches.remove(branch)
            self.spare.append((branch.line, branch.home, branch.block))


class RoundState:
    """The sequences of one round and where everything of theirs lies.

    sequences: in the plan's order. tables: int64[T, B], block tables: a line for each sequence, then one for each branch that may come.
    """

    def __init__(self, plan: StepPlan, windows: Sequence[int], branches: int, memory: Memory) -> None:
        """branches: most of a sequence at a time; each needs a block behind those that the sequence's window needs."""
        self.sequences: list[SequenceState] = []
        self._memory = memory
        size, lines, homes = memory.block_size, len(plan.sequences), 0
        for line, sequence in enumerate(plan.sequences):
            s = SequenceState(sequence, line, homes, windows)
            homes += s.first + sequence.room
            if sequence.room and branches:
                needed = (sequence.start + s.first + sequence.room - 1) // size + 1
                for block in sequence.blocks[needed : needed + branches]:
                    s.spare.append((lines, homes, block))
                    lines += 1
                    homes += 1
            self.sequences.append(s)
        self.tables = np.zeros((lines, max(len(s.blocks) for s in plan.sequences)), dtype=np.int64)
        for s in self.sequences:
            self.tables[s.line, : len(s.plan.blocks)] = s.plan.blocks
        self._held: torch.Tensor | None = None
        self._homes = homes

    @property
    def held_bytes(self) -> int:
        """What the hidden rows between segments take. Beside them only rows add memory that wait for exits' own layers, see `Waiting`."""
        return 0 if self._held is None else self._held.nbytes

    def held(self) -> torch.Tensor:
        """The hidden rows between segments: a place for each token and branch that may come."""
        if self._held is None:
            self._held = self._memory.empty_rows(self._homes)
        return self._held

    def branch(self, s: SequenceState, index: int, token: int, origin: int, ran: int = 0) -> bool:
        """Offer a second candidate, on a copy of the block that it is in; return False where no block is spare.

        ran: segments that the candidate's row has been through, in the place where the token at `index` stands now.
        """
        if not s.spare:
            return False
        line, home, block = s.spare.pop()
        size = self._memory.block_size
        position = s.plan.start + index
        self.tables[line] = self.tables[s.line]
        self.tables[line, position // size] = block
        places = np.arange(position % size + (1 if ran else 0))
        if len(places):
            self._memory.copy_slots(s.plan.blocks[position // size] * size + places, block * size + places)
        if ran:
            held = self.held()
            held[home] = held[s.home + index]
        s.branches.append(Branch(index, token, origin, line, home, block, ran))
        return True

    def restore(self, s: SequenceState, asked: Tentative) -> None:
        """Take up what another process has before it, in a cache that holds the sequence up to the plan's start."""
        size = self._memory.block_size
        s.tokens += asked.tokens
        s.origins += asked.origins
        for index, token, origin, line, home, block in asked.branches:
            position = s.plan.start + index
            self.tables[line] = self.tables[s.line]
            self.tables[line, position // size] = block
            places = np.arange(max(0, s.plan.start - position // size * size))  # what follows is run, or not there
            if len(places):
                self._memory.copy_slots(s.plan.blocks[position // size] * size + places, block * size + places)
            s.branches.append(Branch(index, token, origin, line, home, block))

    def adopt(self, s: SequenceState, branch: Branch, *, held: bool) -> None:
        """Go on from a branch: its row takes the place of the token that stood there. held: its hidden row is still needed."""
        size = self._memory.block_size
        position = s.plan.start + branch.index
        offset = position % size
        source, target = branch.block * size + offset, s.plan.blocks[position // size] * size + offset
        self._memory.copy_slots(np.array([source]), np.array([target]))
        if held:
            rows = self.held()
            rows[s.home + branch.index] = rows[branch.home]
        for level, waiting in branch.waits.items():
            s.waits[level].extend(waiting)
        s.tokens.append(branch.token)
        s.origins.append(branch.origin)
        s.adopted = branch

    def rows(self, segment: int, states: Sequence[SequenceState]) -> tuple[Rows, list[int]]:
        """The rows that the segment has not run, each sequence's tokens and then its branches, and their places among the held rows."""
        return self.rows_between(states, [(s.marks[segment], len(s.tokens)) for s in states], segment)

    def rows_between(self, states: Sequence[SequenceState], spans: Sequence[tuple[int, int]], segment: int = -1) -> tuple[Rows, list[int]]:
        """The rows of each sequence's tokens [first, end), then of its branches that the segment has not run, and their places.

        A token's index may be negative, see `SequenceState`. segment: -1 for no branches.
        """
        tokens: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        slots: list[int] = []
        homes: list[int] = []
        more: list[tuple[int, int]] = []  # further slots of a row: in the blocks of the branches that descend from it
        size = self._memory.block_size
        for s, (start, end) in zip(states, spans, strict=True):
            blocks = s.plan.blocks
            place = range(s.plan.start + start, s.plan.start + end)
            row = len(tokens) - start
            tokens += s.between(start, end)
            positions += place
            lines += [s.line] * len(place)
            slots += [blocks[p // size] * size + p % size for p in place]
            homes += range(s.home + start, s.home + end)
            for branch in s.branches:
                position = s.plan.start + branch.index
                for p in range(max(place.start, position // size * size), min(position, place.stop)):
                    more.append((branch.block * size + p % size, row + p - s.plan.start))
                if branch.ran <= segment:
                    tokens.append(branch.token)
                    positions.append(position)
                    lines.append(branch.line)
                    slots.append(branch.block * size + position % size)
                    homes.append(branch.home)
        columns = np.array((tokens, positions, lines, slots, range(len(tokens))), dtype=np.int64)
        if not more:
            return Rows(columns[0], columns[1], columns[2], self.tables, columns[3], columns[4]), homes
        extra = np.array(more, dtype=np.int64).T.copy()  # of a single row numpy would lay the result out by columns
        slots_of, rows_of = np.concatenate((columns[3:5], extra), axis=1)
        return Rows(columns[0], columns[1], columns[2], self.tables, slots_of, rows_of), homes


def in_order(rows: list[int]) -> slice | torch.Tensor:
    """Return what picks these rows of a tensor: a slice where they follow each other, which is faster."""
    first, last = rows[0], rows[-1]
    follow = last - first == len(rows) - 1 and rows == list(range(first, last + 1))
    return slice(first, last + 1) if follow else torch.tensor(rows)


def pick(hidden: torch.Tensor, order: slice | torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows: layers may run in place."""
    return hidden[order].clone() if isinstance(order, slice) else hidden[order]
