"""Promises of the pace: what pays is guessed, what does not is not, and finding out costs little."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from hispec_ray.core.plan import SequencePlan, StepPlan
from hispec_ray.speculation.pace import ALLOWANCE, Cost, Look, Pace

Shares = Callable[[int], Sequence[float]]
"""tokens so far -> for each level, the true probability that it keeps a guess."""


class Machine:
    """Runs rounds on a clock of its own: passes cost what they cost here, and levels keep guesses by the dice.

    segment, row: seconds of a pass of all layers, and of each further row in it; layers: of the levels, shallow to deep.
    """

    def __init__(
        self, windows: Sequence[int], layers: Sequence[int], *, drafts: bool = True, segment: float = 1.0, row: float = 0.1
    ) -> None:
        self.pace = Pace(windows, drafts=drafts)
        self.windows, self.layers, self.drafts, self.segment, self.row = tuple(windows), layers, drafts, segment, row
        self.clock = 0.0
        self.rng = random.Random(1)

    def cost(self, level: int, rows: int) -> float:
        below = self.layers[level - 1] if level else 0
        return (self.segment + self.row * (rows - 1)) * (self.layers[level] - below) / self.layers[-1]

    def plain(self, batch: int) -> float:
        return sum(self.cost(level, batch) for level in range(len(self.layers))) + 0.05

    def round(self, shares: Sequence[Sequence[float]], plans: Sequence[SequencePlan]) -> list[int]:
        """One round in which the sequences' levels have these shares; the tokens of each."""
        pace, top = self.pace, len(self.layers) - 1
        plan = StepPlan(tuple(plans))
        start = self.clock
        pace.begin(plan, start)
        windows = [pace.windows(part.id) for part in plans]
        seen = [[0] * (top + 1) for _ in plans]
        kept = [[0] * (top + 1) for _ in plans]
        tokens = []
        bottom = 1 if self.drafts else 0

        def advance(i: int, level: int, most: int) -> int:
            """Tentative tokens that a level hands up, at most `most`."""
            if level < bottom:
                return 0
            window = min(windows[i][level], most - 1)
            got = 0
            while got < window:
                if level == bottom:
                    got += window
                    if self.drafts:
                        spent = (self.cost(0, 1)) * window
                        pace.guess.add(1, self.cost(0, 1))
                        self.clock += spent
                else:
                    got += advance(i, level - 1, window - got)
            rows = got + 1
            for segment in range(level + 1):
                if segment == level or got == 0:
                    pace.segments[segment].add(rows, self.cost(segment, rows))
                    self.clock += self.cost(segment, rows)
            pace.heads[level].add(rows, 0.01)
            self.clock += 0.01
            right = 0
            while right < got and self.rng.random() < shares[i][level]:
                right += 1
            seen[i][level] += min(got, right + 1)
            kept[i][level] += right
            return right + 1

        for i in range(len(plans)):
            tokens.append(advance(i, top, 100))
        looks = [Look(part.id, seen[i], kept[i]) for i, part in enumerate(plans) if windows[i][-1]]
        pace.end(plan, sum(tokens), looks, start, self.clock)
        self.clock += 0.04  # outside
        return tokens

    def write(self, count: int, shares: Shares) -> list[float]:
        """Decode so many tokens of one sequence; the time at which each came."""
        times: list[float] = []
        while len(times) < count:
            got = self.round([shares(len(times))], [SequencePlan(1, (0,), len(times), (0,), True, 20, 0.0, 0)])
            times += [self.clock] * got[0]
        return times[:count]


HIERARCHIES = {"single": ((0, 6), (2, 16)), "hispec": ((0, 2, 4), (2, 4, 16)), "hispec, wide": ((0, 4, 12), (2, 6, 16))}


@pytest.mark.parametrize("hierarchy", HIERARCHIES)
def test_a_text_that_turns_unguessable_costs_little_and_pays_again(hierarchy: str) -> None:
    windows, layers = HIERARCHIES[hierarchy]

    def shares(tokens: int) -> list[float]:
        easy = tokens < 1000 or tokens >= 3000
        return [0.95 if easy else 0.0] * len(layers)

    machine = Machine(windows, layers)
    times = machine.write(4000, shares)
    plain = machine.plain(1)
    easy, hard, again = (times[999] - times[200], times[2999] - times[1000], times[3999] - times[3200])
    assert easy / 799 < plain / 1.5, "speculation pays at the start"
    assert hard / 1999 < plain * 1.03, "and costs little where it does not"
    assert again / 799 < plain / 1.5, "and pays again"


@pytest.mark.parametrize("hierarchy", HIERARCHIES)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_never_much_slower_than_plain(hierarchy: str, share: float) -> None:
    windows, layers = HIERARCHIES[hierarchy]
    machine = Machine(windows, layers, row=0.5)
    times = machine.write(3000, lambda tokens: [share] * len(layers))
    assert times[-1] / 3000 < machine.plain(1) * (1 + ALLOWANCE + 0.005)


def test_windows_follow_what_rows_cost() -> None:
    """The same shares: wide windows where rows are cheap, narrow ones where they are dear."""
    mean = []
    for row in (0.01, 0.3):
        machine = Machine((0, 2, 12), (2, 4, 16), row=row)
        machine.write(1500, lambda tokens: [0.9, 0.85, 0.85])
        mean.append(machine.pace._best(1, [0.9, 0.85, 0.85])[1][-1])
    assert mean[0] > mean[1]


def test_a_big_batch_of_poor_guesses_decodes_plainly() -> None:
    machine = Machine((0, 2, 4), (2, 4, 16), row=0.8)
    for _ in range(60):
        machine.round([[0.5] * 3] * 8, [SequencePlan(i, (0,), 5, (0,), True, 20, 0.0, 0) for i in range(8)])
    plan = StepPlan(tuple(SequencePlan(i, (0,), 5, (0,), True, 20, 0.0, 0) for i in range(8)))
    machine.pace.begin(plan, machine.clock)
    assert sum(sum(machine.pace.windows(part.id)) for part in plan.sequences) == 0


def priced(row: float, batch: int = 1, window: int = 8) -> Pace:
    """A pace that has seen plain passes of a second each, and passes of more rows."""
    pace = Pace((window,), drafts=False)
    plan = StepPlan(tuple(SequencePlan(i, (0,), 5, (0,), True, window, 0.0, 0) for i in range(batch)))
    pace.begin(plan, 0.0)
    for rows in (1, 2, 4):
        pace.segments[0].add(rows * batch, 1.0 + row * (rows - 1) * batch)
        pace.heads[0].add(rows * batch, 0.0)
    pace.end(plan, batch, [], 0.0, 1.0)
    pace.begin(plan, 1.0)
    return pace


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("row", [0.01, 0.1, 0.4])
def test_a_guess_is_priced_by_what_a_row_costs_and_a_token_is_worth(row: float, batch: int) -> None:
    """A row costs `row` seconds; a token is worth the seconds of a plain pass over the sequences that share it."""
    assert priced(row, batch).price(0).least == pytest.approx(min(1.0, row * batch), rel=0.05)


def test_lookups_wait_until_plain_decoding_was_timed_and_stop_at_the_debt() -> None:
    pace = Pace((8,), drafts=False)
    plan = StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0),))
    pace.begin(plan, 0.0)
    assert pace.windows(1) == (0,)
    assert not pace.takes_lookups()
    pace = priced(0.1)
    assert pace.takes_lookups()
    for _ in range(40):  # rounds of one token that take twice as long as plain decoding
        pace.end(plan, 1, [], 0.0, 2.0)
    assert not pace.takes_lookups()
    for _ in range(600):  # plain ones earn the allowance
        pace.end(plan, 1, [], 0.0, 1.0)
    assert pace.takes_lookups()


def test_sequences_that_read_their_prompt_teach_nothing() -> None:
    pace = Pace((0, 2, 4), drafts=True)
    plan = StepPlan((SequencePlan(1, (0, 1, 2), 0, (0,), True, 0, 0.0, 0),))
    pace.begin(plan, 0.0)
    pace.end(plan, 1, [], 0.0, 1.0)
    assert pace.plain_seconds(1) == 0.0


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    cost = Cost()
    assert cost.of(3) == 0.0
    for rows, seconds in ((1, 1.0), (4, 2.0), (8, 2.0)):
        cost.add(rows, seconds)
    assert [cost.of(rows) for rows in (0, 1, 2.5, 4, 6, 8, 16)] == [0.0, 1.0, 1.5, 2.0, 2.0, 2.0, 4.0]
    for _ in range(200):
        cost.add(1, 3.0)
    assert cost.of(1) == pytest.approx(3.0, rel=0.01)
    before = cost.of(4)
    cost.add(4, 1e6)
    assert cost.of(4) < 1.3 * before, "one pass that was held up weighs little"
