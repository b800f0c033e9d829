"""One round of hierarchical speculation for a batch of sequences (HiSpec, arXiv 2510.01336).

The levels are exits of one model, shallow to deep; the last is the full depth. A level advances a sequence in two steps:

1. Fill: the level below advances until the level's window is full of tentative tokens, or the level below is unsure.
2. Verify: every token known so far is run through the level's own segment, on top of the hidden rows that the levels
   below left; the level makes its own choice at each tentative position, keeps the tentative tokens that equal its
   choices, and adds its own choice after them: a correction where one differed, the next token where none did.

At the bottom stands who guesses: an exit that adds one token after another (a first level without a window), a drafter that
knows texts and no layers (see `drafters`), or both. One level alone is plain decoding, two are single-exit speculation, three are
HiSpec. What the full depth keeps is committed.

Where the pace finds that the levels below the top do not pay, a drafter's guesses go straight to the full depth.

Where a level below the top is unsure it may offer its second choice beside its first: a branch of one token, with a block of its own
for its key and value. A deeper level that chooses it goes on from there.

No layer runs twice for a token that survives: the rows of a segment are those between its watermark and the last
known token, and a rejected token only lowers watermarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from hispec_ray.core.plan import Drafts, DraftStarts, LevelCounts, Rows, SequenceResult, StepPlan, StepResult, Timings, Told
from hispec_ray.speculation.choice import Choices, Choose
from hispec_ray.speculation.drafters import Drafter, Guess
from hispec_ray.speculation.grammar import Grammars
from hispec_ray.speculation.pace import Look, Pace, Price
from hispec_ray.speculation.shaping import Shaper, logprobs
from hispec_ray.speculation.state import Branch, Memory, RoundState, SequenceState


class Model(Memory, Protocol):
    """What a round needs of a decoder; see `hispec_ray.model.decoder.Decoder`."""

    def embed(self, rows: Rows) -> torch.Tensor: ...

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor: ...

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor: ...

    def vocabulary(self, depth: int) -> torch.Tensor | None: ...

    def whole(self, depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def draft(
        self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: Callable[..., Choices] | None = None
    ) -> Drafts: ...


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
_TOLD_AT_ONCE = 64  # rows of a prompt: their logits take much memory


class Round:
    """Runs step plans through the levels of a model.

    levels: shallow to deep, the last at the model's full depth. drafter: guesses beside the draft exit, or in its place.
    doubt: what the levels below the top do where they are unsure.
    confidence: the least chance of being right, 0 to 1, at which the drafter guesses where there is no pace to say it.
    sources: "lookup" where there is a drafter, then the levels' names: what results and counts refer to.
    paced: windows are up to those of the levels, as the pace chooses (see `pace`); otherwise always theirs.
    clock: seconds, for the pace. grammars: for the shapes that have one.
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
        confidence: float = 1.0,
        paced: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
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
        self._confidence = confidence
        self._clock = clock
        self._top = len(levels) - 1
        self._bottom = 1 if levels[0].window == 0 and self._top else 0  # the lowest level that looks
        self._windows = tuple(level.window for level in levels)
        guesses = self._windows[-1] > 0
        self._shaper = Shaper(grammars)
        self._pace = Pace(self._windows, drafts=self._bottom == 1, lookups=drafter is not None) if paced and guesses else None
        self.sources = (*(("lookup",) if drafter else ()), *(level.name for level in levels))
        self._source = len(self.sources) - len(levels)  # of level 0
        self.peak_held_bytes = 0
        self._timings = Timings()
        self._played: tuple[StepPlan, list[Look]] | None = None  # the last round, until the pace has learned from it

    def run(self, plan: StepPlan) -> StepResult:
        """Commit at least one token for every sequence that samples, and at most `room + 1`."""
        self._begin_pace(plan)
        self._timings = Timings(start=self._clock())
        self._counts = [LevelCounts() for _ in self.sources]
        self._state = RoundState(plan, self._windows, self._doubt.branches, self._model)
        states = self._state.sequences
        self._shaper.begin(plan)
        if self._drafter:
            self._drafter.begin(plan)
        if self._pace:
            for s in states:
                self._set_pace(self._pace, s)
        self._advance(self._top, states)
        results = [SequenceResult(s.plan.id, s.tokens[s.first :], s.origins, s.logprobs, s.prompt_logprobs) for s in states]
        for s, result in zip(states, results, strict=True):
            if self._drafter:
                self._drafter.committed(s.plan.id, s.tokens[s.first :], s.seconds)
            if s.plan.shape:
                self._shaper.committed(s.plan.id, s.tokens[s.first :])
                result.failed = self._shaper.failed(s.plan.id)
        if self._pace:
            guessed = [s for s in states if s.windows[-1] and s.plan.room]
            looks = [Look(s.plan.id, len(s.tokens) - s.first, len(s.direct), s.seen, s.kept) for s in guessed]
            self._played = plan, looks
        self.peak_held_bytes = max(self.peak_held_bytes, self._state.held_bytes)
        self._timings.end = self._clock()
        return StepResult(results, self._counts, self._timings)

    def _begin_pace(self, plan: StepPlan) -> None:
        """Let the pace learn from the last round, if that came to its end, before this one."""
        if self._pace:
            if self._played:
                self._pace.learn(*self._played, plan.timings or self._timings)
            self._played = None
            self._pace.begin(plan)

    def _timed(self, cost: int, rows: int, seconds: float, times: int = 1) -> None:
        """Note what a pass took, or each of so many. cost: as the pace numbers them: segments, heads, the guess."""
        self._timings.passes.append((cost, rows, seconds, times))

    def _set_pace(self, pace: Pace, s: SequenceState) -> None:
        """Choose who guesses for a sequence, and how far."""
        if not s.plan.room:
            return
        if self._drafter and pace.takes_lookups():
            most = min(self._windows[-1], s.plan.room)
            begun = self._clock()
            guesses = self._drafter.propose(s.plan.id, (), most, pace.price(self._top).least)
            self._timings.asked += self._clock() - begun
            if guesses and pace.prefers(s.plan.id, [guess.chance for guess in guesses]):
                s.direct, s.windows = guesses, (*(0 for _ in self._windows[1:]), self._windows[-1])
                return
        s.windows = pace.windows(s.plan.id)

    def _advance(self, level: int, states: list[SequenceState]) -> None:
        guessing = [s for s in states if s.windows[level] and s.plan.room]
        if level == self._top:
            for s in guessing:
                if s.direct:
                    self._add(s, s.direct)
            guessing = [s for s in guessing if not s.direct]
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

    def _space(self, level: int, s: SequenceState) -> int:
        """How many more tentative tokens the level's window takes. Each level above keeps a place for the choice of the one below it."""
        known = len(s.tokens)
        space = s.plan.room - (known - s.settled[self._top]) - (self._top - level)
        for above in range(level, self._top + 1):
            space = min(space, s.windows[above] - (known - s.settled[above]) - (above - level))
        return space

    def _look_up(self, level: int, states: list[SequenceState]) -> list[SequenceState]:
        """Let the drafter guess; return those sequences for which it does not."""
        assert self._drafter
        silent: list[SequenceState] = []
        for s in states:
            space = self._space(level, s)
            guesses: list[Guess] = []
            if space > 0:
                exit_guesses = self._bottom == 1
                price = self._pace.price(level, s.plan.id if exit_guesses else None) if self._pace else Price(self._confidence, 0.0)
                guesses = self._drafter.propose(s.plan.id, s.tokens[s.first :], space, price.least, price.each)
            self._add(s, guesses)
            if not guesses:
                silent.append(s)
        return silent

    def _add(self, s: SequenceState, guesses: Sequence[Guess]) -> None:
        """Take guesses of the drafter up."""
        for guess in guesses:
            s.tokens.append(guess.token)
            s.origins.append(0)
            if guess.second is not None:
                self._state.branch(s, len(s.tokens) - 1, guess.second, 0)
        self._counts[0].own += len(guesses)

    def _guess(self, level: int, states: list[SequenceState]) -> None:
        """Fill the window of the lowest level that looks: by the drafter where it is confident, by the draft exit elsewhere."""
        states = [s for s in states if self._space(level, s) > 0]
        if self._drafter:
            states = self._look_up(level, states)
        for group in ([s for s in states if s.plan.shape is None], [s for s in states if s.plan.shape is not None]):
            if group:
                self._draft(level, group)

    def _draft(self, level: int, states: list[SequenceState]) -> None:
        """Let the draft exit guess for sequences that are all shaped or all not."""
        begun = self._clock()
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
            tables=self._state.tables,
            steps=columns[3],
            homes=np.array([[s.home + i] for s, i in zip(states, last, strict=True)]) + np.arange(most),
            temperatures=[s.plan.temperature for s in states],
            seeds=[s.plan.seed for s in states],
        )
        choose = partial(self._choose_guess, states) if states[0].plan.shape else None
        drafts = self._model.draft(self._levels[0].depth, starts, self._state.held(), self._doubt.stop, choose)
        source = self._source
        count = self._counts[source]
        for s, guesses, seconds, gaps in zip(states, drafts.guesses, drafts.seconds, drafts.gaps, strict=True):
            for guess, second, gap in zip(guesses, seconds, gaps, strict=True):
                s.tokens.append(guess)
                if gap < self._doubt.branch:
                    self._state.branch(s, len(s.tokens) - 1, second, source)
            s.origins += [source] * len(guesses)
            s.marks[0] = len(s.tokens) - 1
            count.rows += len(guesses)
            count.own += len(guesses)
        passes = max(len(guesses) for guesses in drafts.guesses)
        count.passes += passes
        count.layers += passes * self._layers[0]
        self._timed(2 * len(self._levels), len(states), (self._clock() - begun) / passes, passes)

    def _choose_guess(
        self,
        states: list[SequenceState],
        logits: torch.Tensor,
        lines: list[int],
        guesses: list[list[int]],
        positions: list[int],
        vocabulary: torch.Tensor | None,
    ) -> Choices:
        """See `hispec_ray.model.decoder.ChooseGuess`."""
        drafting = [states[line] for line in lines]
        if any(s.plan.shape and s.plan.shape.filters for s in drafting):
            logits, vocabulary = self._model.whole(self._levels[0].depth, logits)
        for row, s, line, position in zip(logits, drafting, lines, positions, strict=True):
            self._shape_row(s, row, [*s.tokens[s.first :], *guesses[line]], position, vocabulary)
        return self._choose(logits, [s.plan.temperature for s in drafting], [s.plan.seed for s in drafting], positions, vocabulary)

    def _shape_row(
        self, s: SequenceState, logits: torch.Tensor, tentative: Sequence[int], position: int, vocabulary: torch.Tensor | None
    ) -> None:
        if s.plan.shape:
            self._shaper.shape(s.plan.id, s.plan.shape, s.plan.temperature, logits, tentative, position, vocabulary)

    def _verify(self, level: int, states: list[SequenceState]) -> None:
        hidden, places = self._run_segments(level, states)
        begun = self._clock()
        read: list[int] = []  # rows whose logits matter, as indices into hidden
        temperatures: list[float] = []
        seeds: list[int] = []
        positions: list[int] = []
        scored: list[tuple[SequenceState, int, list[Branch]]] = []
        for s, (row, start, branches) in zip(states, places, strict=True):
            if level == self._top and s.plan.told:
                self._tell(s, s.plan.told, hidden, row - start)
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
        logits, vocabulary = self._model.logits(depth, rows), self._model.vocabulary(depth)
        if any(self._needs_whole(s, level) for s, _, _ in scored):
            logits, vocabulary = self._model.whole(depth, logits)
        at_row = 0
        untouched: dict[int, torch.Tensor] = {}  # rows before they are shaped
        for s, count, looked in scored:
            if level == self._top and s.plan.logprobs is not None:
                rows_of = logits[at_row : at_row + count + len(looked)]
                untouched[s.plan.id] = rows_of.clone() if s.plan.shape else rows_of
            if s.plan.shape:
                first = s.settled[level]
                before = [s.tokens[s.first : first + row] for row in range(count)]
                before += [[*s.tokens[s.first : branch.index], branch.token] for branch in looked]
                for row, tentative in enumerate(before, at_row):
                    self._shape_row(s, logits[row], tentative, positions[row], vocabulary)
            at_row += count + len(looked)
        choices = self._choose(logits, temperatures, seeds, positions, vocabulary)
        at_row = 0
        for s, count, looked in scored:
            end = at_row + count + len(looked)
            self._settle(level, s, looked, choices.ids[at_row:end], choices.seconds[at_row:end], choices.gaps[at_row:end])
            if s.plan.id in untouched:
                s.logprobs = logprobs(untouched[s.plan.id][s.rows], s.tokens[s.first :], s.plan.logprobs or 0)
            at_row = end
        self._timed(len(self._levels) + level, len(rows), self._clock() - begun)

    def _needs_whole(self, s: SequenceState, level: int) -> bool:
        """Whether a row of the sequence must have every rank's logits, and not only the best of them."""
        return (level == self._top and s.plan.logprobs is not None) or (s.plan.shape is not None and s.plan.shape.filters)

    def _tell(self, s: SequenceState, told: Told, hidden: torch.Tensor, row: int) -> None:
        """Take down the log-probabilities of tokens of the prompt. row: of the plan's first token, in the hidden rows."""
        for at in range(0, len(told.tokens), _TOLD_AT_ONCE):
            tokens = told.tokens[at : at + _TOLD_AT_ONCE]
            first = row + told.first + at
            depth = self._levels[self._top].depth
            logits, _ = self._model.whole(depth, self._model.logits(depth, hidden[first : first + len(tokens)]))
            s.prompt_logprobs += logprobs(logits, tokens, told.count)

    def _settle(
        self, level: int, s: SequenceState, looked: list[Branch], choices: list[int], seconds: list[int], gaps: list[float]
    ) -> None:
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
            self._state.adopt(s, looked[taken], held=level < self._top)
            own, gap, accepted = choices[tentative + 1 + taken], gaps[tentative + 1 + taken], kept + 1
        known = len(s.tokens)
        s.tokens.append(own)
        source = level + self._source
        s.origins.append(source)
        for below in range(level + 1):
            s.settled[below] = known + 1
            s.marks[below] = known
        if level == self._top:
            s.rows = [*range(kept + 1), *([] if taken is None else [tentative + 1 + taken])]
            s.seconds = [seconds[row] for row in s.rows]
        else:
            s.ready = gap < self._doubt.stop
            if self._doubt.branches:
                seconds_after = {first + k: seconds[k] for k in range(kept) if gaps[k] < self._doubt.branch}
                accepted += self._offer(level, s, first, place, seconds_after)
                if gap < self._doubt.branch and taken is None:
                    if seconds[kept] == rejected:  # its row has been run already
                        stays = self._state.branch(s, known, rejected, source, level + 1)
                        accepted += 1 if stays else 0
                    else:
                        self._state.branch(s, known, seconds[kept], source)
        count = self._counts[source]
        s.seen[level] += min(kept + 1, tentative)
        s.kept[level] += kept
        count.looked(tentative, kept)
        count.seen += tentative + len(looked)
        count.accepted += accepted
        count.own += 1

    def _offer(self, level: int, s: SequenceState, first: int, place: int, seconds: dict[int, int]) -> int:
        """Beside the tokens that the level has just kept, offer its second choices; let go what it no longer offers.

        Return how many of the branches that it looked at stay.
        """
        s.drop([b for b in s.branches if b.index >= first and (b.index >= place or seconds.get(b.index) != b.token)])
        stay = {branch.index for branch in s.branches if branch.index >= first}
        for index, token in seconds.items():
            if index not in stay:
                self._state.branch(s, index, token, level + self._source)
        return len(stay)

    def _run_segments(self, level: int, states: list[SequenceState]) -> tuple[torch.Tensor, list[tuple[int, int, list[Branch]]]]:
        """Bring every known token and branch up to the level.

        Returns what the level's head is to read of its new rows and, for each sequence, the first of them, the index of its token, and
        the branches behind. A row that passes a depth whose exit has a layer of its own is run through that too, whoever looks: later
        rows attend to it there.
        """
        hidden: torch.Tensor | None = None
        segment = depth = 0
        while segment <= level:
            begun = self._clock()
            unrun = self._unrun(segment, states)
            last = segment  # segments that run the same rows are run as one
            while last < level and self._levels[last].own is None and self._unrun(last + 1, states) == unrun:
                last += 1
            end, own = self._levels[last].depth, self._levels[last].own
            rows, order = self._state.rows(segment, states)
            hidden = self._state.held()[torch.tensor(order)] if segment else self._model.embed(rows)
            hidden = self._model.run(depth, end, hidden, rows)
            if last < self._top:
                self._state.held()[torch.tensor(order)] = hidden
            if own is not None:
                hidden = self._model.run(own, own + 1, hidden, rows)
            seconds = self._clock() - begun
            layers = sum(self._layers[segment : last + 1])
            for one in range(segment, last + 1):
                self._counts[one + self._source].rows += len(rows)
                self._timed(one, len(rows), seconds * self._layers[one] / (layers or 1))
            self._counts[level + self._source].layers += layers
            segment, depth = last + 1, end
        self._counts[level + self._source].passes += 1
        assert hidden is not None
        places: list[tuple[int, int, list[Branch]]] = []
        row = 0
        for s, (start, count) in zip(states, unrun, strict=True):
            branches = [b for b in s.branches if b.ran <= level]
            places.append((row, start, branches))
            row += len(s.tokens) - start + count
            for segment in range(level + 1):
                s.marks[segment] = len(s.tokens)
            for branch in branches:
                branch.ran = level + 1
        return hidden, places

    def _unrun(self, segment: int, states: list[SequenceState]) -> list[tuple[int, int]]:
        """What the segment has not run: for each sequence, its first token and the number of its branches."""
        return [(s.marks[segment], sum(b.ran <= segment for b in s.branches) if s.branches else 0) for s in states]
