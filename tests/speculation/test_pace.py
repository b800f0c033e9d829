"""Promises of the pace: what pays is guessed, what does not is not, and finding out costs little."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from fakes import FakeModel, agreeing
from fakes import Text as FakeText

from hispec_ray.core.plan import Done, SequencePlan, StepPlan, Timings
from hispec_ray.speculation.choice import choose_torch
from hispec_ray.speculation.cost import Cost
from hispec_ray.speculation.levels import Level
from hispec_ray.speculation.pace import ALLOWANCE, LAST_ROW, Begun, Look, Pace
from hispec_ray.speculation.round import Round

Shares = Callable[[int], Sequence[float]]
"""tokens so far -> for each level, the true probability that it keeps a guess."""


class Machine:
    """Runs rounds on a clock of its own: passes cost what they cost here, and levels keep guesses by the dice.

    segment, row: seconds of a pass of all layers, and of each further row in it; layers: of the levels, shallow to deep.
    inside: seconds of a round that are no pass's.
    """

    def __init__(
        self,
        windows: Sequence[int],
        layers: Sequence[int],
        *,
        drafts: bool = True,
        segment: float = 1.0,
        row: float = 0.1,
        inside: float = 0.1,
    ) -> None:
        self.pace = Pace(windows, drafts=drafts)
        self.inside = inside
        self.windows, self.layers, self.drafts, self.segment, self.row = tuple(windows), layers, drafts, segment, row
        self.clock = 0.0
        self.rng = random.Random(1)

    def cost(self, level: int, rows: int) -> float:
        below = self.layers[level - 1] if level else 0
        return (self.segment + self.row * (rows - 1)) * (self.layers[level] - below) / self.layers[-1]

    def plain(self, batch: int) -> float:
        return sum(self.cost(level, batch) for level in range(len(self.layers))) + 0.05 + self.inside

    def round(self, shares: Sequence[Sequence[float]], plans: Sequence[SequencePlan]) -> list[int]:
        """One round in which the sequences' levels have these shares; the tokens of each.

        What sequences do at the same place of their rounds is one pass of all their rows.
        """
        pace, top = self.pace, len(self.layers) - 1
        plan = StepPlan(tuple(plans))
        start = self.clock
        begun = pace.begin(plan)
        windows = [pace.windows(part.id) if part.room else pace._none for part in plans]
        seen = [[0] * (top + 1) for _ in plans]
        kept = [[0] * (top + 1) for _ in plans]
        bottom = 1 if self.drafts else 0
        passes: list[list[tuple[str, int, int]]] = [[] for _ in plans]  # by sequence: what, level, rows
        told: list[tuple[int, int, float, float]] = []

        def advance(i: int, level: int, most: int) -> int:
            """Tentative tokens that a level hands up, at most `most`."""
            if level < bottom:
                return 0
            window = min(windows[i][level], most - 1)
            got = 0
            while got < window:
                if level == bottom:
                    got += window
                    passes[i] += [("guess", 0, 1)] * window + [("last row", 0, 1)] if self.drafts else []
                else:
                    got += advance(i, level - 1, window - got)
            passes[i] += [("segment", segment, got + 1) for segment in range(level + 1) if segment == level or got == 0]
            passes[i].append(("head", level, got + 1))
            right = 0
            while right < got and self.rng.random() < shares[i][level]:
                right += 1
            seen[i][level] += min(got, right + 1)
            kept[i][level] += right
            return right + 1

        tokens = [advance(i, top, 100) for i in range(len(plans))]
        for place in range(max(map(len, passes))):
            together: dict[tuple[str, int], int] = {}
            for mine in passes:
                if place < len(mine):
                    what, level, rows = mine[place]
                    together[what, level] = together.get((what, level), 0) + rows
            for (what, level), rows in together.items():
                seconds, times = 0.01 if what == "head" else self.cost(level, rows), LAST_ROW if what == "last row" else 1
                numbers = {"segment": level, "head": top + 1 + level}
                told.append((numbers.get(what, 2 * (top + 1)), rows, seconds, times))
                self.clock += times * seconds
        self.clock += self.inside
        looks = [Look(part.id, tokens[i], 0, seen[i], kept[i]) for i, part in enumerate(plans) if windows[i][-1]]
        pace.learn(begun, looks, Timings(start, self.clock, passes=told))
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
        mean.append(machine.pace._best([0.9, 0.85, 0.85])[1][-1])
    assert mean[0] > mean[1]


@pytest.mark.parametrize(("row", "share", "opens"), [(0.8, 0.5, False), (0.02, 0.95, True)])
def test_a_big_batch_guesses_only_where_rows_are_cheap_and_guesses_good(row: float, share: float, opens: bool) -> None:
    machine = Machine((0, 2, 4), (2, 4, 16), row=row)
    for level in range(3):  # a prompt was read
        machine.pace.segments[level].add(64, machine.cost(level, 64))
        machine.pace.heads[level].add(1, 0.01)
    plans = [SequencePlan(i, (0,), 5, (0,), True, 20, 0.0, 0) for i in range(8)]
    tokens = [sum(machine.round([[share] * 3] * 8, plans)) for _ in range(100)]
    assert (sum(tokens[60:]) > 1.5 * 8 * 40) == opens
    assert machine.clock / sum(tokens) < machine.plain(8) / 8 * 1.03


def test_who_decodes_beside_prompts_guesses_too() -> None:
    """Under load a prompt is read in most rounds, and beside one nothing can be timed: what was timed alone has to do."""
    machine = Machine((0, 2, 4), (2, 4, 16), row=0.02)
    reading = SequencePlan(99, (0,) * 8, 0, (0,), False, 0, 0.0, 0)
    for batch in (1, 5):
        plans = [SequencePlan(i, (0,), 5, (0,), True, 20, 0.0, 0) for i in range(batch)]
        for number in range(60):
            beside = [] if batch == 1 and number < 30 else [reading]
            tokens = sum(machine.round([[0.95] * 3] * (batch + len(beside)), [*plans, *beside])[:batch])
        assert tokens > 2 * batch


def test_a_batch_that_was_only_met_beside_prompts_is_measured_once_it_is_alone() -> None:
    machine = Machine((0, 2, 4), (2, 4, 16), row=0.02)
    reading = SequencePlan(99, (0,) * 8, 0, (0,), False, 0, 0.0, 0)
    plans = [SequencePlan(i, (0,), 5, (0,), True, 20, 0.0, 0) for i in range(5)]
    for _ in range(50):
        machine.round([[0.95] * 3], plans[:1])
    for _ in range(20):
        machine.round([[0.95] * 3] * 6, [*plans, reading])
    assert machine.round([[0.95] * 3] * 5, plans) == [1] * 5, "no yardstick, no guess"
    assert sum(machine.round([[0.95] * 3] * 5, plans)) > 10


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("row", [0.02, 0.2])
def test_the_widest_windows_are_tried_once_where_the_account_covers_their_failure(batch: int, row: float) -> None:
    machine = Machine((0, 12, 24), (2, 4, 16), row=row)
    pace = machine.pace
    plans = [SequencePlan(i, (0,), 5, (0,), True, 30, 0.0, 0) for i in range(batch)]
    wide = 0
    for _ in range(150):
        spanned, covered = pace._spanned, pace._covers((0, 12, 24), [0.97] * 3)
        machine.round([[0.97] * 3] * batch, plans)
        if not spanned and any(pace._habits[i].chosen == (0, 12, 24) for i in range(batch)):
            wide += 1
            assert covered
    assert wide <= 1
    assert wide or row > 0.02
    assert pace._by_windows.seconds > -2 * pace._plain


def test_debt_narrows_windows_before_it_closes_them() -> None:
    """The fuller the account, the more may be lost in a round."""
    machine = Machine((0, 12, 24), (2, 4, 16), row=0.25)
    plans = [SequencePlan(0, (0,), 5, (0,), True, 30, 0.0, 0)]
    for _ in range(300):
        machine.round([[0.98] * 3], plans)
    pace, found = machine.pace, []
    for steps in (12, 4, 1, 0, -1, -3):
        pace._by_windows.seconds = steps * pace._plain
        pace.begin(StepPlan(tuple(plans)))
        pace._plainly, pace._habits[0].shares = False, [0.98] * 3
        chosen = pace.windows(0)
        if steps < 12 and any(chosen):
            assert pace.seconds(1, [0.98] * 3, chosen) - pace._plain <= (steps + 2) * pace._plain
        found.append(chosen[-1])
    assert found == sorted(found, reverse=True)
    assert found[0] > found[2] > found[-1] == 0


def test_an_ask_that_is_held_up_once_does_not_silence_a_lookup_in_rounds_that_are_passed_over() -> None:
    pace = Pace((8,), drafts=False)
    for _ in range(300):
        for rows in (1, 4):
            looked_up(pace, rows, 1 + 0.05 * (rows - 1), tokens=rows)
    for _ in range(4):  # one of which is learned from
        before = pace._by_lookup.seconds
        looked_up(pace, 1, 1.0, asked=50.0)
        assert pace._by_lookup.seconds >= before - 1.3
    looked_up(pace, 4, 1.15, tokens=4)
    assert pace._by_lookup.seconds >= -12 * pace._plain


@pytest.mark.parametrize(("row", "asks"), [(0.05, True), (1.2, False)])
def test_a_lookup_is_not_asked_where_a_row_costs_what_a_token_is_worth(row: float, asks: bool) -> None:
    pace = priced(row)
    assert (pace.asks() is not None) == asks


def test_ranks_with_clocks_of_their_own_choose_alike() -> None:
    """What a round took is told to all by one of them; what a rank's own learning takes is its own business."""
    shared, chosen = random.Random(4), []
    timings = [1 + 0.3 * shared.random() for _ in range(400)]
    for rank in range(2):
        own = random.Random(rank)
        now, levels = [0.0], (Level("draft", 1, 0), Level("check", 2, 4), Level("full", 4, 8))

        def clock(own: random.Random = own, now: list[float] = now) -> float:
            now[0] += own.random() * 0.05
            return now[0]

        round_ = Round(FakeModel(agreeing(0.95, 4)), levels, choose_torch, paced=True, clock=clock)
        text, mine, done = FakeText(1, [1, 2, 3], 60), [], ()
        for number in range(60):
            if len(text.tokens) >= text.limit:
                text = FakeText(number + 2, [number % 7, 2, 3], 60)
            part = text.plan(5, 8)
            result = round_.run(StepPlan((part,), (), done))
            passes = [(cost, rows, 0.1 * rows, times) for cost, rows, _, times in result.timings.passes]
            done = (Done(Timings(2.0 * number, 2.0 * number + timings[number], passes=passes)),)
            text.take(part, result.sequences[0].tokens, result.sequences[0].levels)
            mine.append(tuple(result.sequences[0].tokens))
        chosen.append(mine)
    assert chosen[0] == chosen[1]


def test_plain_decoding_alone_takes_nothing_from_the_accounts() -> None:
    """Whatever a round takes besides its passes, and whatever batches came before: no guess, no debt."""
    pace = Pace((0, 2, 4), drafts=True, lookups=True)
    dice = random.Random(3)
    clock = 0.0
    for number in range(2000):
        batch = dice.choice((1, 8, 9, 13, 20)) if number < 1000 else 9
        plan = StepPlan(tuple(SequencePlan(i, (0,), 5, (0,), True, 20, 0.0, 0) for i in range(batch)))
        begun = pace.begin(plan)
        before = pace._by_windows.seconds, pace._by_lookup.seconds
        start = clock
        passes = [(cost, batch, (1 + 0.1 * batch) * dice.uniform(0.9, 1.3), 1.0) for cost in range(6)]
        clock += sum(seconds for _, _, seconds, _ in passes) + 0.5
        pace.learn(begun, [], Timings(start, clock, passes=passes))
        clock += 0.2
        most = 12 * pace.plain_seconds(batch)
        assert min(before[0], most) <= pace._by_windows.seconds
        assert min(before[1], most) <= pace._by_lookup.seconds
    assert pace.plain_seconds(9) * pace._speed == pytest.approx(4 * 1.9 * 1.09 + 0.7, rel=0.1)


def test_a_slow_start_is_forgotten() -> None:
    """The first plain pass took three times as long as it should: speculation that fails does not look good for long."""
    machine = Machine((0, 6), (2, 16), row=0.3)
    true, slow = machine.segment, 3
    machine.segment = true * slow
    machine.round([[0.0] * 2], [SequencePlan(1, (0,), 0, (0,), True, 20, 0.0, 0)])
    machine.segment = true
    times = machine.write(1500, lambda tokens: [0.0] * 2)
    assert (times[-1] - times[500]) / 999 < machine.plain(1) * 1.03


@pytest.mark.parametrize(("upkeep", "left"), [(0.0, 0.02), (0.05, 0.02 - 0.05 / 8), (0.5, 0.01)])
def test_what_exits_own_layers_take_is_no_part_of_plain_decoding(upkeep: float, left: float) -> None:
    """The windows pay for it, also in rounds that are not learned from, out of half of what they may lose; beside a prompt nobody does."""
    pace = Pace((0, 8), drafts=True)
    decoding, prompt = SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0), SequencePlan(2, (0,) * 64, 0, (0,), False, 0, 0.0, 0)
    clock = booked = 0.0
    for number in range(2000):
        plan = StepPlan((decoding,) if number % 5 or number < 500 else (decoding, prompt))
        begun = pace.begin(plan)
        pace._by_windows.seconds = 0.0
        start, spent = clock, upkeep if number % 8 == 0 and begun.alone else 0.0
        clock += 1.0 + spent
        pace.learn(begun, [], Timings(start, clock, upkeep=spent or 0.3 * (not begun.alone), passes=[(0, 1, 0.5, 1), (1, 1, 0.4, 1)]))
        booked += pace._by_windows.seconds if number >= 1000 else 0.0
    assert pace.plain_seconds(1) == pytest.approx(1.0, rel=0.01)
    assert booked / 1000 == pytest.approx(left, rel=0.25)


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_a_lookup_that_is_silent_pays_for_being_asked(slower: float) -> None:
    """Also where it has no guess: what it takes is no part of plain decoding, and ends where it finds nothing for long."""
    pace = Pace((8,), drafts=False, lookups=True)
    plan = StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0),))
    clock = asked = 0.0
    for number in range(1000):
        unit = slower if number > 100 else 1.0  # a machine that slows down
        begun = pace.begin(plan)
        start, spent = clock, 0.2 * unit if pace.asks() is not None else 0.0
        clock, asked = clock + spent + 1.1 * unit, asked + spent
        pace.learn(begun, [], Timings(start, clock, asked=spent, passes=[(0, 1, 0.9 * unit, 1), (1, 1, 0.1 * unit, 1)]))
    assert pace.plain_seconds(1) * pace._speed == pytest.approx(1.1 * unit, rel=0.02)
    assert 0 < asked < 0.03 * clock


def test_what_is_guessed_beside_prompts_is_learned_and_charged() -> None:
    pace = Pace((0, 2, 4), drafts=True)
    decoding = SequencePlan(1, (0,), 5, (0,), True, 20, 0.0, 0)
    prompt = SequencePlan(2, (0,) * 64, 0, (0,), False, 0, 0.0, 0)
    clock = 0.0
    opened = 0
    for number in range(400):
        plan = StepPlan((decoding,) if number < 20 else (decoding, prompt))
        begun = pace.begin(plan)
        windows = pace.windows(1)
        opened += windows[-1] > 0 and number >= 100
        rows = 1 + windows[-1]
        passes = [(level, rows, 0.3, 1.0) for level in range(3)] + [(3 + level, rows, 0.01, 1.0) for level in range(3)]
        looks = [Look(1, 1, 0, [0, 1, 1], [0, 0, 0])] if windows[-1] else []
        pace.learn(begun, looks, Timings(clock, clock + 1.0, passes=[*passes, (6, 1, 0.07, 1.0)]))
        clock += 1.0
    assert opened < 20, "nothing was ever kept"


def looked_up(pace: Pace, rows: int, seconds: float, around: float = 0.0, tokens: int = 1, asked: float = 0.0) -> None:
    """A round of one sequence: a pass of so many rows, all but one of them guesses of a lookup, and what lies around it."""
    begun = pace.begin(StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0),)))
    timings = Timings(0.0, seconds + around + asked, asked=asked, passes=[(0, rows, 0.9 * seconds, 1), (1, rows, 0.1 * seconds, 1)])
    pace.learn(begun, [Look(1, tokens, rows - 1, [], [])] if rows > 1 else [], timings)


def priced(row: float, batch: int = 1, window: int = 8) -> Pace:
    """A pace that has seen plain passes of a second each, and passes of more rows."""
    pace = Pace((window,), drafts=False)
    plan = StepPlan(tuple(SequencePlan(i, (0,), 5, (0,), True, window, 0.0, 0) for i in range(batch)))
    pace.begin(plan)  # this round and the next are plain, as the yardstick
    begun = pace.begin(plan)
    for rows in (2, 4):
        pace.segments[0].add(rows * batch, 1.0 + row * (rows - 1) * batch)
        pace.heads[0].add(rows * batch, 0.0)
    pace.learn(begun, [], Timings(0.0, 1.0, passes=[(0, batch, 1.0, 1), (1, batch, 0.0, 1)]))
    pace.begin(plan)
    return pace


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("row", [0.01, 0.1, 0.4])
def test_a_guess_is_priced_by_what_a_row_costs_and_a_token_is_worth(row: float, batch: int) -> None:
    """A row costs `row` seconds; a token is worth the seconds of a plain pass over the sequences that share it."""
    assert priced(row, batch).price(0).least == pytest.approx(min(1.0, row * batch), rel=0.05)


def in_steps(costs: dict[int, float], batch: int = 16) -> Pace:
    """A pace that has seen plain passes of a second, and of further rows what `costs` says."""
    pace = priced(0.0, batch)
    pace.segments[0] = Cost()
    for rows, seconds in {batch: 1.0, **costs}.items():
        pace.segments[0].add(rows, seconds)
    for _ in range(2):  # the fourth round is the yardstick
        pace.begin(StepPlan(tuple(SequencePlan(i, (0,), 5, (0,), True, 8, 0.0, 0) for i in range(batch))))
    return pace


def test_of_all_guesses_as_many_are_taken_as_pay_together() -> None:
    """Two more rows come cheap, a third is a step up that the next ones fill; a token is worth a sixteenth."""
    pace = in_steps({17: 1.02, 18: 1.04, 19: 1.2, 22: 1.22})
    assert pace.take([]) == []
    assert pace.take([[0.9, 0.8], [0.7], []]) == [2, 0, 0]
    assert pace.take([[0.9], [0.95, 0.1]]) == [1, 1]
    assert pace.take([[0.9, 0.85], [0.85, 0.8], [0.7, 0.65]]) == [2, 2, 2], "a full step"
    assert pace.take([[0.3], [0.2]]) == [0, 0]
    assert pace.take([[0.8]] * 3) == [1, 1, 0], "who ties with the last one does not ride along"
    dear = in_steps({17: 1.08, 18: 1.16, 24: 1.6})
    assert dear.take([[0.99, 0.99]] * 4) == [0] * 4
    assert dear.asks() is None
    assert pace.asks() == pytest.approx(0.02 * 16, rel=0.05)


def test_costs_are_hardly_learned_while_the_machine_turns() -> None:
    """What a pass costs against others stays, however often the machine turns slow and fast between them."""
    pace = Pace((8,), drafts=False)
    for number in range(3000):
        slow = 2.0 if number // 60 % 2 else 1.0
        rows = 9 if number % 120 in (30, 40, 50, 55, 60) else 1  # a fifth of those of many rows come when it has just turned slow
        looked_up(pace, rows, slow * (1 + 0.05 * (rows - 1)))
    assert pace.segments[0].of(9) / pace.segments[0].of(1) == pytest.approx(1.4, rel=0.05)


def test_a_first_pass_that_was_held_up_does_not_silence_a_lookup_for_ever() -> None:
    pace, asked = Pace((8,), drafts=False), 0
    for number in range(2000):
        plan = StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0),))
        begun = pace.begin(plan)
        (count,) = pace.take([[0.9, 0.8]]) if pace.asks() is not None else (0,)
        asked += number >= 1000 and count > 0
        seconds = (1 + 0.05 * count) * (3.0 if count and not pace.segments[0].mean(3) else 1.0)
        looks = [Look(1, 1 + (count > 0), count, [], [])] if count else []
        pace.learn(begun, looks, Timings(0.0, seconds + 0.01, asked=0.01, passes=[(0, 1 + count, seconds, 1), (1, 1 + count, 0.0, 1)]))
    assert asked > 800


def test_lookups_wait_until_plain_decoding_was_timed_and_stop_at_the_debt() -> None:
    pace = Pace((8,), drafts=False)
    plan = StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0),))
    pace.begin(plan)
    assert pace.windows(1) == (0,)
    assert pace.asks() is None
    pace = priced(0.1)
    assert pace.asks() is not None
    for _ in range(10):  # rounds of one token that take twice as long as plain decoding
        looked_up(pace, 4, 1.3, around=0.7)
    assert pace.asks() is None
    for _ in range(600):  # plain ones earn the allowance
        looked_up(pace, 1, 1.0)
    pace.begin(plan)
    assert pace.asks() is not None


def test_sequences_that_read_their_prompt_teach_nothing() -> None:
    pace = Pace((0, 2, 4), drafts=True)
    plan = StepPlan((SequencePlan(1, (0, 1, 2), 0, (0,), True, 0, 0.0, 0),))
    for _ in range(2):
        pace.learn(pace.begin(plan), [], Timings(0.0, 1.0, passes=[(0, 3, 0.5, 1)]))
    assert pace.plain_seconds(1) == 0.0


def test_a_first_round_that_finds_memory_cold_is_no_measure() -> None:
    """Nor are choices that were made of the first rounds kept for long."""
    machine = Machine((0, 4), (2, 16), row=0.05)
    plan = StepPlan((SequencePlan(1, tuple(range(40)), 0, (0,), True, 0, 0.0, 0),))
    timings = Timings(0.0, 2000.0, passes=[(segment, 40, 1000.0, 1) for segment in range(2)])
    machine.pace.learn(machine.pace.begin(plan), [], timings)
    times = machine.write(400, lambda tokens: [0.95] * 2)
    assert times[-1] / 400 < machine.plain(1) / 1.5


def plain_round(pace: Pace, batch: int, seconds: float) -> tuple[Begun, Timings]:
    """A round of plain decoding that has begun, and what it will have taken."""
    begun = pace.begin(StepPlan(tuple(SequencePlan(i, (0,), 5, (0,), True, 8, 0.0, 0) for i in range(batch))))
    return begun, Timings(0.0, seconds, passes=[(0, batch, seconds, 1)])


def test_plain_rounds_that_overlap_go_on_to_tell_what_plain_decoding_costs() -> None:
    """Two micro-batches of different sizes in turn, each round learned from when the next has begun."""
    pace = Pace((8,), drafts=False)
    waiting = plain_round(pace, 1, 1.0)
    for number in range(1, 800):
        batch = 1 + number % 2
        coming = plain_round(pace, batch, (1.0 if number < 400 else 2.0) * batch)
        pace.learn(waiting[0], [], waiting[1])
        waiting = coming
    assert [pace.plain_seconds(batch) * pace._speed for batch in (1, 2)] == [pytest.approx(2.0, rel=0.1), pytest.approx(4.0, rel=0.1)]


def test_a_pause_between_two_rounds_is_no_rounds_time() -> None:
    """Whoever asks for rounds does something else after every second round; what lies between the others is decoding's."""
    pace, now = Pace((8,), drafts=False), 0.0
    for number in range(120):
        begun, timings = plain_round(pace, 1, 0.05)
        timings.start, timings.end = now, now + 0.05
        pace.learn(begun, [], timings)
        now += 0.05 + (3.0 if number % 2 else 0.01)
    assert pace.plain_seconds(1) * pace._speed == pytest.approx(0.06, rel=0.1)


def test_a_round_that_took_no_time_by_the_clock_is_learned_from() -> None:
    pace = Pace((8,), drafts=False)
    for seconds in (1.0, 1.0, 0.0, 0.0):
        begun, timings = plain_round(pace, 1, seconds)
        timings.passes.clear()
        pace.learn(begun, [], timings)
    assert pace.plain_seconds(1) > 0


def test_rounds_that_are_not_learned_from_earn_their_allowance() -> None:
    accounts = []
    for seldom in (1, 4):
        pace = Pace((8,), drafts=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hispec_ray.speculation.pace._SELDOM", seldom)
            for _ in range(400):
                pace.learn((one := plain_round(pace, 1, 1.0))[0], [], one[1])
        pace._settle(1.0, [], 0.0, None)
        accounts.append(pace._by_lookup.seconds)
    assert accounts[0] > 0
    assert accounts[1] == pytest.approx(accounts[0], rel=0.02)


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    cost = Cost()
    assert cost.of(3) == 0.0
    for rows, seconds in ((1, 1.0), (4, 2.0), (8, 2.0)):
        cost.add(rows, seconds)
    assert [cost.of(rows) for rows in (0, 1, 2.5, 4, 6, 8, 15)] == [0.0, 1.0, 1.5, 2.0, 2.0, 2.0, 3.0]
    assert (cost.slope(1, 8), cost.slope(4, 8), cost.slope(8, 20), cost.slope(5, 7)) == (pytest.approx(1 / 7), 0.0, None, None)
    for _ in range(200):
        cost.add(1, 1.8)
    assert cost.of(1) == pytest.approx(1.8, rel=0.01)
    for _ in range(4000):
        cost.add(1, 3.0)
    assert cost.of(1) == 2.0, "no more than what more rows cost"
    before = cost.of(4)
    cost.add(4, 1e6)
    assert cost.of(4) < 1.3 * before, "one pass that was held up weighs little"


def test_a_machine_that_slows_down_does_not_change_the_price_of_a_row() -> None:
    """A neighbour comes, and for long only plain passes are timed: those of more rows are slower by then too."""
    pace = Pace((8,), drafts=False)
    for _ in range(30):
        for rows in (1, 2, 4, 9):
            looked_up(pace, rows, 1 + 0.05 * (rows - 1))
    before = pace.price(0).least
    for _ in range(300):
        looked_up(pace, 1, 2.0)
    looked_up(pace, 2, 2.1)
    assert pace.price(0).least == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("held_up", ["around", "asked"])
def test_one_round_that_is_held_up_does_not_silence_a_lookup(held_up: str) -> None:
    pace = Pace((8,), drafts=False)
    for _ in range(30):
        for rows in (1, 4):
            looked_up(pace, rows, 1 + 0.05 * (rows - 1), tokens=rows)
    looked_up(pace, 4, 1.15, **{held_up: 1000.0})
    assert pace.asks() is not None


def test_what_learning_takes_is_a_cost_of_guessing_and_not_of_plain_decoding() -> None:
    pace = Pace((8,), drafts=False)
    clock = 0.0
    for number in range(1, 400):
        begun = pace.begin(StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0),)))
        rows, seconds = (1, 1.0) if number % 2 else (4, 1.15)
        looks = [Look(1, 2, 3, [], [])] if rows > 1 else []
        passes = [(0, rows, 0.9 * seconds, 1.0), (1, rows, 0.1 * seconds, 1.0)]
        pace.learn(begun, looks, Timings(clock, clock + seconds, learning=0.4, passes=passes))
        clock += seconds + 0.4  # the next round's learning comes between
    assert pace.plain_seconds(1) * pace._speed == pytest.approx(1.0, rel=0.05)
    assert pace._around_guesses.of(1) == pytest.approx(0.4, rel=0.2)


@pytest.mark.parametrize("around", [3.0, 20.0])
def test_a_lookup_whose_rounds_always_take_long_is_not_forgiven(around: float) -> None:
    """What lies around its rounds (a grammar, branches) is no accident."""
    pace = Pace((8,), drafts=False)
    spent = 0.0
    for _ in range(3000):
        pace.begin(StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0),)))
        guesses = pace.asks() is not None
        looked_up(pace, 4 if guesses else 1, 1.15 if guesses else 1.0, around=around if guesses else 0.05, tokens=3 if guesses else 1)
        spent += (1.15 + around) / 3 if guesses else 1.05
    assert spent / 3000 < 1.05 * 1.06


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_costs_and_the_machines_speed_do_not_run_away_from_each_other(noise: float) -> None:
    """However long it runs, also what is seldom measured stays true."""
    pace = Pace((8,), drafts=False)
    dice = random.Random(5)
    for number in range(50_000):
        rows = 9 if number % 1000 == 500 else 4 if number % 3 else 1
        looked_up(pace, rows, (1 + 0.05 * (rows - 1)) * dice.uniform(1 - noise, 1 + noise), tokens=rows)
    assert pace._speed == pytest.approx(1.0, rel=0.3)
    costs = [pace.segments[0].of(rows) / pace.segments[0].of(1) for rows in (4, 9)]
    assert costs == [pytest.approx(1.15, rel=0.1), pytest.approx(1.4, rel=0.15)]


def test_a_long_prompt_is_no_change_of_the_machine() -> None:
    pace = Pace((8,), drafts=False)
    for _ in range(40):
        looked_up(pace, 1, 1.0)
    prompt = SequencePlan(2, (0,) * 512, 0, (0,), False, 0, 0.0, 0)
    for chunk in range(16):
        begun = pace.begin(StepPlan((SequencePlan(1, (0,), 5, (0,), True, 8, 0.0, 0), prompt)))
        pace.learn(begun, [], Timings(0.0, 60.0, passes=[(0, 513, 50.0 + 5 * chunk, 1)]))
    assert pace._speed == pytest.approx(1.0, rel=0.01)


def test_the_yardstick_of_each_batch_size_is_kept_true() -> None:
    """A batch that decodes plainly anyhow takes no round for it, and does not stand for another that only guesses."""
    forced = {1: 0, 2: 0}
    pace = Pace((8,), drafts=False)
    for number in range(4000):
        batch = 1 + number // 10 % 2
        sequences = tuple(SequencePlan(i, (0,), 5, (0,), True, 8, 0.0, 0) for i in range(batch))
        begun = pace.begin(StepPlan(sequences))
        guesses = batch == 2 and not begun.plainly
        forced[batch] += begun.plainly
        rows, seconds = (4 * batch, 1.2) if guesses else (batch, 3.0 if number < 40 else 1.0)
        looks = [Look(i, 3, 3, [], []) for i in range(batch)] if guesses else []
        pace.learn(begun, looks, Timings(0.0, seconds, passes=[(0, rows, 0.9 * seconds, 1), (1, rows, 0.1 * seconds, 1)]))
    assert forced[1] <= 8
    assert forced[2] >= 10
