"""How a level looks at the tentative tokens of a batch: it runs their rows, makes its own choices, keeps what equals them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hispec_ray.core.plan import LevelCounts, Rows, SequenceResult, StepPlan, Timings, Told
from hispec_ray.speculation.choice import Choose
from hispec_ray.speculation.levels import Doubt, Hierarchy, Model, segment_layers
from hispec_ray.speculation.shaping import Shaper, logprobs
from hispec_ray.speculation.state import Branch, RoundState, SequenceState, Waiting, in_order, pick
from hispec_ray.speculation.upkeep import Upkeep

_TOLD_AT_ONCE = 64  # rows of a prompt: their logits take much memory

Place = tuple[int, int, list[Branch]]
"""Of a sequence among the rows of a pass: the first of its rows, the index of that row's token, and the branches behind its tokens."""


@dataclass(slots=True)
class Turn:
    """A round in progress: what it has before it, what it has done, and what that took."""

    plan: StepPlan
    state: RoundState
    counts: list[LevelCounts]
    timings: Timings = field(default_factory=Timings)

    def timed(self, cost: int, rows: int, seconds: float, times: float = 1) -> None:
        """Note what a pass took, or each of so many. cost: as the pace numbers them: segments, heads, the guess, exits' own layers."""
        self.timings.passes.append((cost, rows, seconds, times))


class Looker:
    """Runs levels on a model: see the module.

    cast: the levels. end: depth at which the layers end that are in this process; those above are in others.
    upkeep: of exits' own layers.
    """

    def __init__(
        self, model: Model, cast: Hierarchy, choose: Choose, shaper: Shaper, doubt: Doubt, clock: Callable[[], float], end: int
    ) -> None:
        self.model = model
        self.cast = cast
        self.choose = choose
        self.shaper = shaper
        self.doubt = doubt
        self._clock = clock
        self._end = end
        self.layers = segment_layers(cast.levels, end)
        self.upkeep = Upkeep(model, cast, clock)

    def verify(self, turn: Turn, level: int, states: list[SequenceState]) -> None:
        """Bring every known token and branch up to the level, and let it look at them."""
        own = self.cast.levels[level].own
        if own is not None:
            self.upkeep.catch_up(turn.state, (level,), states)
        hidden, rows, places = self.run_segments(turn, level, states)
        if own is not None:
            begun = self._clock()
            hidden = self.model.run(own, own + 1, hidden, rows)
            turn.counts[level + self.cast.source].layers += 1
            turn.timed(2 * len(self.cast.levels) + 1 + level, len(rows), self._clock() - begun)
        self.judge(turn, level, states, hidden, places)

    def judge(self, turn: Turn, level: int, states: list[SequenceState], hidden: torch.Tensor, places: list[Place]) -> None:
        """Let the level look at what its head is to read. hidden, places: as of `run_segments`."""
        begun = self._clock()
        read: list[int] = []  # rows whose logits matter, as indices into hidden
        temperatures: list[float] = []
        seeds: list[int] = []
        positions: list[int] = []
        scored: list[tuple[SequenceState, int, list[Branch]]] = []
        for s, (row, start, branches) in zip(states, places, strict=True):
            if level == self.cast.top and s.plan.told:
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
        rows = hidden if len(read) == len(hidden) else pick(hidden, in_order(read))
        depth = self.cast.levels[level].depth
        logits, vocabulary = self.model.logits(depth, rows), self.model.vocabulary(depth)
        if any(self._needs_whole(s, level) for s, _, _ in scored):
            logits, vocabulary = self.model.whole(depth, logits)
        at_row = 0
        untouched: dict[int, torch.Tensor] = {}  # rows before they are shaped
        for s, count, looked in scored:
            if level == self.cast.top and s.plan.logprobs is not None:
                rows_of = logits[at_row : at_row + count + len(looked)]
                untouched[s.plan.id] = rows_of.clone() if s.plan.shape else rows_of
            if s.plan.shape:
                first = s.settled[level]
                before = [s.tokens[s.first : first + row] for row in range(count)]
                before += [[*s.tokens[s.first : branch.index], branch.token] for branch in looked]
                for row, tentative in enumerate(before, at_row):
                    self.shape_row(s, logits[row], tentative, positions[row], vocabulary)
            at_row += count + len(looked)
        choices = self.choose(logits, temperatures, seeds, positions, vocabulary)
        at_row = 0
        for s, count, looked in scored:
            end = at_row + count + len(looked)
            self._settle(turn, level, s, looked, choices.ids[at_row:end], choices.seconds[at_row:end], choices.gaps[at_row:end])
            if s.plan.id in untouched:
                s.logprobs = logprobs(untouched[s.plan.id][s.rows], s.tokens[s.first :], s.plan.logprobs or 0)
            at_row = end
        turn.timed(len(self.cast.levels) + level, len(rows), self._clock() - begun)

    def _needs_whole(self, s: SequenceState, level: int) -> bool:
        """Whether a row of the sequence must have every rank's logits, and not only the best of them."""
        return (level == self.cast.top and s.plan.logprobs is not None) or (s.plan.shape is not None and s.plan.shape.filters)

    def _tell(self, s: SequenceState, told: Told, hidden: torch.Tensor, row: int) -> None:
        """Take down the log-probabilities of tokens of the prompt. row: of the plan's first token, in the hidden rows."""
        for at in range(0, len(told.tokens), _TOLD_AT_ONCE):
            tokens = told.tokens[at : at + _TOLD_AT_ONCE]
            first = row + told.first + at
            depth = self.cast.levels[self.cast.top].depth
            logits, _ = self.model.whole(depth, self.model.logits(depth, hidden[first : first + len(tokens)]))
            s.prompt_logprobs += logprobs(logits, tokens, told.count)

    def _settle(
        self, turn: Turn, level: int, s: SequenceState, looked: list[Branch], choices: list[int], seconds: list[int], gaps: list[float]
    ) -> None:
        """Keep the tentative tokens that equal the level's choices, put its own after them, lower the watermarks of what fell.

        choices: after the last settled token, after each tentative one, then after each branch looked at.
        """
        first, tentative = s.settled[level], len(s.tokens) - s.settled[level]
        kept = 0
        while kept < tentative and s.tokens[first + kept] == choices[kept]:
            kept += 1
        looked_at = min(kept + 1, tentative)
        self._judged(level, s, s.origins[first - s.first : first - s.first + looked_at], kept)
        place, own, gap = first + kept, choices[kept], gaps[kept]
        rejected = s.tokens[place] if kept < tentative else None
        taken = next((i for i, branch in enumerate(looked) if branch.index == place and branch.token == own), None)
        waits = s.row_waits(place) if self.doubt.branches else {}
        s.fall_back(place)
        del s.tokens[place:]
        del s.origins[place - s.first :]
        accepted = kept
        if taken is not None:
            turn.state.adopt(s, looked[taken], held=level < self.cast.top)
            own, gap, accepted = choices[tentative + 1 + taken], gaps[tentative + 1 + taken], kept + 1
        known = len(s.tokens)
        s.tokens.append(own)
        source = level + self.cast.source
        s.origins.append(source)
        for below in range(level + 1):
            s.settled[below] = known + 1
            s.marks[below] = known
        if level == self.cast.top:
            s.rows = [*range(kept + 1), *([] if taken is None else [tentative + 1 + taken])]
            s.seconds = [seconds[row] for row in s.rows]
        else:
            s.ready = gap < self.doubt.stop
            if self.doubt.branches:
                seconds_after = {first + k: seconds[k] for k in range(kept) if gaps[k] < self.doubt.branch}
                accepted += self._offer(turn, level, s, first, place, seconds_after)
                if gap < self.doubt.branch and taken is None:
                    if seconds[kept] == rejected:  # its row has been run already
                        stays = turn.state.branch(s, known, rejected, source, level + 1)
                        accepted += 1 if stays else 0
                        if stays:
                            s.branches[-1].waits = waits
                    else:
                        turn.state.branch(s, known, seconds[kept], source)
        count = turn.counts[source]
        count.looked(tentative, kept)
        count.seen += tentative + len(looked)
        count.accepted += accepted
        count.own += 1

    def _judged(self, level: int, s: SequenceState, origins: list[int], kept: int) -> None:
        """Take down how many guesses the level saw, and kept. Of a lowest level that a draft exit and a lookup guess for, the exit's alone.

        A lookup says itself how sure it is: its failures are no reason to trust the exit less.
        """
        if level and level == self.cast.bottom and self.cast.source:
            mine = [origin == self.cast.source for origin in origins]
            s.seen[level] += sum(mine)
            s.kept[level] += sum(mine[:kept])
        else:
            s.seen[level] += len(origins)
            s.kept[level] += kept

    def _offer(self, turn: Turn, level: int, s: SequenceState, first: int, place: int, seconds: dict[int, int]) -> int:
        """Beside the tokens that the level has just kept, offer its second choices; let go what it no longer offers.

        Return how many of the branches that it looked at stay.
        """
        s.drop([b for b in s.branches if b.index >= first and (b.index >= place or seconds.get(b.index) != b.token)])
        stay = {branch.index for branch in s.branches if branch.index >= first}
        for index, token in seconds.items():
            if index not in stay:
                turn.state.branch(s, index, token, level + self.cast.source)
        return len(stay)

    def run_segments(self, turn: Turn, level: int, states: list[SequenceState]) -> tuple[torch.Tensor, Rows, list[Place]]:
        """Bring every known token and branch up to the level.

        Returns the new rows at its depth, or at the top what the next process is to run on, what rows they are, and each sequence's
        place among them. Rows that go on past an exit with a layer of its own are left waiting for that.
        """
        hidden: torch.Tensor | None = None
        rows: Rows | None = None
        homes: list[int] = []
        running: list[tuple[int, int]] | None = None  # what of the sequences `hidden` is, on its way up
        segment = depth = 0
        while segment <= level:
            begun = self._clock()
            unrun = unrun_of(segment, states)
            if not any(count or start < len(s.tokens) for s, (start, count) in zip(states, unrun, strict=True)):
                # a run of drafts has run them already
                segment, depth = segment + 1, self.cast.levels[segment].depth
                continue
            last = segment  # segments that run the same rows are run as one
            while last < level and self.cast.levels[last].own is None and unrun_of(last + 1, states) == unrun:
                last += 1
            end = min(self.cast.levels[last].depth, self._end)
            if running != unrun:
                rows, homes = turn.state.rows(segment, states)
                hidden = pick(turn.state.held(), in_order(homes)) if segment else self.model.embed(rows)
                running = unrun
            assert hidden is not None
            assert rows is not None
            hidden = self.model.run(depth, end, hidden, rows)
            if last < self.cast.top and (last == level or unrun_of(last + 1, states) != unrun):  # else they go straight on
                turn.state.held()[in_order(homes)] = hidden
            if last < level and self.cast.levels[last].own is not None:
                self._let_wait(last, states, unrun, hidden.clone())
            seconds = self._clock() - begun
            layers = sum(self.layers[segment : last + 1])
            for one in range(segment, last + 1):
                turn.counts[one + self.cast.source].rows += len(rows)
                turn.timed(one, len(rows), seconds * self.layers[one] / (layers or 1))
            turn.counts[level + self.cast.source].layers += layers
            segment, depth = last + 1, end
        turn.counts[level + self.cast.source].passes += 1
        assert hidden is not None
        assert rows is not None
        return hidden, rows, places_of(level, states, unrun)

    def _let_wait(self, level: int, states: list[SequenceState], unrun: Sequence[tuple[int, int]], hidden: torch.Tensor) -> None:
        """Take down rows that have passed an exit with a layer of its own. unrun: what they are of the sequences; hidden: kept."""
        row = 0
        for s, (start, _) in zip(states, unrun, strict=True):
            count = len(s.tokens) - start
            if count:
                s.waits[level].add(hidden, row, row + count)
            row += count
            for branch in s.branches:
                if branch.ran <= level:
                    branch.waits[level] = Waiting()
                    branch.waits[level].add(hidden, row, row + 1)
                    row += 1

    def outcome(self, s: SequenceState) -> SequenceResult:
        """Return what the full depth has committed of a sequence, now that it has looked, and take it down for the rounds to come."""
        committed = s.tokens[s.first :]
        result = SequenceResult(s.plan.id, committed, s.origins, s.logprobs, s.prompt_logprobs)
        if s.plan.shape:
            self.shaper.committed(s.plan.id, committed)
            result.failed = self.shaper.failed(s.plan.id)
        return result

    def shape_row(
        self, s: SequenceState, logits: torch.Tensor, tentative: Sequence[int], position: int, vocabulary: torch.Tensor | None
    ) -> None:
        if s.plan.shape:
            self.shaper.shape(s.plan.id, s.plan.shape, s.plan.temperature, logits, tentative, position, vocabulary)


def places_of(level: int, states: Sequence[SequenceState], unrun: Sequence[tuple[int, int]]) -> list[Place]:
    """Say where each sequence's rows are, now that the level's segment has run what it had not, and take note that it has."""
    places: list[Place] = []
    row = 0
    for s, (start, count) in zip(states, unrun, strict=True):
        branches = [b for b in s.branches if b.ran <= level]
        places.append((row, start, branches))
        row += len(s.tokens) - start + count
        for segment in range(level + 1):
            s.marks[segment] = len(s.tokens)
        for branch in branches:
            branch.ran = level + 1
    return places


def unrun_of(segment: int, states: Sequence[SequenceState]) -> list[tuple[int, int]]:
    """What the segment has not run: for each sequence, its first token and the number of its branches."""
    return [(s.marks[segment], sum(b.ran <= segment for b in s.branches) if s.branches else 0) for s in states]
