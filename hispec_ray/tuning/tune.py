"""`hispec tune`: from a model and prompts to a settings block, a report and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from hispec_ray.config import Settings, SpeculationSettings
from hispec_ray.llm import LLM
from hispec_ray.model.heads import read_card
from hispec_ray.speculation.phrases import load_phrases
from hispec_ray.tuning.costs import ROWS, Costs, measure
from hispec_ray.tuning.planner import GRID, PLAIN, Bench, Plan, against_first, calibrate, describe, families, predict, probes_of, steady
from hispec_ray.tuning.recording import Recording, listen, write_texts
from hispec_ray.tuning.replay import replay

_MOST_DEPTHS = 8
_CALIBRATION_TEXTS = 6
_LEAST_GAIN = 1.02
"""How much faster than plain decoding a plan must run to be taken."""

Tell = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found. agreement[depth]: share of the model's own tokens that the depth says too.

    plans: the best of every shape, fastest first by prediction; checked: those that were run, fastest first, plain decoding among them.
    """

    recordings: list[Recording]
    agreement: dict[int, float]
    costs: Costs
    layers: int
    plans: list[Plan]
    checked: list[Plan]
    chosen: SpeculationSettings

    @property
    def plain(self) -> Plan:
        """Plain decoding, as it was run."""
        return next(plan for plan in self.checked if plan.speculation == PLAIN)

    @property
    def pick(self) -> Plan:
        """What was chosen, as it was run."""
        return next(plan for plan in self.checked if plan.speculation == self.chosen)

    def settings_block(self) -> str:
        """The chosen plan as it stands under `args:` in a deployment file."""
        values = self.chosen.model_dump(exclude_defaults=True, exclude_none=True)
        return yaml.safe_dump({"speculation": {"method": self.chosen.method, **values}}, sort_keys=False)


def tune(
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    checks: int = 4,
    runs: int = 3,
    drafters: Sequence[str] = ("exit", "lookup", "mixed"),
    like: LLM | None = None,
    tell: Tell = lambda what, done, total: None,
) -> Tuning:
    """Measure, predict and check; see the module.

    prompts: token ids; a few thousand tokens of answers are plenty. checks: plans that are run, besides plain decoding.
    like: as `LLM` takes it.
    Raises ValueError where a file of phrases cannot be read, or the model's answers to the prompts are too short to measure anything.
    """
    heads = settings.speculation.exits.heads
    bare = SpeculationSettings.model_validate({"method": "plain", "exits": {"heads": heads}})
    plain = settings.model_copy(update={"speculation": bare, "cache": settings.cache.model_copy(update={"prefix_caching": False})})
    tell("loading the model", 0, 1)
    llm = LLM(plain, like=like)
    architecture = llm.engine.source.architecture
    layers = architecture.layers
    if settings.speculation.phrases:
        load_phrases(settings.speculation.phrases, architecture.vocabulary)
    tell("writing texts", 0, 1)
    recordings = write_texts(llm, prompts, max_tokens, temperature)
    written = sum(len(recording.tokens) - recording.prompt for recording in recordings)
    if written < 2 * len(prompts) or not recordings:
        raise ValueError(f"the model wrote {written} tokens in answer to {len(prompts)} prompts: too few to measure; give other prompts")
    depths = _depths(layers, heads)
    tell("listening at every depth", 0, 1)
    shard = llm.engine.shard
    listen(llm, recordings, depths if heads else range(1, layers), shard.choose)
    agreement = {depth: _share(recordings, depth) for depth in sorted(recordings[0].said) if depth < layers}
    if not heads:
        depths = _promising(agreement, layers)
    tell("timing passes", 0, 1)
    costs = measure(llm, depths, shard.choose, context=statistics.median_low([len(recording.tokens) for recording in recordings]))
    starts = list(families(depths, heads=heads, methods=("single", "hispec"), drafters=drafters, phrases=settings.speculation.phrases))
    tell("timing rounds", 0, 1)
    few = recordings[:_CALIBRATION_TEXTS]
    calibrate(Bench(plain, few, max_tokens, like=llm), few, costs, layers, probes_of(starts), partial(tell, "timing rounds"))
    bench = Bench(plain, recordings, max_tokens, like=llm)
    plans = predict(recordings, costs, layers, starts, lambda done: tell("predicting plans", done, len(starts)))
    best = _varied([plan for plan in plans if plan.speculation.method != "plain"], checks)
    tell("running the best", 0, 1)
    checked = [next(plan for plan in plans if plan.speculation == PLAIN), *best]
    turns = bench.compare([plan.speculation for plan in checked], runs, tell=partial(tell, "running the best"))
    for plan, speed, ratios in zip(checked, steady(turns), against_first(turns), strict=True):
        plan.measured, plan.turns = speed, ratios
    drift = (checked[0].measured or 0.0) / checked[0].predicted  # the machine may be faster or slower than when it was timed
    for plan in plans:
        plan.predicted *= drift
    fastest = max(checked, key=lambda plan: plan.measured or 0.0)
    gain = statistics.median(fastest.turns)
    chosen = fastest.speculation if gain >= _LEAST_GAIN else PLAIN
    checked.sort(key=lambda plan: -(plan.measured or 0.0))
    return Tuning(recordings, agreement, costs, layers, plans, checked, chosen)


def _depths(layers: int, heads: str | None) -> list[int]:
    if heads:
        return [depth for depth in read_card(Path(heads).expanduser()).exits if depth < layers]
    return list(range(1, layers))


def _share(recordings: Iterable[Recording], depth: int) -> float:
    agreed = [right for recording in recordings for right in recording.agreement(depth)]
    return sum(agreed) / len(agreed)


def _promising(agreement: dict[int, float], layers: int) -> list[int]:
    """Depths up to half of the layers, at most so many, that agree more than every shallower one."""
    found: list[int] = []
    for depth, share in agreement.items():
        if depth <= max(1, layers // 2) and (not found or share > agreement[found[-1]] + 0.005):
            found.append(depth)
    while len(found) > _MOST_DEPTHS:  # let those go that add least
        gains = [agreement[found[i]] - agreement[found[i - 1]] for i in range(1, len(found))]
        found.pop(1 + gains.index(min(gains)))
    return found


def _varied(plans: Sequence[Plan], count: int) -> list[Plan]:
    """The best plans, but of one method and drafter at most half of them."""
    taken: list[Plan] = []
    for plan in plans:
        alike = sum((p.speculation.method, p.speculation.drafter) == (plan.speculation.method, plan.speculation.drafter) for p in taken)
        if len(taken) < count and alike < max(1, count // 2):
            taken.append(plan)
    return taken


def draw(tuning: Tuning, path: Path) -> None:
    """Draw agreement by depth, costs by rows, and expected speed over the two windows of the best plan with exits."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  an optional package

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    left.bar(list(tuning.agreement), [100 * share for share in tuning.agreement.values()], color="#4c78a8")
    left.set(title="Agreement with the full depth", xlabel="exit (layers)", ylabel="% of the model's own tokens", ylim=(0, 100))
    layers = tuning.layers
    passes = [tuning.costs.begin + layers * tuning.costs.layer.of(rows) for rows in ROWS]
    middle.plot(ROWS, [1000 * seconds for seconds in passes], marker="o", label=f"all {layers} layers")
    middle.plot(ROWS, [1000 * tuning.costs.heads[layers].of(rows) for rows in ROWS], marker="o", label="the full head")
    middle.set(title="Cost of a pass", xlabel="rows", ylabel="ms", ylim=(0, None))
    middle.legend(frameon=False)
    base = next((plan.speculation for plan in tuning.plans if plan.speculation.method == "hispec"), None)
    if base is not None:
        rows, columns = GRID["draft_tokens"], GRID["window"]
        plain = replay(PLAIN, tuning.recordings, tuning.costs, layers)[0]
        surface = [
            [
                replay(base.model_copy(update={"draft_tokens": d, "window": w}), tuning.recordings, tuning.costs, layers)[0] / plain
                for w in columns
            ]
            for d in rows
        ]
        image = right.imshow(surface, origin="lower", cmap="viridis", aspect="auto")
        for y, line in enumerate(surface):
            for x, value in enumerate(line):
                dark = value < 0.8 * max(map(max, surface))
                right.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
        right.set_xticks(range(len(columns)), [str(w) for w in columns])
        right.set_yticks(range(len(rows)), [str(d) for d in rows])
        exits = f"check exit {base.exits.check}" if base.drafter == "lookup" else f"exits {base.exits.draft} and {base.exits.check}"
        right.set(title=f"Expected speed / plain of the best hierarchy\n({base.drafter}, {exits})", xlabel="window", ylabel="draft_tokens")
        figure.colorbar(image, ax=right)
    gain = statistics.median(tuning.pick.turns)
    figure.suptitle(f"chosen: {describe(tuning.chosen)}, measured {gain:.2f} times plain decoding's speed at batch 1")
    figure.savefig(path, dpi=120)
    plt.close(figure)
