"""One round of hierarchical speculation for a batch of sequences (HiSpec, arXiv 2510.01336).

The levels are exits of one model, shallow to deep; the last is the full depth. A level advances a sequence in two steps:

1. Fill: the level below advances until the level's window is full of tentative tokens, or the level below is unsure.
2. Verify: every token known so far is run through the level's own segment, on top of the hidden rows that the levels
   below left; the level makes its own choice at each tentative position, keeps the tentative tokens that equal its
   choices, and adds its own choice after them: a correction where one differed, the next token where none did.

At the bottom stands who guesses: an exit that adds one token after another (a first level without a window), a drafter that
knows texts and no layers (see `drafters`), or both. One level alone is plain decoding, two are single-exit speculation, three are
HiSpec. What the full depth keeps is committed.

Where a level below the top is unsure it may offer its second choice beside its first: a branch of one token, with a block of its own
for its key and value. A deeper level that chooses it goes on from there.

No layer runs twice for a token that survives: the rows of a segment are those between its watermark and the last
known token, and a rejected token only lowers watermarks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hispec_ray.core.plan import Drafts, DraftStarts, IntArray, LevelCounts, Rows, SequencePlan, SequenceResult, StepPlan, StepResult
from hispec_ray.speculation.choice import Choose
from hispec_ray.speculation.drafters import Drafter
from hispec_ray.speculation.pace import Look, Pace


class Model(Protocol):
    """What a round needs of a decoder; see `hispec_ray.model.decoder.Decoder`."""

    block_size: int

    def empty_rows(self, count: int) -> torch.Tensor: ...

    def embed(self, rows: Rows) -> torch.Tensor: ...

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor: ...

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor: ...

    def vocabulary(self, depth: int) -> torch.Tensor | None: ...

    def copy_slots(self, source: IntArray, target: IntArray) -> None: ...

    def draft(self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float) -> Drafts: ...


@dataclass(frozen=True, slots=True)
class Level:
    """An exit that takes part: its name in traces, its depth in layers, the most tentative tokens it lets gather before it looks.

    A first level with window 0 under others is the draft exit: it looks at nobody's guesses, and makes its own.
    own: the layer that the exit has to itself, as the model numbers it; None where it has none.
    """

    name: str
    depth: int
    window: int
    own: int | None = None


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a level below the top does where it is unsure: where its first choice's score leads its second's by little.

    stop: with a lead below this it guesses no further, and lets the next level look. branch: with a lead below this it offers the
    second choice too. branches: most second choices of one sequence at a time. Leads are in units of score (logit / T + noise); 0 is never.
    """

    stop: float = 0.0
    branch: float = 0.0
    branches: int = 0


NO_DOUBT = Doubt()


@dataclass(slots=True, eq=False)
class _Branch:
    """A second candidate for the token at `index`; nothing follows it. ran: segments that its row has been through."""

    index: int
    token: int
    origin: int
    line: int  # of the block tables
    home: int  # line of the held rows
    block: int  # its own, in place of the sequence's at this index
    ran: int = 0


class _Sequence:
    """A sequence during a round. Counts and indices are relative to the plan's start.

    tokens: known tokens, tentative ones last; origins[i] is the source of tentative token i.
    settled[l]: tokens that level l has chosen or kept. marks[l]: rows that segment l has run: the watermark.
    ready: a level below the top is unsure, and the next one should look.
    line: the sequence's line in the block tables; home: of its first token in the held rows.
    seen[l], kept[l]: guesses that level l looked at, up to the first that it did not keep.
    spare: (line of the block tables, line of the held rows, block) that a branch may take. seconds: the top's second choices at the end.
    """

    __slots__ = (
        "branches", "first", "home", "kept", "line", "marks", "origins",
        "plan", "ready", "seconds", "seen", "settled", "spare", "tokens", "windows",
    )  # fmt: skip

    def __init__(self, plan: SequencePlan, line: int, home: int, levels: int, windows: Sequence[int]) -> None:
        self.plan = plan
        self.line = line
        self.home = home
        self.windows = windows
        self.tokens = list(plan.tokens)
        self.first = len(plan.tokens)
        self.origins: list[int] = []
        self.settled = [self.first] * levels
        self.marks = [0] * levels
        self.ready = False
        self.branches: list[_Branch] = []
        self.spare: list[tuple[int, int, int]] = []
        self.seconds: list[int] = []
        self.seen = [0] * levels
        self.kept = [0] * levels

    def drop(self, branches: list[_Branch]) -> None:
        for branch in branches:
            self.branches.remove(branch)
            self.spare.append((branch.line, branch.home, branch.block))


class Round:
    """Runs step plans through the levels of a model.

    levels: shallow to deep, the last at the model's full depth. drafter: guesses beside the draft exit, or in its place.
    doubt: what the levels below the top do where they are unsure.
    sources: "lookup" where there is a drafter, then the levels' names: what results and counts refer to.
    paced: windows are up to those of the levels, as the pace chooses (see `pace`); otherwise always theirs.
    peak_held_bytes: most bytes of hidden rows that waited between segments at once, since the start.
    """

    def __init__(
        self,
        model: Model,
        levels: Sequence[Level],
        choose: Choose,
        drafter: Drafter | None = None,
        doubt: Doubt = NO_DOUBT,
        *,
        paced: bool = False,
    ) -> None:
        depths = [level.depth for level in levels]
        if depths != sorted(depths):
            raise ValueError(f"levels have depths {depths}; each must be at least as deep as the one before")
        self._model = model
        self._levels = tuple(levels)
        self._layers = [  # that a segment runs, the exit's own among them
            level.depth - below + (level.own is not None) for level, below in zip(levels, (0, *depths[:-1]), strict=True)
        ]
        self._choose = choose
        self._drafter = drafter
        self._doubt = doubt
        self._top = len(levels) - 1
        self._bottom = 1 if levels[0].window == 0 and self._top else 0  # the lowest level that looks
        self._windows = tuple(level.window for level in levels)
        self._pace = Pace(self._windows, drafts=self._bottom == 1) if paced and self._windows[-1] else None
        self.sources = (*(("lookup",) if drafter else ()), *(level.name for level in levels))
        self._source = len(self.sources) - len(levels)  # of level 0
        self.peak_held_bytes = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Commit at least one token for every sequence that samples, and at most `room + 1`."""
        started = time.perf_counter()
        self._counts = [LevelCounts() for _ in self.sources]
        states = self._start(plan)
        if self._pace:
            for s, windows in zip(states, self._pace.begin(plan, started), strict=True):
                s.windows = windows
        if self._drafter:
            self._drafter.begin(plan)
        self._advance(self._top, states)
        results = [SequenceResult(s.plan.id, s.tokens[s.first :], s.origins) for s in states]
        if self._drafter:
            for s in states:
                self._drafter.committed(s.plan.id, s.tokens[s.first :], s.seconds)
        if self._pace:
            looks = [Look(s.plan.id, s.seen, s.kept) for s in states if s.windows[-1] and s.plan.room]
            self._pace.end(plan, sum(len(result.tokens) for result in results), looks, started, time.perf_counter())
        return StepResult(results, self._counts)

    def _start(self, plan: StepPlan) -> list[_Sequence]:
        """Lay out the block tables and the held rows: a line for each sequence and each branch, a row for each token that may come."""
        states: list[_Sequence] = []
        size, lines, homes = self._model.block_size, len(plan.sequences), 0
        for line, sequence in enumerate(plan.sequences):
            s = _Sequence(sequence, line, homes, len(self._levels), self._windows)
            homes += s.first + sequence.room
            if sequence.room and self._doubt.branches:
                needed = (sequence.start + s.first + sequence.room - 1) // size + 1
                for block in sequence.blocks[needed : needed + self._doubt.branches]:
                    s.spare.append((lines, homes, block))
                    lines += 1
                    homes += 1
            states.append(s)
        self._tables = np.zeros((lines, max(len(s.blocks) for s in plan.sequences)), dtype=np.int64)
        for s in states:
            self._tables[s.line, : len(s.plan.blocks)] = s.plan.blocks
        self._held: torch.Tensor | None = None
        self._homes = homes
        return states

    def _advance(self, level: int, states: list[_Sequence]) -> None:
        guessing = [s for s in states if s.windows[level] and s.plan.room]
        if not guessing:
            pass
        elif level > self._bottom:
            while open_states := [s for s in guessing if not s.ready and self._space(level, s) > 0]:
                self._advance(level - 1, open_states)
            for s in guessing:
                s.ready = False
        elif level:
            self._guess(level, guessing)
        elif self._drafter:
            self._look_up(level, guessing)
        self._verify(level, states)

    def _space(self, level: int, s: _Sequence) -> int:
        """How many more tentative tokens the level's window takes. Each level above keeps a place for the choice of the one below it."""
        known = len(s.tokens)
        space = s.plan.room - (known - s.settled[self._top]) - (self._top - level)
        for above in range(level, self._top + 1):
            space = min(space, s.windows[above] - (known - s.settled[above]) - (above - level))
        return space

    def _look_up(self, level: int, states: list[_Sequence]) -> list[_Sequence]:
        """Let the drafter guess; return those sequences for which it does not."""
        assert self._drafter
        silent: list[_Sequence] = []
        count = self._counts[0]
        for s in states:
            space = self._space(level, s)
            guesses = self._drafter.propose(s.plan.id, s.tokens[s.first :], space) if space > 0 else []
            for guess in guesses:
                s.tokens.append(guess.token)
                s.origins.append(0)
                if guess.second is not None:
                    self._branch(s, len(s.tokens) - 1, guess.second, 0)
            count.own += len(guesses)
            if not guesses:
                silent.append(s)
        return silent

    def _guess(self, level: int, states: list[_Sequence]) -> None:
        """Fill the window of the lowest level that looks: by the drafter where it is confident, by the draft exit elsewhere."""
        states = [s for s in states if self._space(level, s) > 0]
        if self._drafter:
            states = self._look_up(level, states)
        if not states:
            return
        begun = time.perf_counter()
        spaces = [self._space(level, s) for s in states]
        most = max(spaces)
        last = [len(s.tokens) - 1 for s in states]
        columns = np.array(
            (
                [s.tokens[-1] for s in states],
                [s.plan.start + i for s, i in zip(states, last, strict=True)],
                [s.line for s in states],
                spaces,
            )
        )
        starts = DraftStarts(
            tokens=columns[0],
            positions=columns[1],
            table=columns[2],
            tables=self._tables,
            steps=columns[3],
            homes=np.array([[s.home + i] for s, i in zip(states, last, strict=True)]) + np.arange(most),
            temperatures=[s.plan.temperature for s in states],
            seeds=[s.plan.seed for s in states],
        )
        drafts = self._model.draft(self._levels[0].depth, starts, self._held_rows(), self._doubt.stop)
        source = self._source
        count = self._counts[source]
        for s, guesses, seconds, gaps in zip(states, drafts.guesses, drafts.seconds, drafts.gaps, strict=True):
            for guess, second, gap in zip(guesses, seconds, gaps, strict=True):
                s.tokens.append(guess)
                if gap < self._doubt.branch:
                    self._branch(s, len(s.tokens) - 1, second, source)
            s.origins += [source] * len(guesses)
            s.marks[0] = len(s.tokens) - 1
            count.rows += len(guesses)
            count.own += len(guesses)
        passes = max(len(guesses) for guesses in drafts.guesses)
        count.passes += passes
        count.layers += passes * self._layers[0]
        if self._pace:
            self._pace.guess.add(len(states), (time.perf_counter() - begun) / passes)

    def _verify(self, level: int, states: list[_Sequence]) -> None:
        hidden, places = self._run_segments(level, states)
        begun = time.perf_counter()
        read: list[int] = []  # rows whose logits matter, as indices into hidden
        temperatures: list[float] = []
        seeds: list[int] = []
        positions: list[int] = []
        scored: list[tuple[_Sequence, int, list[_Branch]]] = []
        for s, (row, start, branches) in zip(states, places, strict=True):
            if not s.plan.samples:
                continue
            first, known = s.settled[level] - 1, len(s.tokens)
            mine = list(range(row + first - start, row + known - start))
            at = list(range(s.plan.start + first + 1, s.plan.start + known + 1))
            looked = [branch for branch in branches if branch.index > first]
            for branch in looked:
                mine.append(row + known - start + branches.index(branch))
                at.append(s.plan.start + branch.index + 1)
            read += mine
            positions += at
            temperatures += [s.plan.temperature] * len(mine)
            seeds += [s.plan.seed] * len(mine)
            scored.append((s, len(mine) - len(looked), looked))
        if not scored:
            return
        rows = hidden if len(read) == len(hidden) else hidden[torch.tensor(read)]
        depth = self._levels[level].depth
        choices = self._choose(self._model.logits(depth, rows), temperatures, seeds, positions, self._model.vocabulary(depth))
        at_row = 0
        for s, count, looked in scored:
            end = at_row + count + len(looked)
            self._settle(level, s, looked, choices.ids[at_row:end], choices.seconds[at_row:end], choices.gaps[at_row:end])
            at_row = end
        if self._pace:
            self._pace.heads[level].add(len(rows), time.perf_counter() - begun)

    def _settle(self, level: int, s: _Sequence, looked: list[_Branch], choices: list[int], seconds: list[int], gaps: list[float]) -> None:
        """Keep the tentative tokens that equal the level's choices, put its own after them, lower the watermarks of what fell.

        choices: after the last settled token, after each tentative one, then after each branch looked at.
        """
        first, tentative = s.settled[level], len(s.tokens) - s.settled[level]
        kept = 0
        while kept < tentative and s.tokens[first + kept] == choices[kept]:
            kept += 1
        place, own, gap = first + kept, choices[kept], gaps[kept]
        rejected = s.tokens[place] if kept < tentative else None
        taken = next((i for i, branch in enumerate(looked) if branch.index == place and branch.token == own), None)
        del s.tokens[place:]
        del s.origins[place - s.first :]
        accepted = kept
        if taken is not None:
            self._adopt(level, s, looked[taken])
            own, gap, accepted = choices[tentative + 1 + taken], gaps[tentative + 1 + taken], kept + 1
        known = len(s.tokens)
        s.tokens.append(own)
        source = level + self._source
        s.origins.append(source)
        for below in range(level + 1):
            s.settled[below] = known + 1
            s.marks[below] = known
        if level == self._top:
            s.seconds = [*seconds[:kept], *([seconds[kept], seconds[tentative + 1 + taken]] if taken is not None else [seconds[kept]])]
        else:
            s.ready = gap < self._doubt.stop
            if self._doubt.branches:
                seconds_after = {first + k: seconds[k] for k in range(kept) if gaps[k] < self._doubt.branch}
                accepted += self._offer(level, s, first, place, seconds_after)
                if gap < self._doubt.branch and taken is None:
                    if seconds[kept] == rejected:  # its row has been run already
                        accepted += self._branch(s, known, rejected, source, level + 1)
                    else:
                        self._branch(s, known, seconds[kept], source)
        count = self._counts[source]
        s.seen[level] += min(kept + 1, tentative)
        s.kept[level] += kept
        count.looked(tentative, kept)
        count.seen += tentative + len(looked)
        count.accepted += accepted
        count.own += 1

    def _offer(self, level: int, s: _Sequence, first: int, place: int, seconds: dict[int, int]) -> int:
        """Beside the tokens that the level has just kept, offer its second choices; let go what it no longer offers.

        Return how many of the branches that it looked at stay.
        """
        s.drop([b for b in s.branches if b.index >= first and (b.index >= place or seconds.get(b.index) != b.token)])
        stay = {branch.index for branch in s.branches if branch.index >= first}
        for index, token in seconds.items():
            if index not in stay:
                self._branch(s, index, token, level + self._source)
        return len(stay)

    def _branch(self, s: _Sequence, index: int, token: int, origin: int, ran: int = 0) -> bool:
        """Offer a second candidate, on a copy of the block that it is in; return False where no block is spare.

        ran: segments that the candidate's row has been through, in the place where the token at `index` stands now.
        """
        if not s.spare:
            return False
        line, home, block = s.spare.pop()
        size = self._model.block_size
        position = s.plan.start + index
        self._tables[line] = self._tables[s.line]
        self._tables[line, position // size] = block
        places = np.arange(position % size + (1 if ran else 0))
        if len(places):
            self._model.copy_slots(s.plan.blocks[position // size] * size + places, block * size + places)
        if ran:
            held = self._held_rows()
            held[home] = held[s.home + index]
        s.branches.append(_Branch(index, token, origin, line, home, block, ran))
        return True

    def _adopt(self, level: int, s: _Sequence, branch: _Branch) -> None:
        """Go on from a branch that the level chose: its row takes the place of the token that stood there."""
        size = self._model.block_size
        position = s.plan.start + branch.index
        offset = position % size
        source, target = branch.block * size + offset, s.plan.blocks[position // size] * size + offset
        self._model.copy_slots(np.array([source]), np.array([target]))
        if level < self._top:
            held = self._held_rows()
            held[s.home + branch.index] = held[branch.home]
        s.tokens.append(branch.token)
        s.origins.append(branch.origin)

    def _held_rows(self) -> torch.Tensor:
        """The hidden rows between segments, a place for each token and branch that may come: the only memory that the hierarchy adds."""
        if self._held is None:
            self._held = self._model.empty_rows(self._homes)
            self.peak_held_bytes = max(self.peak_held_bytes, self._held.nbytes)
        return self._held

    def _run_segments(self, level: int, states: list[_Sequence]) -> tuple[torch.Tensor, list[tuple[int, int, list[_Branch]]]]:
        """Bring every known token and branch up to the level.

        Returns what the level's head is to read of its new rows and, for each sequence, the first of them, the index of its token, and
        the branches behind. A row that passes a depth whose exit has a layer of its own is run through that too, whoever looks: later
        rows attend to it there.
        """
        hidden: torch.Tensor | None = None
        segment = depth = 0
        while segment <= level:
            begun = time.perf_counter()
            shape = self._shape(segment, states)
            last = segment  # segments that run the same rows are run as one
            while last < level and self._levels[last].own is None and self._shape(last + 1, states) == shape:
                last += 1
            end, own = self._levels[last].depth, self._levels[last].own
            rows, order = self._rows(segment, states)
            hidden = self._held_rows()[torch.tensor(order)] if segment else self._model.embed(rows)
            hidden = self._model.run(depth, end, hidden, rows)
            if last < self._top:
                self._held_rows()[torch.tensor(order)] = hidden
            if own is not None:
                hidden = self._model.run(own, own + 1, hidden, rows)
            seconds = time.perf_counter() - begun
            layers = sum(self._layers[segment : last + 1])
            for one in range(segment, last + 1):
                self._counts[one + self._source].rows += len(rows)
                if self._pace:
                    self._pace.segments[one].add(len(rows), seconds * self._layers[one] / (layers or 1))
            self._counts[level + self._source].layers += layers
            segment, depth = last + 1, end
        self._counts[level + self._source].passes += 1
        assert hidden is not None
        places: list[tuple[int, int, list[_Branch]]] = []
        row = 0
        for s, (start, count) in zip(states, shape, strict=True):
            branches = [b for b in s.branches if b.ran <= level]
            places.append((row, start, branches))
            row += len(s.tokens) - start + count
            for segment in range(level + 1):
                s.marks[segment] = len(s.tokens)
            for branch in branches:
                branch.ran = level + 1
        return hidden, places

    def _shape(self, segment: int, states: list[_Sequence]) -> list[tuple[int, int]]:
        """What the segment has not run: for each sequence, its first token and the number of its branches."""
        return [(s.marks[segment], sum(b.ran <= segment for b in s.branches) if s.branches else 0) for s in states]

    def _rows(self, segment: int, states: list[_Sequence]) -> tuple[Rows, list[int]]:
        """The rows that the segment has not run, each sequence's tokens and then its branches, and their places among the held rows."""
        tokens: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        slots: list[int] = []
        homes: list[int] = []
        more: list[tuple[int, int]] = []  # further slots of a row: in the blocks of the branches that descend from it
        size = self._model.block_size
        for s in states:
            start, known, blocks = s.marks[segment], len(s.tokens), s.plan.blocks
            place = range(s.plan.start + start, s.plan.start + known)
            row = len(tokens) - start
            tokens += s.tokens[start:]
            positions += place
            lines += [s.line] * len(place)
            slots += [blocks[p // size] * size + p % size for p in place]
            homes += range(s.home + start, s.home + known)
            for branch in s.branches:
                position = s.plan.start + branch.index
                for p in range(max(place.start, position // size * size), position):
                    more.append((branch.block * size + p % size, row + p - s.plan.start))
                if branch.ran <= segment:
                    tokens.append(branch.token)
                    positions.append(position)
                    lines.append(branch.line)
                    slots.append(branch.block * size + position % size)
                    homes.append(branch.home)
        columns = np.array((tokens, positions, lines, slots, range(len(tokens))), dtype=np.int64)
        if not more:
            return Rows(columns[0], columns[1], columns[2], self._tables, columns[3], columns[4]), homes
        extra = np.array(more, dtype=np.int64).T
        return (
            Rows(
                columns[0], columns[1], columns[2], self._tables,
                np.concatenate((columns[3], extra[0])), np.concatenate((columns[4], extra[1])),
            ),
            homes,
        )  # fmt: skip
