"""How far to guess, sequence by sequence and round by round, down to not at all: what pays is decided by what was measured.

Three things are kept, all from the past, so that nothing here can change a text.

* What passes cost on this machine, in seconds, by what is run and how many rows, as they are timed in every round, and what lies around
  them; and how fast the machine is now, which scales them all: neighbours come and go, and a cost that was not measured since must not
  look cheap or dear beside one that was. Now and then a round is plain, so that the yardstick stays true.
* For each sequence, how often each level lately kept what it was shown.
* Two accounts, of the windows and of a lookup: how much time each has saved against plain decoding lately, and an allowance on every
  token. What a round may lose is covered by its account; so speculation that fails costs no more than the allowance, what was saved
  before, and a debt of some steps, and neither kind lives on what the other saves.

Expected tokens of a round follow from the shares as a geometric series (Leviathan et al., arXiv 2211.17192, section 3), level by level.

A lookup's guesses are weighed one by one instead, for it says how sure it is of each: they pay where their chances of being right, times
what a token is worth, are more than what further rows cost; so many of all that it has for the batch are taken as pay most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hispec_ray.core.plan import StepPlan, Timings
from hispec_ray.speculation.cost import Cost, moved

ALLOWANCE = 0.02
"""Share of the time of plain decoding that may be spent on rounds that do not pay."""
_CREDIT = 12.0
"""Most plain steps of saved time that are remembered: the price of noticing that a text has turned."""
_START = 1.0
"""Plain steps that the account of the windows begins with, so that a new process tries at once."""
_DEBT = 2.0
"""Plain steps by which an account may be short before nothing is tried on it."""
_STEP = 0.1
"""What a new round counts in a sequence's shares, and in what lies around passes."""
_NOW = 0.3
"""What a round counts in how fast the machine is."""
_PRIOR = 0.7
"""A level's share of kept guesses before it was asked."""
_UNPRICED = 0.3
"""The least chance at which a guess is taken before it is known what a further row costs."""
_HOPELESS = 0.95
"""The least chance from which on a lookup is not even asked: in a large batch a row may cost as much as a token is worth."""
_FEW = (2, 4, 8)
"""Further rows of which the cheapest say whether a lookup is asked, see `Pace.take`."""
_TRIAL = 2
"""Guesses that are tried at once where none is thought to pay."""
_STRANGE = 24
"""Guesses that must have been looked at, over all sequences, before the shares are believed; until then windows are small."""
_PATIENCE = 8
"""Rounds after which a sequence that is thought not to pay is tried again; twice as many after each try that fails."""
_MARGIN = 1.02
"""How many times faster than plain decoding a round must look before it is tried without need."""
_FORGET = 128
"""Rounds after which choices are made anew, for costs drift, and a round is plain, as the yardstick. Up to there that happens in rounds
1, 2, 4, 8, 16, 32 and 64, for a process begins cold."""
LAST_ROW = 0.5
"""What the last row of a run of guesses counts: a guess without head and choice."""
_HELD_UP = 2.0
"""A round with guesses that takes more than so many times what was expected was held up by others: the rest is not on its account."""
_PAUSE, _PAUSE_SHARE = 0.01, 0.5
"""Seconds, and share of a round: a time between two rounds that is longer than both is a pause of whoever asks for them."""
_SELDOM = 4
"""Of so many plain rounds of a batch size one is learned from: what passes cost is known by then, and learning takes time too."""
_MOST_CHOICES = 1024  # that are remembered; each is a batch size and shares to a twentieth
_SPANS = 3
"""Rounds that try for a pass with the settings' widest window, once."""


class Look(NamedTuple):
    """What came of a sequence's guesses in a round.

    tokens: that were committed. straight: guesses of a lookup that only the full depth looked at; where there were some, seen and kept
    are not used. seen, kept: per level, guesses up to the first that was not kept, and those that were kept.
    """

    id: int
    tokens: int
    straight: int
    seen: Sequence[int]
    kept: Sequence[int]


class Price(NamedTuple):
    """Which guesses pay. least: chance that it and those before it are right; each: chance that it is, given them."""

    least: float
    each: float


@dataclass(frozen=True, slots=True)
class Begun:
    """What the pace knew of a round when it began. number: from 1; batch: sequences that decode.

    goes_on: some of them did in an earlier one. alone: no prompt is read beside them. plainly: it is plain so that plain decoding's
    price stays true.
    """

    number: int
    batch: int
    goes_on: bool
    alone: bool
    plainly: bool


@dataclass(slots=True)
class _Habit:
    """What a sequence is like: per level, its share of kept guesses; when it was last tried; how often a try has failed in a row.

    gain, windows: the best choice for these shares, made for the `made` (batch size, age of the costs, `_stake`). chosen: the windows of
    this round.
    """

    shares: list[float]
    rounds: int = 0
    tried: int = -_PATIENCE
    failed: int = 0
    made: tuple[int, int, float | None] | None = None
    gain: float = 0.0
    windows: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()


class _Account:
    """Seconds that something has saved against plain decoding lately; or more than saved, below 0."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def book(self, seconds: float, plain: float) -> None:
        """Add to what was saved. plain: seconds of a plain round, in which the account is bounded."""
        self.seconds = max(-_CREDIT * plain, min(_CREDIT * plain, self.seconds + seconds))


class Pace:
    """Chooses windows for a round's sequences, from none (plain decoding) up to the settings', and which guesses of a lookup are taken.

    windows: most tentative tokens of each level, the settings' own; drafts: the first is a draft exit, and its window 0.
    lookups: there is a lookup.
    """

    def __init__(self, windows: Sequence[int], *, drafts: bool, lookups: bool = False) -> None:
        self._windows = tuple(windows)
        self._top = len(self._windows) - 1
        self._drafts = drafts
        self._bottom = 1 if drafts else 0
        self._none = tuple(0 for _ in windows)
        self._options = self._every_option()
        self.segments = [Cost() for _ in windows]
        self.heads = [Cost() for _ in windows]
        self.guess = Cost()
        self.owns = [Cost() for _ in windows]  # layers that exits have to themselves, where they have one
        self.costs = (*self.segments, *self.heads, self.guess, *self.owns)
        """All of the four, by the numbers that `Timings` uses."""
        self._around = Cost(
            _STEP, steady=False
        )  # what lies around the passes, by sequences: of a plain round, the time between rounds with it,
        self._around_guesses = Cost(_STEP, steady=False)  # and of one with guesses; what requests ask for changes it
        self._usual = [_PRIOR] * len(self._windows)  # shares that a new sequence starts with
        self._habits: dict[int, _Habit] = {}
        self._choices: dict[tuple[int, ...], list[tuple[float, tuple[int, ...], float]]] = {}  # see `_best`
        self._rows: dict[int, tuple[float, float] | None] = {}  # see `_row`
        self._extras: dict[int, float] = {}  # see `_extra`
        self._trial = False  # this round tries a lookup's best guesses, whatever they are thought to cost
        self._batch = 0
        self._plain = 0.0  # seconds of this round if it were plain
        self._stake: float | None = None  # plain steps that a round may lose, from the account of the windows; None for any
        self._speed = 1.0  # seconds now for what took one when the costs were first known; all that is kept is in seconds of then
        self._rounds = 0
        self._age = 0  # of the costs, when choices are made anew
        self._plainly = False  # this round is for measuring
        self._plain_at: dict[int, int] = {}  # by batch, the last round that turned out plain
        self._looked = 0  # guesses, see _STRANGE
        self._spanned = False  # whether a pass had the settings' widest window: what others cost lies between that and plain decoding
        self._spans = 0  # rounds that were to have it
        self._allowance = ALLOWANCE / 2 if lookups and self._options else ALLOWANCE
        self._by_windows, self._by_lookup = _Account(), _Account()
        self._upkeep = 0.0  # seconds of exits' own layers that the windows have yet to pay for
        self._opened = False  # whether the one of the windows has what it begins with
        self._gain = 1.0  # how many times plain decoding's speed lately
        self._ended: float | None = None
        self._gap = 0.0  # seconds between the last two rounds, pauses aside
        self._lesson = 0.0  # what learning from a round with guesses takes
        self._taught = False  # whether the last round that was learned from had guesses
        self._unbooked = 0.0  # seconds of plain rounds that were not learned from
        self._skipped: dict[int, int] = {}  # by batch, such rounds since one was
        self._plains: dict[tuple[int, bool], float] = {}  # what `plain_seconds` said, as the costs stand

    def begin(self, plan: StepPlan) -> Begun:
        """Take note of a round that starts, and return what is to be handed to `learn` after it."""
        for id in plan.ended:
            self._habits.pop(id, None)
        batch, goes_on = 0, False
        for sequence in plan.sequences:
            if sequence.room:
                batch += 1
                habit = self._habits.get(sequence.id)
                goes_on |= habit is not None
                if habit is None:
                    habit = self._habits[sequence.id] = _Habit(list(self._usual))
                habit.rounds += 1
        self._rounds += 1
        first = self._rounds < _FORGET  # then at powers of two
        age, self._age = self._age, 2 * (self._rounds.bit_length() if first else _FORGET + self._rounds // _FORGET) + self._spanned
        if age != self._age:
            self._choices.clear()
        due = self._rounds & (self._rounds - 1) == 0 if first else self._rounds % _FORGET == 0
        # not where one has turned out plain anyhow
        self._plainly = due and self._plain_at.get(batch, 0) <= (self._rounds // 2 if first else self._rounds - _FORGET // 2)
        alone = batch == len(plan.sequences)
        self._turn_to(batch, alone)
        return Begun(self._rounds, batch, goes_on, alone, self._plainly)

    def _turn_to(self, batch: int, alone: bool) -> None:
        """Reckon with so many sequences. alone: see `Begun`."""
        self._batch = batch
        if (batch, alone) not in self._plains:
            self._plains[batch, alone] = self.plain_seconds(batch, alone)
        self._plain = self._plains[batch, alone]
        if self._plain and not self._opened:
            self._opened = True
            self._by_windows.book(_START * self._plain, self._plain)
        self._rows.clear()
        self._extras.clear()
        full = not self._plain or self._by_windows.seconds >= 0.9 * _CREDIT * self._plain  # affords everything
        self._stake = None if full else math.floor(2 * (self._by_windows.seconds / self._plain + _DEBT)) / 2

    def asks(self) -> float | None:
        """The least chance at which a lookup's guess may go straight to the full depth in this round; None where it is not asked.

        Where no guess pays it is asked seldom: a pass that was held up when it was first timed would silence it for ever.
        """
        self._trial = False
        if not self._plain or self._plainly or self._by_lookup.seconds <= -_DEBT * self._plain:
            return None
        least = self.price(self._top).least
        if least < _HOPELESS:
            return least
        self._trial = self._rounds % _FORGET == _FORGET // 2 and self._by_lookup.seconds > 0
        return _UNPRICED if self._trial else None

    def prefers(self, id: int, chances: Sequence[float]) -> bool:
        """Whether a lookup's guesses go straight to the full depth: they promise more than the windows. chances: as in `Guess`."""
        habit = self._considered(id)
        gain = habit.gain
        if gain < _MARGIN or habit.windows == self._none:
            return True
        rows = self._extra(self._batch * len(chances)) if self._row(self._top) else 0.0
        return self._plain * (1 + sum(chances)) >= gain * (self._plain + rows)

    def price(self, level: int, id: int | None = None) -> Price:
        """Which of a lookup's guesses pay that `level` is the first to look at; id: of a sequence for which an exit would guess instead."""
        row = self._row(level)
        if row is None or not self._plain:
            return Price(_UNPRICED, 0.0)
        look, later = row
        if level == self._top:  # how many rows there will be is not known yet: see `take`
            look = min(look, *(self._extra(rows) / rows for rows in _FEW))
        worth = self._plain / self._batch / max(1.0, self._gain) - later  # of a guess that this level keeps
        if worth <= 0:
            return Price(1.0, 0.0)
        each = self._habits[id].shares[self._bottom] - self.guess.of(self._batch) / worth if id is not None else 0.0
        return Price(min(1.0, look / worth), each)

    def take(self, offers: Sequence[Sequence[float]]) -> list[int]:
        """How many of each sequence's guesses go to the full depth: as many as make its pass worth most.

        A pass costs by steps, for processors run some rows at a time: one guess may fill a step up that another began.
        offers: chances of each sequence's guesses, as in `Guess`: they fall.
        """
        if not self._plain or self._row(self._top) is None:
            return [len(offer) for offer in offers]
        ranked = sorted((-chance, sequence) for sequence, offer in enumerate(offers) for chance in offer)
        token = self._plain / self._batch / max(1.0, self._gain)
        number, best, worth = 0, 0.0, 0.0
        for rows, (chance, _) in enumerate(ranked, 1):
            worth -= chance * token
            saved = worth - self._extra(rows)
            if saved > best or (self._trial and rows <= _TRIAL):
                number, best = rows, max(best, saved)
        taken = [0] * len(offers)
        for _, sequence in ranked[:number]:
            taken[sequence] += 1
        return taken

    def _extra(self, rows: int) -> float:
        """Expected seconds of so many rows beside those of plain decoding, in a pass of all layers."""
        known = self._extras.get(rows)
        if known is None:
            known = self._extras[rows] = self._through(self._batch + rows) - self._through(self._batch)
        return known

    def _through(self, rows: int) -> float:
        """Expected seconds of a pass of so many rows through all layers and the full depth's head."""
        return sum(segment.of(rows) for segment in self.segments) + self.heads[self._top].of(rows)

    def _row(self, level: int) -> tuple[float, float] | None:
        """Seconds of a further row in all that is run until `level` has looked, and in what is behind it; None where none was measured."""
        if level not in self._rows:
            looks = [*self.segments[: level + 1], self.heads[level], *([self.owns[level]] if self.owns[level].of(1) else [])]
            later = [*self.segments[level + 1 :], self.heads[self._top]] if level < self._top else []
            parts = []
            for costs, window in ((looks, self._windows[level]), (later, self._windows[self._top])):
                slopes = [cost.slope(self._batch, self._batch * (window + 1)) for cost in costs]
                parts.append(None if None in slopes else sum(slope or 0.0 for slope in slopes))
            now, then = parts
            self._rows[level] = None if now is None or then is None else (now, then)
        return self._rows[level]

    def windows(self, id: int) -> tuple[int, ...]:
        """Return the windows of a sequence that decodes in this round."""
        if not self._options:
            return self._none
        habit = self._considered(id)
        habit.chosen = self._none
        if not habit.gain or not self._plain or self._plainly:
            return self._none
        if habit.gain >= _MARGIN and habit.windows != self._none:
            habit.tried, habit.failed = habit.rounds, 0
            if self._looked < _STRANGE:
                habit.chosen = self._smallest()
            elif not self._spanned and self._covers(self._windows, habit.shares):
                habit.chosen = self._windows
            else:
                habit.chosen = habit.windows
        # plain decoding is thought best, or nothing else is covered: try again now and then, the less often the more tries have failed
        elif habit.rounds - habit.tried >= _PATIENCE << min(habit.failed, 4) and self._affords(habit.shares, self._smallest()):
            habit.tried = habit.rounds
            habit.failed += 1
            habit.chosen = self._smallest()
        return habit.chosen

    def _considered(self, id: int) -> _Habit:
        """The sequence's habit with the best choice for it; its gain is 0 until plain decoding is timed, and where there are no windows."""
        habit = self._habits[id]
        made = self._batch, self._age, self._stake
        if habit.made != made and self._options:
            habit.gain, habit.windows = self._best(habit.shares)
            habit.made = made if habit.gain else None
        return habit

    def _affords(self, shares: Sequence[float], windows: tuple[int, ...]) -> bool:
        """Whether the account covers what a round with these windows is expected to lose, were all the batch alike."""
        plain = self._plain
        loss = self.seconds(self._batch, shares, windows) - plain * _series(shares[-1], windows[-1])
        return self._by_windows.seconds > 0 and self._by_windows.seconds >= min(loss, 0.9 * _CREDIT * plain)

    def _covers(self, windows: tuple[int, ...], shares: Sequence[float]) -> bool:
        """Whether the account covers a round with these windows that keeps no guess, were all the batch alike."""
        return self.seconds(self._batch, shares, windows) - self._plain <= self._by_windows.seconds

    def _smallest(self) -> tuple[int, ...]:
        """The windows of a round that costs little and still asks every level."""
        return tuple(min(window, 2 if level == self._bottom else 3) for level, window in enumerate(self._windows))

    def _best(self, shares: Sequence[float]) -> tuple[float, tuple[int, ...]]:
        """The windows with the most expected tokens a second, and how many times plain decoding's that is, were all the batch alike.

        Only windows whose loss the account covers where no guess is kept; if there are none, no windows, and the gain of the best.
        """
        if not self._plain:  # to be measured first
            return 0.0, self._none
        key = (self._batch, *[round(share * 20) for share in shares])
        ranked = self._choices.get(key)
        if ranked is None:
            if len(self._choices) > _MOST_CHOICES:
                self._choices.clear()
            found = [(self.seconds(self._batch, shares, windows) / self._plain, windows) for windows in self._options]
            ranked = sorted(((_series(shares[-1], windows[-1]) / steps, windows, steps - 1) for steps, windows in found), reverse=True)
            self._choices[key] = ranked
        stake = math.inf if self._stake is None else self._stake
        return next(((gain, windows) for gain, windows, loss in ranked if loss <= stake), (ranked[0][0], self._none))

    def _every_option(self) -> list[tuple[int, ...]]:
        """Windows to choose from; each leaves room for what the level below puts in of its own."""
        if len(self._windows) == 1:
            return []  # nobody guesses but a lookup
        options: list[tuple[int, ...]] = [self._none[: self._bottom]]
        for level, most in enumerate(self._windows[self._bottom :], self._bottom):
            steps = [step for step in sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, most}) if step <= most]
            below = level > self._bottom
            options = [(*option, step) for option in options for step in steps if not below or option[-1] < step]
        return options or [self._windows]

    def plain_seconds(self, batch: int, alone: bool = True) -> float:
        """Expected seconds of a round of plain decoding; 0 before one of so many sequences was measured.

        One that is not alone cannot be measured: it is interpolated, and 0 only before any batch was measured.
        """
        around = self._around.of(batch) if not alone or self._around.mean(batch) is not None else 0.0
        if not around:
            return 0.0
        return around + self._through(batch)

    def seconds(self, batch: int, shares: Sequence[float], windows: tuple[int, ...]) -> float:
        """Expected seconds of a round in which `batch` sequences fill these windows."""
        total = self._around_guesses.of(batch) or self._around.of(batch)
        turns = 1.0  # of the level, in a round
        for level in range(self._top, self._bottom - 1, -1):
            rows = batch * (windows[level] + 1)
            total += turns * (self.segments[level].of(rows) + self.heads[level].of(rows) + self.owns[level].of(rows))
            if level > self._bottom:
                turns *= max(1.0, windows[level] / _series(shares[level - 1], windows[level - 1]))
        if self._drafts:
            total += turns * (windows[1] + LAST_ROW) * self.guess.of(batch)
        return total

    def learn(self, begun: Begun, looks: Sequence[Look], timings: Timings) -> None:
        """Learn from a round and what it took (timings, in seconds). looks: of the sequences for which somebody guessed.

        Rounds may overlap: this one need not be the one that began last.
        """
        if begun.number == 1:  # it finds memory cold, and is no measure
            return
        taught, self._taught = self._taught, False
        if not looks and not begun.plainly and begun.number > _FORGET and self._around.mean(begun.batch) is not None:
            self._skipped[begun.batch] = (self._skipped.get(begun.batch, 0) + 1) % _SELDOM
            if self._skipped[begun.batch]:
                self._pass_over(begun, timings)
                return
        if begun.alone:  # a prompt's passes tell of its length too
            self._clock(timings)
        asked, upkeep = timings.asked / self._speed, timings.upkeep / self._speed
        told = asked + upkeep  # seconds of the round that are known for what they are
        for number, rows, seconds, times in timings.passes:
            self.costs[number].add(rows, seconds / self._speed)
            told += times * seconds / self._speed
        self._plains.clear()
        gap = self._since_the_last(begun, timings)
        self._teach(taught, looks, timings)
        if not begun.batch:
            return
        spent = (timings.end - timings.start + gap) / self._speed + (self._lesson if looks else 0.0)
        if begun.alone:  # the time is decoding's
            around = self._around_guesses if looks else self._around
            around.add(begun.batch, max(0.01 * told, spent - told))
            if not looks:
                self._plain_at[begun.batch] = begun.number
        self._turn_to(begun.batch, begun.alone)
        if self._plain:
            if begun.alone:
                self._settle(self._plain, looks, asked, spent - asked - upkeep, upkeep)
            else:  # a prompt's rows are its upkeep, and no loss of decoding's
                self._settle(self._plain, looks, asked)
        by_windows = [look for look in looks if not look.straight]
        for look in by_windows:
            self._look_at(look)
        self._span(by_windows, timings)

    def _teach(self, taught: bool, looks: Sequence[Look], timings: Timings) -> None:
        """Take note of what learning takes: rounds with guesses cost that too; plain ones, of which few are learned from, do not."""
        if taught:
            self._lesson += _STEP * (min(timings.learning / self._speed, self._plain) - self._lesson)
        self._taught = bool(looks)

    def _since_the_last(self, begun: Begun, timings: Timings) -> float:
        """Seconds between the last round and this one, pauses aside."""
        gap = 0.0
        if self._ended is not None and begun.goes_on:
            gap = max(0.0, timings.start - self._ended - timings.learning)
            gap = self._gap = gap if gap <= max(_PAUSE_SHARE * (timings.end - timings.start), _PAUSE) else self._gap
        self._ended = timings.end
        return gap

    def _span(self, looks: Sequence[Look], timings: Timings) -> None:
        """Take note whether a round with the widest windows had a pass of so many rows: an end or a doubt may cut it short."""
        if not self._spanned and any(self._habits[look.id].chosen == self._windows for look in looks):
            self._spans += 1
            wide = any(number == self._top and rows > self._windows[-1] for number, rows, *_ in timings.passes)
            self._spanned = wide or self._spans == _SPANS

    def _pass_over(self, begun: Begun, timings: Timings) -> None:
        """Book a plain round without learning from it."""
        plain = self._plains.get((begun.batch, begun.alone)) or self.plain_seconds(begun.batch, begun.alone)
        asked = min(timings.asked / self._speed, plain)
        upkeep = min(timings.upkeep / self._speed, plain) if begun.alone else 0.0
        self._unbooked += plain
        self._upkeep += upkeep
        self._by_lookup.book(-asked, plain)
        self._gain += _STEP * (plain / (plain + asked + upkeep) - self._gain)
        self._ended = timings.end

    def _look_at(self, look: Look) -> None:
        """Learn what the levels kept of a sequence's guesses."""
        habit = self._habits[look.id]
        self._looked += look.seen[-1] or look.tokens - 1
        if 2 * look.kept[-1] > look.seen[-1] or (not look.seen[-1] and look.tokens > 1):
            habit.failed = 0  # a try that went well is made again soon
        for level, (seen, kept) in enumerate(zip(look.seen, look.kept, strict=True)):
            if seen:
                weight = 1 - (1 - _STEP) ** seen
                for shares, part in ((habit.shares, weight), (self._usual, weight / 4)):
                    shares[level] += part * (kept / seen - shares[level])
                habit.made = None

    def _clock(self, timings: Timings) -> None:
        """Take note of how fast the machine is, from passes whose cost is known."""
        taken = expected = 0.0
        for number, rows, seconds, times in timings.passes:
            mean = self.costs[number].mean(rows)
            if mean:
                taken += times * seconds
                expected += times * mean
        if taken and expected:
            self._speed = moved(self._speed, taken / expected, _NOW)

    def _settle(self, plain: float, looks: Sequence[Look], asked: float, spent: float | None = None, upkeep: float = 0.0) -> None:
        """Book what a round saved. asked, upkeep: seconds of a lookup and of exits' own layers, see `Timings`.

        spent: all other seconds, None where they are not known: then what was expected.
        """
        batch = self._batch
        token = plain / batch
        saved, extra = [0.0, 0.0], [0.0, 0.0]  # by windows, by the lookup: seconds of plain decoding, and expected seconds more
        around = max(0.0, self._around_guesses.of(batch) - self._around.of(batch))
        rows = sum(look.straight for look in looks)
        row = (self._extra(rows) / rows if self._row(self._top) else _UNPRICED * token) if rows else 0.0
        for look in looks:
            kind = 1 if look.straight else 0
            saved[kind] += (look.tokens - 1) * token
            if look.straight:
                more = look.straight * row + around / len(looks)
            else:
                habit = self._habits[look.id]
                more = (self.seconds(batch, habit.shares, habit.chosen) - plain) / batch
            extra[kind] += max(0.01 * token, more)
        expected = sum(extra)
        tokens = batch + sum(look.tokens - 1 for look in looks)
        asked, upkeep = min(asked, plain), min(upkeep, plain)  # one that was held up
        if spent is not None:
            if looks:
                spent = min(spent, _HELD_UP * (plain + expected))
                scale = (spent - plain) / expected
                extra = [seconds * scale for seconds in extra]
            self._gain += _STEP * (tokens * token / max(spent + asked + upkeep, 0.1 * tokens * token) - self._gain)
        allowed = self._allowance * (tokens * token + self._unbooked)
        self._unbooked = 0.0
        # keeping exits ready costs the same whether they are tried or not: of what is allowed it leaves half for tries
        paid = min(self._upkeep + upkeep, allowed / 2 + saved[0])
        self._upkeep = min(self._upkeep + upkeep - paid, _CREDIT * plain)
        self._by_windows.book(allowed + saved[0] - extra[0] - paid, plain)
        self._by_lookup.book(allowed + saved[1] - extra[1] - asked, plain)


def _series(share: float, most: int) -> float:
    """Expected tokens when up to `most` guesses are each kept with probability `share` until one is not, and one more token comes."""
    share = min(share, 0.999)
    return (1 - share ** (most + 1)) / (1 - share)
