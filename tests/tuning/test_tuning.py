"""Promises of the planner: replays count as the engine counts, and the pick is the best of what was looked at."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hispec_ray import LLM, SamplingParams
from hispec_ray.abacus.problems import stream
from hispec_ray.config import Settings, SpeculationSettings
from hispec_ray.core.plan import StepPlan, StepResult
from hispec_ray.speculation.choice import Choices
from hispec_ray.speculation.cost import Cost
from hispec_ray.speculation.levels import Level
from hispec_ray.speculation.round import Round
from hispec_ray.tuning.contest import Decoded
from hispec_ray.tuning.costs import Besides, Costs, Seen, correct, measure, seen_in
from hispec_ray.tuning.planner import GRID, PLAIN, calibrate, climb, describe, families, predict, probes_of, steady
from hispec_ray.tuning.recording import Recording, listen, write_texts
from hispec_ray.tuning.replay import replay
from hispec_ray.tuning.tune import Tuning, tune

LAYERS = 16
DEPTHS = (2, 4, 6)


def settings_for(speculation: SpeculationSettings) -> Settings:
    model = {"path": "abacus", "threads": 1}
    return Settings.model_validate(
        {"model": model, "cache": {"blocks": 64, "prefix_caching": False}, "speculation": speculation.model_dump()}
    )


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    llm = LLM(settings_for(PLAIN))
    return [llm.encode(problem.prompt) for problem in itertools.islice(stream(3, "held_out"), 3)]


@pytest.fixture(scope="module")
def recordings(prompts: list[tuple[int, ...]]) -> dict[float, list[Recording]]:
    """By temperature; some texts are cut off, the others have come to their end."""
    llm = LLM(settings_for(PLAIN))
    found = {}
    for temperature in (0.0, 0.8):
        found[temperature] = [text for most in (60, 200) for text in write_texts(llm, prompts, most, temperature)]
        assert [text.ended for text in found[temperature]] == [False] * len(prompts) + [True] * len(prompts)
        listen(llm, found[temperature], DEPTHS, llm.engine.shard.choose)
    return found


def flat(each: float) -> Costs:
    """Costs that do not depend on rows: `each` second a layer, heads for nothing; a run has a row for each guess and one more."""
    costs = Costs()
    costs.layer.add(1, each)
    costs.layer.add(512, each)
    for depth in (*DEPTHS, LAYERS):
        costs.heads[depth] = Cost()
        costs.runs[depth] = Cost()
        for guesses in (1, 512):
            costs.runs[depth].add(guesses, each * depth * (guesses + 1))
    return costs


def test_a_recording_knows_what_the_full_depth_wrote(recordings: dict[float, list[Recording]]) -> None:
    for found in recordings.values():
        for recording in found:
            answer = recording.tokens[recording.prompt :]
            assert recording.said[LAYERS].ids == list(answer)
            assert all(recording.agreement(LAYERS))
            assert len(recording.said[2].gaps) == len(answer)


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "single": {"method": "single", "draft_tokens": 4},
    "hispec": {"method": "hispec", "draft_tokens": 3, "window": 6},
    "stops": {"method": "hispec", "draft_tokens": 4, "window": 8, "stop_below": 1.0},
    "lookup": {"method": "single", "drafter": "lookup", "draft_tokens": 5, "lookup_confidence": 0.2},
    "mixed": {"method": "hispec", "drafter": "mixed", "draft_tokens": 4, "window": 6, "lookup_confidence": 0.5},
    "branches": {"method": "hispec", "draft_tokens": 3, "window": 6, "branches": 2, "branch_below": 1.0},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("plan", PLANS)
def test_a_replay_counts_as_the_engine_counts(
    plan: str, temperature: float, recordings: dict[float, list[Recording]], prompts: list[tuple[int, ...]]
) -> None:
    """The same full passes, and of the passes below nearly the same: off the recorded text a replay cannot know what is said."""
    speculation = SpeculationSettings.model_validate({**PLANS[plan], "exits": {"draft": 2, "check": 4}, "pace": "fixed"})
    _, counts, _ = replay(speculation, recordings[temperature], flat(1.0), LAYERS)
    llm = LLM(settings_for(speculation))
    for recording in recordings[temperature]:
        prompt, answer = recording.tokens[: recording.prompt], recording.tokens[recording.prompt :]
        params = SamplingParams(max_tokens=200 if recording.ended else 60, temperature=temperature, seed=recording.seed)
        assert tuple(llm.generate([prompt], params)[0].choices[0].token_ids) == answer
    reads = len(recordings[temperature])  # of the prompts, which a replay leaves out
    real = llm.engine.counts
    assert counts[-1].passes == pytest.approx(real[-1].passes - reads, rel=0.01, abs=2)
    for mine, theirs in zip(counts[:-1], real[:-1], strict=True):
        assert mine.passes == pytest.approx(theirs.passes, rel=0.1, abs=2)
        assert mine.own == pytest.approx(theirs.own, rel=0.15, abs=4)


def test_expected_speed_is_tokens_over_costs(recordings: dict[float, list[Recording]]) -> None:
    costs = flat(0.001)
    speed, counts, work = replay(PLAIN, recordings[0.0], costs, LAYERS)
    assert speed == pytest.approx(1 / (LAYERS * 0.001))
    assert counts[-1].passes == sum(len(recording.tokens) - recording.prompt - 1 for recording in recordings[0.0])
    assert work.passes == work.rounds == work.tokens == counts[-1].passes
    costs.besides = Besides(0.003, 0.002, 0.001, 0.5)
    assert replay(PLAIN, recordings[0.0], costs, LAYERS)[0] == pytest.approx(1 / (LAYERS * 0.001 + 0.006))


def text_that_turns(lengths: Sequence[int]) -> Recording:
    """Tokens that repeat, then tokens by the dice, and so on; its exits are never right."""
    dice = random.Random(7)
    tokens = [1]
    for number, length in enumerate(lengths):
        tokens += [dice.randrange(2, 50_000) if number % 2 else 2 + i % 12 for i in range(length)]
    said = {depth: Choices([0] * len(tokens), [0] * len(tokens), [1.0] * len(tokens)) for depth in DEPTHS}
    said[LAYERS] = Choices(tokens[1:], [0] * len(tokens), [1.0] * len(tokens))
    return Recording(tuple(tokens), 1, 0.0, 0, False, said)


@pytest.mark.parametrize("method", ["single", "hispec"])
@pytest.mark.parametrize("drafter", ["lookup", "mixed"])
def test_lookups_cost_little_on_a_text_that_turns_unguessable_and_pay_again(method: str, drafter: str) -> None:
    """Each row costs a tenth of a pass, and the exits never agree: only what the lookup says is worth a row."""
    lengths = (1000, 2000, 1000)
    text = text_that_turns(lengths)
    speculation = SpeculationSettings.model_validate(
        {"method": method, "drafter": drafter, "exits": {"draft": 2, "check": 4}, "draft_tokens": 6, "window": 6}
    )
    costs = flat(1 / LAYERS)
    costs.layer = Cost()
    costs.layer.add(1, 1 / LAYERS)
    costs.layer.add(11, 2 / LAYERS)
    ends = [sum(lengths[:part]) for part in range(1, 4)]
    seconds = [end / replay(speculation, [replace(text, tokens=text.tokens[: end + 1])], costs, LAYERS)[0] for end in ends]
    easy, hard, again = (b - a for a, b in itertools.pairwise([0.0, *seconds]))
    assert easy < 1000 / 2.5, "a text that repeats is foretold"
    assert hard < 2000 * 1.03, "what cannot be guessed costs no more than it is allowed to"
    assert again < 1000 / 2.5, "and it pays again"
    assert easy + hard + again == pytest.approx(seconds[-1])


def test_lookups_go_straight_to_the_full_depth_where_the_check_exit_does_not_pay() -> None:
    text = text_that_turns((600,))
    speculation = SpeculationSettings.model_validate(
        {"method": "hispec", "drafter": "lookup", "exits": {"check": 4}, "draft_tokens": 4, "window": 6}
    )
    _, (lookup, check, full), _ = replay(speculation, [text], flat(1.0), LAYERS)
    assert full.accepted > 400
    assert lookup.own >= full.accepted
    assert check.passes < 20


@pytest.mark.parametrize("besides", [Besides(), Besides(0.004), Besides(0.0, 0.003), Besides(0.002, 0.005, 0.001, 0.003)], ids=str)
@pytest.mark.parametrize("seconds", [(0.001, 0.001), (0.0005, 0.001), (0.0013, 0.004)], ids=str)
def test_calibration_foretells_what_plans_take_that_were_not_run(
    besides: Besides, seconds: tuple[float, float], recordings: dict[float, list[Recording]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what a few plans take, as a machine would run them whose passes cost something else in rounds than alone."""
    machine, found = flat(0.001), flat(0.001)
    machine.besides, machine.layer, machine.begin = besides, Cost(), 0.002
    for rows, each in zip((1, 16), seconds, strict=True):
        machine.layer.add(rows, each)
    for depth in (*DEPTHS, LAYERS):
        machine.heads[depth].add(1, 0.003)
        machine.heads[depth].add(16, 0.006)
        machine.runs[depth] = Cost()
        for guesses in (1, 16):
            machine.runs[depth].add(guesses, 0.004 + seconds[0] * depth * (guesses + 1))
    passes: list[tuple[int, int, float, float]] = []
    run = Round.run

    def noted(self: Round, plan: StepPlan) -> StepResult:
        result = run(self, plan)
        passes.extend(result.timings.passes)
        return result

    class Clockwork:
        def compare(
            self, plans: Sequence[SpeculationSettings], runs: int, seconds: float, tell: object, *, passes: bool
        ) -> list[list[Decoded]]:
            assert passes
            with monkeypatch.context() as patch:
                patch.setattr(Round, "run", noted)
                return [[self._decoded(plan)] * runs for plan in plans]

        def _decoded(self, plan: SpeculationSettings) -> Decoded:
            passes.clear()
            *_, work = replay(plan, recordings[0.0], machine, LAYERS)
            return Decoded(machine.seconds(work), int(work.tokens), passes=list(passes))

    starts = list(families((2, 4), heads=None, methods=("single", "hispec"), drafters=("exit", "lookup", "mixed")))
    calibrate(Clockwork(), recordings[0.0], found, LAYERS, probes_of(starts))  # type: ignore[arg-type]
    for start in (PLAIN, *starts):
        plan = start.model_copy(update={"draft_tokens": 5, "window": 7, "pace": "fixed"})
        assert replay(plan, recordings[0.0], found, LAYERS)[0] == pytest.approx(replay(plan, recordings[0.0], machine, LAYERS)[0], rel=0.02)


def test_passes_are_told_from_what_rounds_note() -> None:
    """Segments that ran as one are one pass, but for one whose exit has a layer of its own; a run is told by its guesses."""
    levels = (Level("draft", 2, 0), Level("check", 4, 3), Level("full", 16, 6))
    noted = [
        (6, 1, 0.01, 3.5),
        (1, 4, 0.02, 1.0), (4, 2, 0.001, 1.0),
        (0, 1, 0.01, 1.0), (1, 1, 0.02, 1.0), (4, 1, 0.001, 1.0),
        (0, 5, 0.01, 1.0), (1, 5, 0.01, 1.0), (2, 5, 0.06, 1.0), (5, 5, 0.002, 1.0),
        (1, 2, 0.02, 1.0), (2, 6, 0.03, 1.0),
    ]  # fmt: skip
    assert [(one.what, one.of, one.rows, pytest.approx(one.seconds)) for one in seen_in(noted, levels)] == [
        ("run", 2, 3, 0.035),
        ("layers", 2, 4, 0.02), ("head", 4, 2, 0.001),
        ("layers", 4, 1, 0.03), ("head", 4, 1, 0.001),
        ("layers", 16, 5, 0.08), ("head", 16, 5, 0.002),
        ("layers", 2, 2, 0.02), ("layers", 12, 6, 0.03),
    ]  # fmt: skip
    own = (Level("draft", 2, 0, own=16), Level("full", 16, 6))
    noted = [(0, 3, 0.01, 1.0), (1, 3, 0.05, 1.0), (3, 3, 0.002, 1.0), (5, 3, 0.01, 1.0)]
    assert [(one.what, one.of) for one in seen_in(noted, own)] == [("layers", 2), ("layers", 14), ("head", 16)]


def test_what_rounds_take_replaces_what_passes_take_alone() -> None:
    """Layers take twice as long, and a pass a second to begin; a head half a second more; of an exit that was not seen too."""
    costs = flat(1.0)
    for depth in (*DEPTHS, LAYERS):
        costs.heads[depth].add(1, 0.1 * depth)
    passes = [Seen("layers", 16, 1, 33.0), Seen("layers", 2, 1, 5.0), Seen("head", 2, 1, 2 * 0.2 + 0.5)]
    correct(costs, passes * 7)
    assert costs.begin == 0.0, "seven are too few"
    assert costs.layer.of(1) == 1.0
    correct(costs, [])
    assert costs.layer.of(1) == 1.0
    correct(costs, passes * 8)
    assert costs.begin == pytest.approx(1.0)
    assert costs.layer.of(1) == pytest.approx(2.0)
    assert costs.heads[2].of(1) == pytest.approx(0.9)
    assert costs.heads[4].of(1) == pytest.approx(2 * 0.4 + 0.5)
    assert costs.runs[2].of(3) == pytest.approx(2 * flat(1.0).runs[2].of(3)), "none was seen: as many times as layers"


def test_a_context_too_short_to_time_passes_in_is_named() -> None:
    settings = Settings.model_validate({**settings_for(PLAIN).model_dump(), "model": {"path": "abacus", "threads": 1, "max_model_len": 32}})
    llm = LLM(settings)
    with pytest.raises(ValueError, match=r"passes of 32 rows .* the context of 32 tokens .* raise model.max_model_len"):
        measure(llm, (2,), llm.engine.shard.choose, context=20)


def test_families_have_every_shape_once() -> None:
    shapes = list(families(DEPTHS, heads=None, methods=("single", "hispec"), drafters=("exit", "lookup", "mixed")))
    assert len(shapes) == len({describe(shape) for shape in shapes}) == 3 + 3 + 3 + 1 + 3 + 3


def test_climbing_finds_the_top_of_a_hill() -> None:
    start = next(families(DEPTHS, heads=None, methods=("hispec",), drafters=("mixed",)))

    def score(s: SpeculationSettings) -> float:
        return -abs(s.draft_tokens - 8) - abs(s.window - 12) - s.stop_below - s.branches

    top, best = climb(start, score)
    assert (best.draft_tokens, best.window, best.stop_below, best.branches) == (8, 12, 0.0, 0)
    assert top == 0
    assert best.draft_tokens in GRID["draft_tokens"]


def test_predictions_are_sorted_and_plain_is_among_them(recordings: dict[float, list[Recording]]) -> None:
    starts = list(families((2, 4), heads=None, methods=("single", "hispec"), drafters=("exit",)))
    plans = predict(recordings[0.0], flat(1.0), LAYERS, starts, lambda done: None)
    assert [plan.predicted for plan in plans] == sorted((plan.predicted for plan in plans), reverse=True)
    assert len(plans) == len(starts) + 1
    assert PLAIN in [plan.speculation for plan in plans]
    assert plans[0].predicted > plans[-1].predicted, "rows for nothing: guessing pays"


def test_costs_are_of_this_machine() -> None:
    llm = LLM(settings_for(PLAIN))
    costs = measure(llm, (2,), llm.engine.shard.choose, context=50, rows=(1, 8), repeats=2)
    assert 0 < costs.layer.of(1) < costs.layer.of(8) * 2
    assert costs.heads[2].of(1) > 0
    assert 0 < costs.runs[2].of(1) < costs.runs[2].of(8)


@pytest.fixture(scope="module")
def tuned(prompts: list[tuple[int, ...]]) -> Tuning:
    settings = settings_for(PLAIN)
    return tune(settings, prompts[:2], max_tokens=40, checks=2, runs=1, drafters=("exit", "lookup"))


def test_the_choice_is_the_fastest_that_was_run(tuned: Tuning) -> None:
    assert [plan.measured for plan in tuned.checked] == sorted((plan.measured for plan in tuned.checked), key=lambda speed: -(speed or 0))
    plain = next(plan.measured for plan in tuned.checked if plan.speculation == PLAIN)
    fastest = tuned.checked[0]
    assert tuned.chosen == (fastest.speculation if (fastest.measured or 0) >= 1.02 * (plain or 0) else PLAIN)


def test_the_settings_block_is_one_that_a_deployment_takes(tuned: Tuning) -> None:
    import yaml  # noqa: PLC0415

    block = yaml.safe_load(tuned.settings_block())
    speculation = Settings.model_validate(block).speculation
    assert speculation == tuned.chosen
    assert speculation.pace == "auto"


def test_a_model_that_says_nothing_is_refused_in_one_line(tiny_folder: Any) -> None:
    settings = Settings.model_validate({"model": {"path": str(tiny_folder), "threads": 1, "dtype": "float32"}, "cache": {"blocks": 64}})
    with pytest.raises(ValueError, match="too few to measure"):
        tune(settings, [[1, 2, 3]], max_tokens=1)


def test_speeds_of_a_machine_that_is_slow_in_turns_are_compared_turn_by_turn() -> None:
    """Twice and half as fast as the first, in turns of which two are slow; the third plan was held up once."""
    first = [10.0, 100.0, 90.0, 20.0, 110.0]
    speeds = [first, [2 * speed for speed in first], [0.5 * speed / (8 if speed == 90 else 1) for speed in first]]
    found = steady([[Decoded(1000 / speed, tokens=1000) for speed in one] for one in speeds])
    assert found == pytest.approx([90.0, 180.0, 45.0])


def test_rounds_with_a_pace_cost_more() -> None:
    plan = SpeculationSettings(method="single", draft_tokens=4)
    costs = flat(0.001)
    text = text_that_turns((200,))
    plainly, paced = (replay(plan.model_copy(update={"pace": pace}), [text], costs, LAYERS)[2] for pace in ("fixed", "auto"))
    assert (plainly.paced, paced.paced) == (0, paced.rounds)
    before, costs.pace = costs.seconds(paced), 0.01
    assert costs.seconds(paced) == pytest.approx(before + 0.01 * paced.rounds)
    assert costs.seconds(plainly) == pytest.approx(plainly.in_passes)
