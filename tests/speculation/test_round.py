"""Promises of the round: the full depth's own text whatever guesses, each layer once, and figures that add up."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fakes import SIZE, VOCABULARY, FakeModel, Say, Text, agreeing, digest, finish, plainly, step

from hispec_ray.core.plan import Done, LevelCounts, StepPlan, Tentative
from hispec_ray.speculation.ahead import Ahead
from hispec_ray.speculation.choice import choose_torch
from hispec_ray.speculation.drafters import Guess, LookupDrafter
from hispec_ray.speculation.levels import Doubt, Level
from hispec_ray.speculation.pace import Look
from hispec_ray.speculation.round import Round
from hispec_ray.speculation.upper import Upper

FULL = 4
NEVER, SELDOM, OFTEN, ALWAYS = 0.0, 0.3, 0.8, 1.0


def levels_of(*windows: int, depths: Sequence[int] | None = None) -> tuple[Level, ...]:
    """A hierarchy with these windows above its draft exit; depths rise to FULL."""
    depths = depths or [max(1, FULL * (level + 1) // (len(windows) + 1)) for level in range(len(windows) + 1)]
    return tuple(Level(f"level {i}", depth, window) for i, (depth, window) in enumerate(zip(depths, (0, *windows), strict=True)))


HIERARCHIES = {
    "plain": levels_of(),
    **{f"single, {drafts} drafts": levels_of(drafts) for drafts in (1, 2, 3, 4)},
    **{f"hispec, {drafts} drafts, window {window}": levels_of(drafts, window) for drafts in (1, 2, 3, 4) for window in range(1, 7)},
    "four levels": levels_of(2, 3, 5),
    "four levels, narrow above": levels_of(3, 2, 1),
    "exits at one depth": levels_of(2, 4, depths=(3, 3, FULL)),
    "exits at the full depth": levels_of(2, 4, depths=(FULL, FULL, FULL)),
    "check exit at the full depth": levels_of(3, 4, depths=(2, FULL, FULL)),
}


def mixed_texts(limit: int = 26) -> list[Text]:
    """Texts of mixed lengths, greedy and sampled, some near their limits."""
    prompts = [
        [digit % VOCABULARY for digit in range(start, start + length)] for start, length in ((1, 1), (2, 12), (3, 5), (4, 23), (5, 2))
    ]
    limits = [limit, limit, 7, 25, 3]
    return [
        Text(index, prompt, most, temperature=index % 2 * 0.8, seed=index)
        for index, (prompt, most) in enumerate(zip(prompts, limits, strict=True))
    ]


def expected(say: Say, texts: Sequence[Text]) -> list[list[int]]:
    return [plainly(say, FULL, text.tokens, text.limit, text.temperature, text.seed) for text in texts]


@pytest.mark.parametrize("share", [NEVER, SELDOM, OFTEN])
@pytest.mark.parametrize("hierarchy", HIERARCHIES)
def test_same_tokens_whatever_the_hierarchy(hierarchy: str, share: float) -> None:
    levels, say = HIERARCHIES[hierarchy], agreeing(share, FULL)
    texts = mixed_texts()
    wanted = expected(say, texts)
    steps = finish(Round(FakeModel(say), levels, choose_torch), texts, levels)
    assert [text.tokens for text in texts] == wanted
    for plan, result in steps:
        for part, done in zip(plan.sequences, result.sequences, strict=True):
            assert len(done.levels) == len(done.tokens)
            assert (1 <= len(done.tokens) <= part.room + 1) if part.samples else done.tokens == []
    check_figures(levels, texts, steps)


GUESSERS = {"draft exit": (False, True), "lookup": (True, False), "both": (True, True)}
"""Whether there is a lookup, and a draft exit."""
DOUBTS = {
    "sure": Doubt(),
    "stops": Doubt(stop=0.8),
    "one branch": Doubt(branch=1.0, branches=1),
    "many branches": Doubt(branch=3.0, branches=4),
    "stops and branches": Doubt(stop=0.5, branch=1.0, branches=2),
}


def guessed_by(hierarchy: str, guesser: str) -> tuple[tuple[Level, ...], LookupDrafter | None]:
    """The hierarchy's levels, without its draft exit where that does not guess, and the lookup where there is one."""
    looks_up, drafts = GUESSERS[guesser]
    return HIERARCHIES[hierarchy][0 if drafts else 1 :], LookupDrafter() if looks_up else None


FOUR = [("single, 3 drafts", OFTEN), ("hispec, 2 drafts, window 4", OFTEN), ("hispec, 4 drafts, window 6", SELDOM), ("four levels", SELDOM)]
"""Hierarchies, each with how often its exits agree."""


@pytest.mark.parametrize("doubt", DOUBTS)
@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize(("hierarchy", "share"), FOUR)
def test_same_tokens_whoever_guesses_and_however_sure(hierarchy: str, guesser: str, doubt: str, share: float) -> None:
    """Lookups, second candidates and early looks change no token, and every row is run once for a token that survives."""
    levels, drafter = guessed_by(hierarchy, guesser)
    say = agreeing(share, FULL)
    texts = [*mixed_texts(), *(Text(9 + i, [1, 2, 3] * 6, 40, 0.3 * i, 5) for i in range(2))]
    wanted = expected(say, texts)
    round_ = Round(FakeModel(say), levels, choose_torch, drafter, DOUBTS[doubt], confidence=0.05)
    steps = finish(round_, texts, levels)
    assert [text.tokens for text in texts] == wanted
    check_figures(levels, texts, steps)
    if drafter:
        assert sum(result.levels[0].own for _, result in steps) > 0, "the lookup guessed nothing"


OWN = {depth: FULL + place for place, depth in enumerate((1, 2, 3))}
"""By depth, layers that exits have to themselves."""


def with_own_layers(levels: Sequence[Level]) -> list[Level]:
    return [replace(level, own=OWN.get(level.depth)) for level in levels]


@pytest.mark.parametrize("doubt", ["sure", "stops", "many branches"])
@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize("hierarchy", [hierarchy for hierarchy, _ in FOUR])
def test_a_row_that_passes_an_exit_goes_through_its_layer(hierarchy: str, guesser: str, doubt: str) -> None:
    """Whoever runs it: a draft, a deeper level, a prompt's chunk. The exit reads it there, and its own layers are what it costs more.

    That none is missing when a later one attends to it is for the model to see.
    """
    plain_levels, drafter = guessed_by(hierarchy, guesser)
    levels = with_own_layers(plain_levels)
    say = agreeing(OFTEN, FULL)
    texts = [*mixed_texts(), Text(9, [1, 2, 3] * 6, 40, 0.3, 5)]
    wanted = expected(say, texts)
    model = FakeModel(say, OWN)
    steps = finish(Round(model, levels, choose_torch, drafter, DOUBTS[doubt], confidence=0.05), texts, levels)
    assert [text.tokens for text in texts] == wanted
    check_figures(levels, texts, steps)
    counts = [sum(result.levels[place - len(levels)].rows for _, result in steps) for place in range(len(levels))]
    run = [model.ran[level.own] for level in levels[:-1]]
    kept = sum((len(text.tokens) - 1) // SIZE * SIZE for text in texts)
    # no more often than through the layers below it, where no row of a candidate that was passed over comes again
    assert all(kept <= rows <= passed for rows, passed in zip(run, counts[:-1], strict=True))
    assert model.ran.keys() == {*range(FULL), *(level.own for level in levels[:-1])}
    if guesser == "draft exit":
        guessing = [result.levels[-len(levels)] for _, result in steps]
        passes = sum(count.passes for count in guessing) + model.drafts  # the last row of a run has no head
        assert sum(count.layers for count in guessing) == levels[0].depth * passes + model.passes[levels[0].own]


@pytest.mark.parametrize("hierarchy", [hierarchy for hierarchy, _ in FOUR])
def test_where_nobody_guesses_rows_go_through_an_exits_layer_a_block_at_a_time(hierarchy: str) -> None:
    """Then somebody guesses again, and finds every row there, though the text was read and written in rounds without guesses."""
    levels, say = with_own_layers(HIERARCHIES[hierarchy]), agreeing(OFTEN, FULL)
    text = Text(0, [1, 2, 3], 60)
    wanted = expected(say, [text])
    model = FakeModel(say, OWN)
    round_ = Round(model, levels, choose_torch)
    upkeep = 0
    while len(text.tokens) < 31:
        step(round_, [text], 5, 0)
        at = (len(text.tokens) - 1) // SIZE
        assert [model.passes[level.own] for level in levels[:-1]] == [at] * (len(levels) - 1)
    while len(text.tokens) < text.limit:
        _, result = step(round_, [text], 5, levels[-1].window)
        upkeep += result.timings.upkeep > 0
    assert [text.tokens] == wanted
    assert upkeep


@pytest.mark.parametrize("doubt", ["sure", "many branches"])
@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize("hierarchy", [hierarchy for hierarchy, _ in FOUR])
def test_rows_that_wait_are_there_whoever_guesses_next(hierarchy: str, guesser: str, doubt: str) -> None:
    """Rounds with guesses and without in any order, sequences that come and go, texts that begin again from their tokens."""
    dice = random.Random(hierarchy + guesser + doubt)
    plain_levels, drafter = guessed_by(hierarchy, guesser)
    levels = with_own_layers(plain_levels)
    say = agreeing(OFTEN, FULL)
    texts = [*mixed_texts(50), *(Text(9 + i, [1, 2, 3] * 6, 60, 0.3 * i, 5) for i in range(2))]
    wanted = expected(say, texts)
    round_ = Round(FakeModel(say, OWN), levels, choose_torch, drafter, DOUBTS[doubt], confidence=0.05)
    ended: tuple[int, ...] = ()
    while open_texts := [text for text in texts if len(text.tokens) < text.limit]:
        some = [text for text in open_texts if dice.random() < 0.7] or open_texts
        step(round_, some, 5, levels[-1].window if dice.random() < 0.4 else 0, ended)
        ended = ()
        if dice.random() < 0.2:
            text = dice.choice(open_texts)
            text.lose()
            ended = (text.id,)
    assert [text.tokens for text in texts] == wanted
    assert any(text.moves for text in texts)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("doubt", ["sure", "many branches"])
@pytest.mark.parametrize("hierarchy", [hierarchy for hierarchy, _ in FOUR])
def test_stages_change_no_token_and_miss_no_row(hierarchy: str, doubt: str, lanes: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer is another stage's; one or two rounds are in flight; behind one alone the exit guesses ahead, and it comes true."""
    levels, say = HIERARCHIES[hierarchy], agreeing(OFTEN, FULL)
    levels = with_own_layers(levels) if own else levels
    texts = [Text(0, [1, 2, 3], 60), Text(1, [3] * 9, 60, 0.5, 7), Text(2, [5, 1], 60)]
    wanted = expected(say, texts)
    model, end = FakeModel(say, OWN if own else None), FULL - 1
    dice, given = random.Random(hierarchy + doubt), []
    give = Ahead._give
    monkeypatch.setattr(Ahead, "_give", lambda *args: (given.append(args), give(*args)))
    below = Round(model, levels, choose_torch, doubt=DOUBTS[doubt], end=end)
    above = Upper(model.beside(), levels, choose_torch, DOUBTS[doubt], lookup=False, first=end, end=FULL)
    flying: deque[tuple[StepPlan, list[Text], list[Tentative], torch.Tensor]] = deque()
    done: list[Done] = []
    upkeep = 0
    while any(len(text.tokens) < text.limit for text in texts):
        busy = [text for _, some, *_ in flying for text in some]
        free = [text for text in texts if text not in busy and len(text.tokens) < text.limit]
        while free and len(flying) < lanes:
            some = free[: 2 if lanes == 1 else 1]
            free = free[len(some) :]
            room = levels[-1].window if dice.random() < 0.7 else 0
            plan = StepPlan(tuple(text.plan(5, room) for text in some), (), tuple(done))
            done.clear()
            asked, hidden, said = below.ask(plan)
            upkeep += said.timings.upkeep > 0
            flying.append((plan, some, asked, hidden))
        below.look_ahead()
        plan, some, asked, hidden = flying.popleft()
        _, result = above.answer(plan, asked, hidden)
        done.append(Done(result.timings, result.verdicts))
        for text, part, one in zip(some, plan.sequences, result.sequences, strict=True):
            text.take(part, one.tokens, one.levels)
    assert [text.tokens for text in texts] == wanted
    assert (upkeep > 0) == own
    assert given or DOUBTS[doubt].branches or lanes == 2


@pytest.mark.parametrize("doubt", ["sure", "many branches"])
@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize(("hierarchy", "share"), FOUR)
def test_the_pace_changes_no_token(hierarchy: str, guesser: str, doubt: str, share: float) -> None:
    """Passes take times by the dice, so that the pace opens and closes windows and sends lookups straight to the full depth."""
    levels, drafter = guessed_by(hierarchy, guesser)
    say = agreeing(share, FULL)
    texts = [*mixed_texts(), *(Text(9 + i, [1, 2, 3] * 6, 60, 0.3 * i, 5) for i in range(2))]
    wanted = expected(say, texts)
    dice, now = random.Random(hierarchy + guesser), [0.0]

    def clock() -> float:
        now[0] += dice.choice((0.0, 0.00001, 0.0001, 0.002))
        return now[0]

    steps = finish(Round(FakeModel(say), levels, choose_torch, drafter, DOUBTS[doubt], paced=True, clock=clock), texts, levels)
    assert [text.tokens for text in texts] == wanted
    check_figures(levels, texts, steps)
    # what looking up takes here is by the dice too, and may be more than it is worth, as are guesses that seldom come true
    pays = GUESSERS[guesser][1] and share == OFTEN
    assert not pays or any(len(done.tokens) > 1 for _, result in steps for done in result.sequences), "nobody's guess was taken"


@pytest.mark.parametrize("ends", [False, True])
def test_nobody_guesses_ahead_behind_an_end(ends: bool) -> None:
    """While another process looks at a window that holds an end, there is nothing to guess behind it."""
    levels, say = levels_of(4), agreeing(ALWAYS, FULL)
    text = Text(0, [1, 2, 3], 60)
    wanted = plainly(say, FULL, text.tokens, 10)
    round_ = Round(FakeModel(say), levels, choose_torch)
    step(round_, [text], 5, 4)
    text.ends = frozenset(wanted[6:7]) if ends else text.ends
    (asked,), _, _ = round_.ask(StepPlan((text.plan(5, 4),)))
    assert len(asked.tokens) <= 4
    round_.look_ahead()
    assert (round_._ahead is None) == ends


class Wrong(LookupDrafter):
    """Guesses one token after every other text, which is never the next one."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say
        self._known: dict[int, list[int]] = {}

    def begin(self, plan: StepPlan) -> None:
        for part in plan.sequences:
            known = self._known.setdefault(part.id, [])
            known[part.start :] = part.tokens

    def committed(self, id: int, tokens: Sequence[int], seconds: Sequence[int]) -> None:
        self._known[id] += tokens

    def propose(self, id: int, tentative: Sequence[int], most: int, least: float, each: float = 0.0) -> list[Guess]:
        text = (*self._known[id], *tentative)
        right = max(range(VOCABULARY), key=self._say(text, FULL).__getitem__)
        return [Guess((right + 1) % VOCABULARY, 0.9)] if digest("guesses", text) % 2 else []


@pytest.mark.parametrize("levels", [levels_of(4), levels_of(3, 6)], ids=["single", "hispec"])
def test_what_a_lookup_gets_wrong_is_not_held_against_the_exit(levels: tuple[Level, ...]) -> None:
    """The exits are always right and the lookup never: the pace hears of the exits."""
    say = agreeing(ALWAYS, FULL)
    looks: list[Look] = []
    round_ = Round(FakeModel(say), levels, choose_torch, Wrong(say), paced=True)
    pace = round_._pace
    assert pace
    windows = tuple(level.window for level in levels)
    pace.windows = lambda _: windows  # type: ignore[method-assign]
    pace.prefers = lambda *_: False  # type: ignore[method-assign]
    pace.learn = lambda begun, found, timings: looks.extend(found)  # type: ignore[method-assign]
    texts = [Text(i, [i, 2], 60) for i in range(3)]
    wanted = expected(say, texts)
    steps = finish(round_, texts, levels)
    assert [text.tokens for text in texts] == wanted
    looked_up, drafted = (sum(result.levels[source].own for _, result in steps) for source in (0, 1))
    assert min(looked_up, drafted) > 20
    assert sum(result.levels[2].seen - result.levels[2].accepted for _, result in steps) > 20
    assert sum(look.seen[1] for look in looks) > 20
    assert all(look.seen[1] == look.kept[1] for look in looks)


def test_a_second_candidate_that_is_right_saves_a_pass() -> None:
    """The check exit's first choice is always wrong and its second always right: with a branch each commit is a token longer."""

    def say(tokens: tuple[int, ...], depth: int) -> list[float]:
        right, wrong = len(tokens) % 7, 7
        logits = [0.0] * VOCABULARY
        logits[right], logits[wrong] = (5.0, 0.0) if depth == FULL else (4.0, 4.5)
        return logits

    levels = levels_of(2, 3)
    passes = []
    for branches in (0, 1, 3):
        text = Text(1, [1], 40)
        steps = finish(Round(FakeModel(say), levels, choose_torch, None, Doubt(branch=1.0, branches=branches)), [text], levels)
        assert text.tokens == plainly(say, FULL, [1], 40)
        passes.append(sum(result.levels[-1].passes for _, result in steps))
    assert passes[0] == 39
    assert passes[1] <= 20
    assert passes[2] <= passes[1]


def test_an_unsure_exit_lets_the_next_level_look() -> None:
    say = agreeing(OFTEN, FULL)
    levels = levels_of(4, 6)

    def window(stop: float) -> float:
        text = Text(1, [1], 60)
        steps = finish(Round(FakeModel(say), levels, choose_torch, None, Doubt(stop=stop)), [text], levels)
        counts = [result.levels for _, result in steps]
        return sum(count[-1].seen for count in counts) / sum(count[-1].passes for count in counts)

    assert window(100.0) <= 2.0, "one guess, and the check exit's own choice after it"
    assert window(0.0) > window(1.0) > window(100.0)


def check_figures(levels: Sequence[Level], texts: Sequence[Text], steps: Sequence) -> None:
    """The rows of each segment are those of tokens that survive and of tokens that a level rejected, once each."""
    counts = [LevelCounts() for _ in levels]
    shift = len(steps[0][1].levels) - len(levels)  # 1 where a lookup is the first of the sources
    for _, result in steps:
        for total, one in zip(counts, result.levels[-len(levels) :], strict=True):
            total.add(one)
    rejected = [count.seen - count.accepted for count in counts]
    survivors = sum(len(text.tokens) - 1 for text in texts)  # the last token of a text is never run
    for level, count in enumerate(counts):
        # whoever is rejected at a level has been through its segment and those below
        assert count.rows == survivors + sum(rejected[level:]), f"level {level}"
        assert count.rows >= count.seen
    assert levels[0].window or counts[0].seen == 0
    kept = [counts[-1].accepted, counts[-1].own]
    assert sum(kept) == sum(len(text.levels) for text in texts)
    for level, count in enumerate(counts):
        chosen = sum(text.levels.count(level + shift) for text in texts)
        assert chosen == count.own if level == len(levels) - 1 else chosen <= count.own


@pytest.mark.parametrize("hierarchy", [name for name in HIERARCHIES if name != "plain"])
def test_levels_that_always_agree_reject_nothing(hierarchy: str) -> None:
    levels = HIERARCHIES[hierarchy]
    texts = mixed_texts()
    for _, result in finish(Round(FakeModel(agreeing(ALWAYS, FULL)), levels, choose_torch), texts, levels):
        for count in result.levels[1:]:
            assert count.accepted == count.seen
    assert any(0 in text.levels for text in texts) == all(level.window > index for index, level in enumerate(levels[1:]))


def test_levels_that_never_agree_cost_rows_and_change_nothing() -> None:
    """Every guess is another token than the full depth's: a round commits the full depth's own token alone."""

    def say(tokens: tuple[int, ...], depth: int) -> list[float]:
        return [float(token == (len(tokens) * 3 + depth) % VOCABULARY) for token in range(VOCABULARY)]

    levels = levels_of(2, 4, depths=(1, 2, FULL))
    text = Text(0, [1, 2, 3], 20)
    steps = finish(Round(FakeModel(say), levels, choose_torch), [text], levels)
    assert text.tokens == plainly(say, FULL, [1, 2, 3], 20)
    assert set(text.levels) == {2}
    assert all(len(result.sequences[0].tokens) == 1 for _, result in steps)
    assert all(result.levels[1].accepted == result.levels[2].accepted == 0 for _, result in steps)


def test_a_token_is_credited_to_the_level_that_chose_it_first() -> None:
    """The draft exit is wrong at positions that 3 divides, the check exit where 5 does too."""

    def say(tokens: tuple[int, ...], depth: int) -> list[float]:
        at = len(tokens)
        wrong = (depth == 1 and at % 3 == 0) or (depth < FULL and at % 15 == 0)
        return [float(token == (at + 4 * wrong) % VOCABULARY) for token in range(VOCABULARY)]

    levels = levels_of(4, 6, depths=(1, 2, FULL))
    text = Text(0, [0], 61)
    finish(Round(FakeModel(say), levels, choose_torch), [text], levels)
    assert text.tokens == [at % VOCABULARY for at in range(61)]
    for at, level in enumerate(text.levels, start=1):
        if at % 15 == 0:
            assert level == 2
        elif at % 3 == 0:
            assert level > 0
    assert text.levels.count(0) > 20
    assert text.levels.count(1) >= 10


@pytest.mark.parametrize("room", range(7))
@pytest.mark.parametrize("hierarchy", ["single, 4 drafts", "hispec, 2 drafts, window 4", "hispec, 4 drafts, window 6", "four levels"])
def test_a_round_keeps_to_its_room(hierarchy: str, room: int) -> None:
    """With levels that always agree a round fills its room, and never writes behind it."""
    levels, say = HIERARCHIES[hierarchy], agreeing(ALWAYS, FULL)
    text = Text(3, [1, 2], 60)
    round_ = Round(FakeModel(say), levels, choose_torch)
    step(round_, [text], 5, room)
    _, result = step(round_, [text], 5, room)
    assert len(result.sequences[0].tokens) == min(room, levels[-1].window) + 1
    assert text.tokens == plainly(say, FULL, [1, 2], len(text.tokens))


@pytest.mark.parametrize("share", [SELDOM, OFTEN, ALWAYS])
@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize("hierarchy", ["single, 4 drafts", "hispec, 2 drafts, window 4", "hispec, 4 drafts, window 6", "four levels"])
def test_nobody_guesses_on_behind_an_end(hierarchy: str, guesser: str, share: float) -> None:
    """Up to its end a text is the same, and what stands behind it is one token of each level that looks, and no guess."""
    levels, drafter = guessed_by(hierarchy, guesser)
    say = agreeing(share, FULL)
    text = Text(3, [1, 2, 3] * 6, 60)
    wanted = plainly(say, FULL, text.tokens, 60)
    text.ends = frozenset((wanted[30],))
    place = wanted.index(wanted[30], 18)
    round_ = Round(FakeModel(say), levels, choose_torch, drafter, confidence=0.05)
    while len(text.tokens) <= place:
        step(round_, [text], 18, levels[-1].window)
        guessed = text.tokens[place + 1 :]
        assert len(guessed) <= len(levels) - 1
        assert 0 not in text.levels[place + 1 - 18 :], "the lowest of all guesses on"
    assert text.tokens[: place + 1] == wanted[: place + 1]


@pytest.mark.parametrize(
    ("windows", "drafts_of_each_check"), [((2, 4), [2, 0]), ((2, 6), [2, 2]), ((4, 6), [4, 0]), ((1, 4), [1, 1]), ((3, 3), [2])]
)
def test_the_check_exit_looks_until_its_window_is_full(windows: tuple[int, int], drafts_of_each_check: list[int]) -> None:
    """The check exit's own tokens take places in the window too; the last place is its own without a draft."""
    levels, say = levels_of(*windows), agreeing(ALWAYS, FULL)
    text = Text(0, [1, 2], 60)
    round_ = Round(FakeModel(say), levels, choose_torch)
    step(round_, [text], 5, 0)
    _, result = step(round_, [text], 5, windows[-1])
    draft, check, full = result.levels
    assert (full.passes, full.seen, full.own) == (1, windows[1], 1)
    assert (check.passes, check.seen) == (len(drafts_of_each_check), sum(drafts_of_each_check))
    assert draft.passes == draft.own == sum(drafts_of_each_check)


def test_prompts_are_read_beside_sequences_that_decode() -> None:
    """A long prompt's chunks choose nothing, and take nothing from those beside them."""
    levels, say = HIERARCHIES["hispec, 2 drafts, window 4"], agreeing(OFTEN, FULL)
    young, old = Text(0, [1] * 30, 40), Text(1, [2, 3], 50)
    wanted = expected(say, [young, old])
    round_ = Round(FakeModel(say), levels, choose_torch)
    step(round_, [old], 5, 4)
    for chunk in (7, 1, 9, 13):
        plan, result = step(round_, [old, young], chunk, 4)
        samples = plan.sequences[1].samples
        assert samples == (chunk == 13)
        assert bool(result.sequences[1].tokens) == samples
        assert result.sequences[0].tokens
    finish(round_, [old, young], levels)
    assert [young.tokens, old.tokens] == wanted


def test_a_batch_changes_nobodys_rounds() -> None:
    """Text, levels and rounds of a sequence are its own: alone and in a batch they are the same."""
    levels, say = HIERARCHIES["hispec, 3 drafts, window 5"], agreeing(0.6, FULL)
    together = mixed_texts()
    finish(Round(FakeModel(say), levels, choose_torch), together, levels)
    for text, alone in zip(together, mixed_texts(), strict=True):
        finish(Round(FakeModel(say), levels, choose_torch), [alone], levels)
        assert (alone.tokens, alone.levels) == (text.tokens, text.levels)


def test_levels_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"depths \[4, 2\]"):
        Round(FakeModel(agreeing(1, 4)), (Level("draft", 4, 0), Level("full", 2, 2)), choose_torch)


def chi_square_p(observed: torch.Tensor, law: torch.Tensor) -> float:
    """Probability of a chi-square statistic as large as this one's or larger; cells of fewer than 5 expected are joined."""
    total = observed.sum()
    order = law.argsort()
    observed, wanted = observed[order].double(), law[order].double() * total
    rare = int((wanted.cumsum(0) < 5).sum()) + 1
    observed, wanted = (torch.cat((part[:rare].sum()[None], part[rare:])) for part in (observed, wanted))
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2))


def law_of(say: Say, prompt: Sequence[int], length: int, temperature: float) -> torch.Tensor:
    """The exact law of the next `length` tokens under the full depth, `[VOCABULARY ** length]`, by enumeration."""
    law = torch.ones(1, dtype=torch.float64)
    for count in range(length):
        each = []
        for tokens in itertools.product(range(VOCABULARY), repeat=count):
            logits = torch.tensor(say((*prompt, *tokens), FULL), dtype=torch.float64)
            each.append(torch.softmax(logits / temperature, -1))
        law = (law.unsqueeze(1) * torch.stack(each)).flatten()
    return law


@pytest.mark.parametrize(("share", "least", "most"), [(SELDOM, 0.0, 0.5), (0.99, 0.8, 1.0)])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_tokens_follow_the_full_depths_law(share: float, least: float, most: float, temperature: float) -> None:
    """2,000 seeds: what one round writes is drawn from the softmax of the full depth, at low and at high acceptance."""
    draws, length = 2000, 2
    levels, say = levels_of(2, 4), agreeing(share, FULL)
    prompt = (5, 1)
    counts = torch.zeros(VOCABULARY**length)
    seen = accepted = 0
    round_ = Round(FakeModel(say), levels, choose_torch)
    for first in range(0, draws, 50):
        texts = [Text(index, prompt, len(prompt) + 6, temperature, seed=first + index) for index in range(50)]
        for _, result in finish(round_, texts, levels):
            seen += result.levels[-1].seen
            accepted += result.levels[-1].accepted
        for text in texts:
            one, two = text.tokens[2:4]
            counts[one * VOCABULARY + two] += 1
    assert counts.sum() == draws
    assert least < accepted / seen < most
    law = law_of(say, prompt, length, temperature)
    assert chi_square_p(counts, law) > 0.01
    firsts = counts.view(VOCABULARY, VOCABULARY).sum(1)
    assert chi_square_p(firsts, law.view(VOCABULARY, VOCABULARY).sum(1)) > 0.01
    # the test has power: the check exit's law, or another temperature, is told apart
    wrong = law_of(say, prompt, length, temperature * 1.25)
    assert chi_square_p(counts, wrong) < 1e-4


def test_the_law_of_a_whole_text_is_the_product_of_softmaxes() -> None:
    """An exact enumeration: three tokens of four, 64 texts, and a distance that falls as the draws grow."""

    def say(tokens: tuple[int, ...], depth: int) -> list[float]:
        logits = agreeing(0.5, FULL)(tokens, depth)
        return [logit if token < 4 else -100.0 for token, logit in enumerate(logits)]

    levels, prompt, draws = levels_of(1, 2), (3,), (500, 8000)
    keep = [a * VOCABULARY**2 + b * VOCABULARY + c for a, b, c in itertools.product(range(4), repeat=3)]
    law = law_of(say, prompt, 3, 1.0)[keep]
    assert law.sum() == pytest.approx(1, abs=1e-12)
    counts = torch.zeros(4, 4, 4)
    distances = []
    round_ = Round(FakeModel(say), levels, choose_torch)
    for first in range(0, draws[-1], 100):
        texts = [Text(index, prompt, 4, 1.0, seed=10_000 + first + index) for index in range(100)]
        finish(round_, texts, levels)
        for text in texts:
            counts[tuple(text.tokens[1:])] += 1
        if counts.sum() in draws:
            distances.append(float((counts.flatten() / counts.sum() - law).abs().sum() / 2))
    assert distances[1] < distances[0] / 2
    assert distances[1] < 0.04
    assert chi_square_p(counts.flatten(), law) > 0.01
