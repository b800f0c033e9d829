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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hispec_ray.core.plan import DraftStarts, LevelCounts, StepPlan, StepResult, Tentative, Timings, Verdict
from hispec_ray.speculation.ahead import Ahead
from hispec_ray.speculation.choice import Choices, Choose
from hispec_ray.speculation.drafters import Drafter, Guess
from hispec_ray.speculation.grammar import Grammars
from hispec_ray.speculation.levels import NO_DOUBT, Doubt, Hierarchy, Level, Model
from hispec_ray.speculation.look import Looker, Turn
from hispec_ray.speculation.pace import LAST_ROW, Begun, Look, Pace, Price
from hispec_ray.speculation.shaping import Shaper
from hispec_ray.speculation.state import RoundState, SequenceState


@dataclass(slots=True)
class _Open:
    """A round from its beginning until the pace has learned from it. ended: it came to its end."""

    turn: Turn
    begun: Begun | None
    ended: bool = False


class Round:
    """Runs step plans through the levels of a model.

    levels: shallow to deep, the last at the model's full depth. drafter: guesses beside the draft exit, or in its place.
    doubt: what the levels below the top do where they are unsure.
    confidence: the least chance of being right, 0 to 1, at which the drafter guesses where there is no pace to say it.
    sources: see `Hierarchy`.
    paced: windows are up to those of the levels, as the pace chooses (see `pace`); otherwise always theirs.
    clock: seconds, for the pace. grammars: for the shapes that have one.
    end: depth at which the layers end that are in this process: below the full depth `ask` takes the place of `run`.
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
        end: int | None = None,
    ) -> None:
        cast = self._cast = Hierarchy(levels, lookup=drafter is not None)
        self._model = model
        self._choose = choose
        self._drafter = drafter
        self._doubt = doubt
        self._confidence = confidence
        self._clock = clock
        self._shaper = Shaper(grammars)
        self._looker = Looker(model, cast, choose, self._shaper, doubt, clock, end or cast.levels[-1].depth)
        guesses = cast.windows[-1] > 0
        self._pace = Pace(cast.windows, drafts=cast.bottom == 1, lookups=drafter is not None) if paced and guesses else None
        self.sources = cast.sources
        self.peak_held_bytes = 0
        self._open: deque[_Open] = deque()
        self._ahead: Ahead | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Commit at least one token for every sequence that samples, and at most `room + 1`."""
        turn = self._begin(plan)
        self._advance(turn, self._cast.top, turn.state.sequences)
        result = self._end(self._open[-1])
        turn.timings.upkeep = self._looker.upkeep.told(turn.counts)
        return result

    def ask(self, plan: StepPlan) -> tuple[list[Tentative], torch.Tensor, StepResult]:
        """Begin a round, up to the question that the stages above answer; how they did is said by the `done` of a later plan.

        Returns what is asked, the hidden rows `[R, width]` of all that is asked about, and what was done here, without sequences.
        """
        turn = self._begin(plan)
        states = turn.state.sequences
        self._fill(turn, self._cast.top, states)
        hidden, *_ = self._looker.run_segments(turn, self._cast.top, states)
        turn.timings.upkeep = self._looker.upkeep.told(turn.counts)
        turn.timings.end = self._clock()
        asked = [
            Tentative(s.tokens[s.first :], s.origins, [(b.index, b.token, b.origin, b.line, b.home, b.block) for b in s.branches])
            for s in states
        ]
        return asked, hidden, StepResult([], turn.counts, turn.timings)

    def look_ahead(self) -> None:
        """Guess on behind the last round that was asked about, while others look at it; see `ahead`. Only where an exit guesses."""
        if len(self._open) != 1 or self._drafter or not self._cast.bottom:
            return
        open_ = self._open[0].turn
        self._ahead = Ahead.of(open_, self._cast.windows, len(self.sources), self._model)
        if self._ahead:
            self._looker.upkeep.catch_up(open_.state, range(self._cast.top), open_.state.sequences)
            self._fill(self._ahead.turn, self._cast.top, self._ahead.turn.state.sequences)

    def _begin(self, plan: StepPlan) -> Turn:
        learning, upkeep = self._clock(), self._looker.upkeep.seconds
        if plan.done is None:
            while self._open:
                open_ = self._open.popleft()
                if open_.ended:
                    self._learn(open_, open_.turn.timings)
        else:
            for done in plan.done:
                open_ = self._open.popleft()
                if done.verdicts:
                    self._take(open_, done.verdicts)
                self._learn(open_, done.timings)
        learning = self._clock() - learning - (self._looker.upkeep.seconds - upkeep)
        begun = self._pace.begin(plan) if self._pace else None
        turn = Turn(plan, RoundState(plan, self._cast.windows, self._doubt.branches, self._model), [LevelCounts() for _ in self.sources])
        self._looker.upkeep.begin(plan, turn.state)
        turn.timings.learning, turn.timings.start = learning, self._clock()
        self._shaper.begin(plan)
        if self._drafter:
            self._drafter.begin(plan)
        if self._pace:
            self._set_pace(turn, self._pace, turn.state.sequences)
        if self._ahead:
            self._ahead.hand_over(turn)
            self._ahead = None
        self._open.append(_Open(turn, begun))
        return turn

    def _take(self, open_: _Open, verdicts: Sequence[Verdict]) -> None:
        """Take up what the last stage has said."""
        state, top = open_.turn.state, self._cast.top
        for s, verdict in zip(state.sequences, verdicts, strict=True):
            known = s.first + max(0, len(verdict.tokens) - 1)
            s.fall_back(known if verdict.adopted is None else known - 1)
            if verdict.adopted is not None:
                state.adopt(s, s.branches[verdict.adopted], held=False)
            s.tokens[s.first :] = verdict.tokens
            s.marks = [known] * len(s.marks)
            s.seconds, s.seen[top], s.kept[top] = verdict.seconds, verdict.seen, verdict.kept
        self._end(open_)

    def _learn(self, open_: _Open, timings: Timings) -> None:
        if not self._pace or not open_.begun:
            return
        guessed = [s for s in open_.turn.state.sequences if s.windows[-1] and s.plan.room]
        looks = [Look(s.plan.id, len(s.tokens) - s.first, len(s.direct), s.seen, s.kept) for s in guessed]
        self._pace.learn(open_.begun, looks, timings)

    def _end(self, open_: _Open) -> StepResult:
        """Take down what the full depth has committed, for the rounds to come."""
        turn, results = open_.turn, []
        for s in turn.state.sequences:
            result = self._looker.outcome(s)
            if self._drafter:
                self._drafter.committed(s.plan.id, result.tokens, s.seconds)
            results.append(result)
        self._looker.upkeep.end(turn.state)
        open_.ended = True
        self.peak_held_bytes = max(self.peak_held_bytes, turn.state.held_bytes)
        turn.timings.end = self._clock()
        return StepResult(results, turn.counts, turn.timings)

    def _set_pace(self, turn: Turn, pace: Pace, states: Sequence[SequenceState]) -> None:
        """Choose who guesses for each sequence, and how far."""
        decoding = [s for s in states if s.plan.room]
        if self._drafter and (least := pace.asks()) is not None:
            started, window = self._clock(), self._cast.windows[-1]
            offers = [self._drafter.propose(s.plan.id, (), min(window, s.plan.room), least) for s in decoding]
            for s, guesses, count in zip(decoding, offers, pace.take([[g.chance for g in guesses] for guesses in offers]), strict=True):
                if count and pace.prefers(s.plan.id, [guess.chance for guess in guesses[:count]]):
                    s.direct = guesses[:count]
            turn.timings.asked += self._clock() - started
        for s in decoding:
            s.windows = (*(0 for _ in self._cast.windows[1:]), self._cast.windows[-1]) if s.direct else pace.windows(s.plan.id)

    def _advance(self, turn: Turn, level: int, states: list[SequenceState]) -> None:
        """Let a level look at what those below have guessed for it."""
        self._fill(turn, level, states)
        self._looker.verify(turn, level, states)

    def _fill(self, turn: Turn, level: int, states: list[SequenceState]) -> None:
        """Fill the level's window with tentative tokens."""
        guessing = [s for s in states if s.windows[level] and s.plan.room]
        if level == self._cast.top:
            for s in guessing:
                if s.direct:
                    self._add(turn, s, s.direct)
            guessing = [s for s in guessing if not s.direct]
        if not guessing:
            return
        if level > self._cast.bottom:
            while open_states := [s for s in guessing if not s.ready and self._space(level, s) > 0]:
                self._advance(turn, level - 1, open_states)
            for s in guessing:
                s.ready = False
        elif level:
            self._guess(turn, level, guessing)
        elif self._drafter:
            self._look_up(turn, level, guessing)

    def _space(self, level: int, s: SequenceState) -> int:
        """How many more tentative tokens the level's window takes; none behind one that ends the sequence.

        Each level above keeps a place for the choice of the one below it.
        """
        if s.over:
            return 0
        known, top = len(s.tokens), self._cast.top
        space = s.plan.room - (known - s.settled[top]) - (top - level)
        for above in range(level, top + 1):
            space = min(space, s.windows[above] - (known - s.settled[above]) - (above - level))
        return space

    def _look_up(self, turn: Turn, level: int, states: list[SequenceState]) -> list[SequenceState]:
        """Let the drafter guess; return those sequences for which it does not."""
        assert self._drafter
        silent: list[SequenceState] = []
        for s in states:
            space = self._space(level, s)
            guesses: list[Guess] = []
            if space > 0:
                exit_guesses = self._cast.bottom == 1
                price = self._pace.price(level, s.plan.id if exit_guesses else None) if self._pace else Price(self._confidence, 0.0)
                guesses = self._drafter.propose(s.plan.id, s.tokens[s.first :], space, price.least, price.each)
            self._add(turn, s, guesses)
            if not guesses:
                silent.append(s)
        return silent

    def _add(self, turn: Turn, s: SequenceState, guesses: Sequence[Guess]) -> None:
        """Take guesses of the drafter up."""
        for guess in guesses:
            s.tokens.append(guess.token)
            s.origins.append(0)
            if guess.second is not None:
                turn.state.branch(s, len(s.tokens) - 1, guess.second, 0)
        turn.counts[0].own += len(guesses)

    def _guess(self, turn: Turn, level: int, states: list[SequenceState]) -> None:
        """Fill the window of the lowest level that looks: by the drafter where it is confident, by the draft exit elsewhere."""
        states = [s for s in states if self._space(level, s) > 0]
        if self._drafter:
            states = self._look_up(turn, level, states)
        for group in ([s for s in states if s.plan.shape is None], [s for s in states if s.plan.shape is not None]):
            if group:
                self._draft(turn, level, group)

    def _draft(self, turn: Turn, level: int, states: list[SequenceState]) -> None:
        """Let the draft exit guess for sequences that are all shaped or all not."""
        self._looker.upkeep.catch_up(turn.state, (0,), states)
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
            tables=turn.state.tables,
            steps=columns[3],
            homes=np.array([[s.home + i] for s, i in zip(states, last, strict=True)]) + np.arange(most + 1),
            temperatures=[s.plan.temperature for s in states],
            seeds=[s.plan.seed for s in states],
            ends=[s.plan.ends for s in states],
        )
        choose = partial(self._choose_guess, states) if states[0].plan.shape else None
        drafts = self._model.draft(self._cast.levels[0].depth, starts, turn.state.held(), self._doubt.stop, choose)
        source = self._cast.source
        count = turn.counts[source]
        for s, guesses, seconds, gaps in zip(states, drafts.guesses, drafts.seconds, drafts.gaps, strict=True):
            for guess, second, gap in zip(guesses, seconds, gaps, strict=True):
                s.tokens.append(guess)
                if gap < self._doubt.branch:
                    turn.state.branch(s, len(s.tokens) - 1, second, source)
            s.origins += [source] * len(guesses)
            s.marks[0] = len(s.tokens)
            count.rows += len(guesses) + 1
            count.own += len(guesses)
        passes = max(len(guesses) for guesses in drafts.guesses)
        count.passes += passes
        count.layers += (passes + 1) * (self._looker.layers[0] + (self._cast.levels[0].own is not None))
        worth = passes + LAST_ROW  # guesses
        turn.timed(2 * len(self._cast.levels), len(states), (self._clock() - begun) / worth, worth)

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
            logits, vocabulary = self._model.whole(self._cast.levels[0].depth, logits)
        for row, s, line, position in zip(logits, drafting, lines, positions, strict=True):
            self._looker.shape_row(s, row, [*s.tokens[s.first :], *guesses[line]], position, vocabulary)
        return self._choose(logits, [s.plan.temperature for s in drafting], [s.plan.seed for s in drafting], positions, vocabulary)
