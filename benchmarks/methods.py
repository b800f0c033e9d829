"""Methods against plain decoding on one engine and the same weights: plans tuned on one half of each data set, run on the other.

Every contestant decodes the same prompts beside the others, some hundredths of a second at a time, whoever has written least going next,
several times over, and is compared by the medians of ratios. Each plan has the pace at work, as it is deployed. A text that differs from
plain decoding's counts as not identical.
A batch is one of a server under load: who ends makes room for the next in the queue, and what counts are the steps in which all places
decode and no prompt is read.
With --deployment nothing is tuned: the plans that deployment files have are held against plain decoding, on the one model that they name.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import common, datasets
from benchmarks.datasets import DataSet, Item
from hispec_ray import LLM, SamplingParams, Settings
from hispec_ray.commands.errors import InputError
from hispec_ray.commands.settings import settings_from
from hispec_ray.config import DEFAULT_MODEL, SpeculationSettings
from hispec_ray.core.plan import LevelCounts
from hispec_ray.model.weights import open_model
from hispec_ray.shard.shard import levels_for
from hispec_ray.tuning.contest import contest, engine_for
from hispec_ray.tuning.planner import PLAIN, describe
from hispec_ray.tuning.tune import Tuning, tune

BATCHES = (1, 4, 16)
TEMPERATURES = (0.0, 0.8)
_QUEUED = 2
"""Prompts of a batch, in its size: half of them wait."""
FAMILIES = (
    ("single", "exit"), ("hispec", "exit"), ("single", "lookup"), ("hispec", "lookup"), ("single", "mixed"), ("hispec", "mixed"),
)  # fmt: skip


@dataclass(slots=True)
class Cell:
    """One method on one data set at one batch size and temperature. tokens, counts: of a whole turn; speeds: see `contest.Decoded`."""

    speeds: list[float] = field(default_factory=list)
    turns: list[list[list[int]]] = field(default_factory=list)  # the answers of each turn
    tokens: int = 0
    counts: list[LevelCounts] = field(default_factory=list)


def contestants(tuning: Tuning) -> dict[str, SpeculationSettings]:
    """Plain decoding and the best plan of every method and drafter, and the best hierarchical one with branches where it has none."""
    found = {"plain": PLAIN}
    for method, drafter in FAMILIES:
        plan = next((p for p in tuning.plans if (p.speculation.method, p.speculation.drafter) == (method, drafter)), None)
        if plan is not None:
            found[label(method, drafter)] = plan.speculation
    hierarchical = [p for p in tuning.plans if p.speculation.method == "hispec"]
    if hierarchical:
        best = hierarchical[0].speculation
        other = {"branches": 0, "branch_below": 0.0} if best.branches else {"branches": 2, "branch_below": 1.0}
        name = f"{label(best.method, best.drafter)}, {'no branches' if best.branches else 'branches'}"
        found[name] = best.model_copy(update=other)
    return found


def label(method: str, drafter: str) -> str:
    return {"exit": method, "lookup": "lookup" if method == "single" else "lookup + check", "mixed": f"{method} + lookup"}[drafter]


def measure(
    plans: Mapping[str, SpeculationSettings],
    settings: Settings,
    reader: LLM,
    items: Sequence[Item],
    batch: int,
    temperature: float,
    max_tokens: int,
    runs: int,
    progress: Progress,
) -> dict[str, Cell]:
    """Let every method decode the items beside the others, `runs` times, after one turn that does not count. reader: has the weights."""
    cells = {name: Cell() for name in plans}
    prompts = [encoded(reader, item, max_tokens) for item in items]
    params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i) for i in range(len(items))]
    longest = max(map(len, prompts)) + max_tokens
    task = progress.add_task(f"batch {batch}, temperature {temperature}", total=(runs + 1) * len(plans) * len(items))
    for turn in range(runs + 1):
        llms = {name: engine_for(settings, plan, batch, longest, reader) for name, plan in plans.items()}
        found = contest(list(llms.values()), prompts, params, lambda count: progress.update(task, advance=count, refresh=True))
        for (name, llm), decoded in zip(llms.items(), found, strict=True):
            cell = cells[name]
            cell.turns.append(decoded.answers)
            cell.tokens = sum(len(answer) - 1 for answer in decoded.answers)
            cell.counts = llm.engine.counts
            if not decoded.tokens:
                raise SystemExit(f"no step had {batch} sequences that went on: give more --prompts or --max-tokens, or smaller --batches")
            if turn:
                cell.speeds.append(decoded.speed)
    progress.remove_task(task)
    return cells


def encoded(llm: LLM, item: Item, max_tokens: int) -> tuple[int, ...]:
    """Return a prompt's ids, in the model's chat template where it has one, with room for the answer."""
    if item.raw or not llm.engine.tokenizer.chat_template:
        ids = llm.encode(item.prompt)
    else:
        ids = llm.encode_chat([{"role": "user", "content": item.prompt}])
    return ids[-(llm.engine.max_model_len - max_tokens) :]


def same_text(cell: Cell, plain: Cell) -> bool:
    """Whether the method wrote plain decoding's tokens in every turn."""
    return all(turn == plain.turns[0] for turn in cell.turns)


def accuracy(llm: LLM, data: DataSet, items: Sequence[Item], answers: Sequence[Sequence[int]]) -> float | None:
    """Return the share of right answers, None where they cannot be checked."""
    right = []
    for item, answer in zip(items, answers, strict=True):
        if item.answer is not None:
            right.append(data.read(llm.engine.tokenizer.decode(list(answer), skip_special_tokens=True)) == item.answer)
    return sum(right) / len(right) if right else None


def draw(results: Mapping[tuple[str, int, float], Mapping[str, Cell]], names: Sequence[str], title: str, path: Path) -> None:
    """Speed against plain: a group of bars for each data set, one panel for each batch size, greedy."""
    batches = sorted({batch for _, batch, _ in results})
    sets = list(dict.fromkeys(name for name, _, _ in results))
    size = (max(9.0, 1.6 * len(sets) + 4), 2.9 * len(batches) + 0.8)
    figure, panels = plt.subplots(len(batches), 1, figsize=size, squeeze=False, layout="constrained")
    colours = plt.get_cmap("tab10")
    others = [name for name in names if name != "plain"]
    for panel, batch in zip(panels[:, 0], batches, strict=True):
        for i, name in enumerate(others):
            heights = [common.median_ratio(results[s, batch, 0.0][name].speeds, results[s, batch, 0.0]["plain"].speeds) for s in sets]
            places = [x + (i - (len(others) - 1) / 2) * 0.8 / len(others) for x in range(len(sets))]
            panel.bar(places, heights, 0.8 / len(others), label=name, color=colours(i))
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(sets)), sets)
        panel.set_ylabel(f"batch {batch}\nspeed / plain")
    panels[0, 0].set_title(title)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside upper center")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _options() -> argparse.Namespace:
    options = common.parser(__doc__ or "", "methods")
    options.add_argument("--model", default=None, help="as model.path (default smollm2-135m-instruct); abacus: on its problems alone")
    options.add_argument("--heads", default=None, help="a file of trained exits")
    options.add_argument(
        "--deployment",
        type=Path,
        action="append",
        default=[],
        help="a deployment file, in place of --model, --heads, --dtype and tuning; given again, the plans of all are compared",
    )
    options.add_argument("--data", type=Path, default=None, help="a folder of .jsonl files; prompts of this project where not given")
    options.add_argument(
        "--prompts",
        type=int,
        default=None,
        help="of each data set, to measure on, or twice a batch where that is more; some others are tuned on (default 16)",
    )
    options.add_argument("--max-tokens", type=int, default=None)
    options.add_argument("--runs", type=int, default=None)
    options.add_argument("--dtype", default=None, help="(default bfloat16)")
    options.add_argument("--batches", type=_numbers(int), default=None, help="batch sizes (default 1,4,16)")
    options.add_argument("--temperatures", type=_numbers(float), default=None, help="(default 0,0.8; --quick: 0)")
    asked = options.parse_args()
    for name in ("prompts", "max_tokens", "runs"):
        if (value := getattr(asked, name)) is not None and value < 1:
            options.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if asked.deployment and (others := [name for name in ("model", "heads", "dtype") if getattr(asked, name)]):
        options.error(f"--deployment says what --{others[0]} would; give one of them")
    if asked.batches and min(asked.batches) < 1:
        options.error(f"--batches is {','.join(map(str, asked.batches))}; each must be at least 1")
    asked.batches = asked.batches or BATCHES
    asked.temperatures = asked.temperatures or (TEMPERATURES[:1] if asked.quick else TEMPERATURES)
    if 0.0 not in asked.temperatures or 1 not in asked.batches:
        options.error("--temperatures must have 0 among them and --batches 1: the figure and the last line are made of those")
    return asked


def main() -> None:
    asked = _options()
    each = asked.prompts or (4 if asked.quick else 16)
    deployed = deployments(asked)
    if deployed:
        settings = settings_for(deployed)
    else:
        settings = plain_settings(asked.model or DEFAULT_MODEL, asked.heads, threads=asked.threads, dtype=asked.dtype or "bfloat16")
    max_tokens = asked.max_tokens or (48 if asked.quick else 200 if settings.model.path == "abacus" else 128)
    runs = asked.runs or (1 if asked.quick else 3)
    asked.model = settings.model.path
    many = max(each, _QUEUED * max(asked.batches))  # of each data set, where there are so many
    sets = data_sets(asked, many)
    exits = PLAIN.exits.model_copy(update={"heads": settings.speculation.exits.heads})
    reader = LLM(settings.model_copy(update={"speculation": PLAIN.model_copy(update={"exits": exits})}))
    halves = {data.name: data.halves(many) for data in sets}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tuning: Tuning | None = None
    with common.progress(*columns) as progress:
        if asked.deployment:
            plans = {"plain": PLAIN, **{name: one.speculation for name, one in deployed.items()}}
        else:
            task = progress.add_task("tuning", total=1)
            of_each = min(each, max(2, 24 // len(sets)))
            tuning = tune(
                settings, [encoded(reader, item, max_tokens) for tuned, _ in halves.values() for item in tuned[:of_each]],
                max_tokens=max_tokens, checks=2 if asked.quick else 4, runs=1 if asked.quick else 3, like=reader,
                tell=partial(common.tell, progress, task),
            )  # fmt: skip
            progress.remove_task(task)
            plans = contestants(tuning)
        results: dict[tuple[str, int, float], dict[str, Cell]] = {}
        for data, batch, temperature in product(sets, asked.batches, asked.temperatures):
            items = halves[data.name][1][: max(each, _QUEUED * batch if batch > 1 else 1)]
            results[data.name, batch, temperature] = measure(plans, settings, reader, items, batch, temperature, max_tokens, runs, progress)
    outcome = Outcome(plans, results)
    found = lines(outcome, sets, {name: half for name, (_, half) in halves.items()}, reader)
    rows = [[shown(line[column]) for column in COLUMNS] for line in found]
    common.table(f"{asked.model}: methods (passes and reads are a token's)", COLUMNS, rows)
    asked.out.mkdir(parents=True, exist_ok=True)
    stem = f"methods-{'-'.join(path.stem for path in asked.deployment) or Path(asked.model).name}"
    markdown = ["| " + " | ".join(row) + " |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    (asked.out / f"{stem}.md").write_text("\n".join(markdown) + "\n")
    draw(results, list(plans), f"{asked.model}: speed against plain decoding, greedy", asked.out / f"{stem}.png")
    for plan in tuning.checked if tuning else ():
        words = f"tuned: {plan.name()}: {plan.predicted:.1f} tokens/s expected, {plan.measured or 0:.1f} measured"
        common.console.print(words, highlight=False)
    for words, name in (("best hierarchical", outcome.best("hispec")), ("fastest", outcome.best())):
        if name is None:
            continue
        common.console.print(f"{words} at batch 1: {name} ({describe(plans[name])})", highlight=False)
    common.finish(stem, asked.out, outcome.headline(), {"rows": found, "agreement": tuning.agreement if tuning else None})


def _numbers(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def numbers(text: str) -> tuple[float, ...]:
        return tuple(kind(part) for part in text.split(","))

    return numbers


def deployments(asked: argparse.Namespace) -> dict[str, Settings]:
    """The deployments that are asked for, by the names of their files."""
    found: dict[str, Settings] = {}
    for path in asked.deployment:
        if path.stem in ("plain", *found):
            raise SystemExit(f"--deployment {path}: its plan would go by the name {path.stem}, as another does; rename the file")
        try:
            found[path.stem] = settings_from(path, {"model.threads": asked.threads})
        except InputError as error:
            raise SystemExit(str(error)) from None
    return found


def settings_for(deployed: Mapping[str, Settings]) -> Settings:
    """The one model that deployments are of, with the trained exits that they share.

    Cache and scheduler are the first one's, without a prefix cache: every turn reads the same prompts.
    """
    (first, settings), *others = deployed.items()
    for name, other in others:
        differ = [field for field, value in settings.model if getattr(other.model, field) != value]
        if differ:
            field = differ[0]
            values = f"{getattr(settings.model, field)!r} in {first} and {getattr(other.model, field)!r} in {name}"
            raise SystemExit(f"--deployment: model.{field} is {values}; plans are compared on one model")
    layers = open_model(settings.model.path).architecture.layers
    heads = {name: one.speculation.exits.heads for name, one in deployed.items() if len(levels_for(one.speculation, layers)) > 1}
    if len(set(heads.values())) > 1:
        raise SystemExit(f"--deployment: speculation.exits.heads is {heads}; plans with exits are compared on the same exits")
    exits = settings.speculation.exits.model_copy(update={"heads": next(iter(heads.values()), None)})
    speculation = settings.speculation.model_copy(update={"exits": exits})
    return settings.model_copy(update={"speculation": speculation, "cache": settings.cache.model_copy(update={"prefix_caching": False})})


def plain_settings(model: str, heads: str | None, **other: object) -> Settings:
    """A model to measure, decoding plainly, without a prefix cache. other: as in `model`."""
    speculation = {"method": "plain", "exits": {"heads": heads}}
    return Settings.model_validate({"model": {"path": model, **other}, "cache": {"prefix_caching": False}, "speculation": speculation})


def data_sets(asked: argparse.Namespace, each: int) -> list[DataSet]:
    if asked.model == "abacus":
        return [datasets.abacus_problems(2 * each)]
    found = datasets.from_folder(asked.data) if asked.data else [datasets.built_in(2 * each)]
    shared = datasets.share_gpt(2 * each)
    found = [*found, shared] if shared else found
    return found[:2] if asked.quick else found


class Outcome:
    """What was measured, and the figures that are made of it."""

    def __init__(self, plans: Mapping[str, SpeculationSettings], results: Mapping[tuple[str, int, float], Mapping[str, Cell]]) -> None:
        self.plans, self.results = plans, results
        self.sets = list(dict.fromkeys(name for name, _, _ in results))

    def ratio(self, name: str, batch: int, data: Sequence[str] | None = None) -> float:
        """Greedy speed against plain decoding: the geometric mean over data sets of the medians."""
        every = self.sets if data is None else data
        cells = [self.results[s, batch, 0.0] for s in every]
        return statistics.geometric_mean(common.median_ratio(c[name].speeds, c["plain"].speeds) for c in cells)

    def best(self, method: str | None = None) -> str | None:
        """The fastest at batch 1, of a method or of all that speculate; None where no plan does."""
        others = [name for name in self.plans if name != "plain"]
        names = [name for name in others if method in (None, self.plans[name].method)]
        return max(names, key=lambda name: self.ratio(name, 1), default=None)

    def headline(self) -> dict[str, object]:
        hierarchical, fastest = self.best("hispec"), self.best()
        most = max(batch for _, batch, _ in self.results)
        same = [same_text(cells[n], cells["plain"]) for cells in self.results.values() for n in self.plans if n != "plain"]
        cells_at_most = [cells for (_, batch, _), cells in self.results.items() if batch == most]
        best = [name for name in (hierarchical, fastest) if name]
        found: dict[str, object] = {}
        if hierarchical:
            found["hispec_vs_plain"] = round(self.ratio(hierarchical, 1), 3)
            if "single" in self.plans:
                found["hispec_vs_single"] = round(self.ratio(hierarchical, 1) / self.ratio("single", 1), 3)
        if fastest:
            found["fastest_vs_plain"] = round(self.ratio(fastest, 1), 3)
            at_most = [common.median_ratio(cells[name].speeds, cells["plain"].speeds) for cells in cells_at_most for name in best]
            found[f"batch{most}_vs_plain"] = round(min(at_most), 3)
            found["worst_data_set"] = round(min(self.ratio(fastest, 1, [s]) for s in self.sets), 3)
        return {**found, "identical": f"{sum(same)}/{len(same)}"}


COLUMNS = ("data", "batch", "T", "method", "tokens/s", "/ plain", "full passes", "layer passes", "head reads", "right", "same text")


def lines(outcome: Outcome, sets: Sequence[DataSet], measured: Mapping[str, list[Item]], reader: LLM) -> list[dict[str, object]]:
    """One line for each method on each data set at each batch size and temperature."""
    found: list[dict[str, object]] = []
    layers = reader.engine.source.architecture.layers
    for (name, batch, temperature), cells in outcome.results.items():
        data = next(d for d in sets if d.name == name)
        for method, cell in cells.items():
            levels = {}
            for level, c in zip(reversed(levels_for(outcome.plans[method], layers)), reversed(cell.counts), strict=False):
                places = [a / b for a, b in zip(c.accepted_at, c.seen_at, strict=True) if b]
                levels[level.name] = {"accepted": c.accepted / c.seen if c.seen else None, "by_place": places}
            found.append(
                {
                    "data": name,
                    "batch": batch,
                    "T": temperature,
                    "method": method,
                    "tokens/s": statistics.median(cell.speeds),
                    "/ plain": common.median_ratio(cell.speeds, cells["plain"].speeds),
                    "full passes": cell.counts[-1].passes / cell.tokens,
                    "layer passes": sum(c.layers for c in cell.counts) / cell.tokens,
                    "head reads": sum(c.passes for c in cell.counts) / cell.tokens,
                    "right": accuracy(reader, data, measured[name][: len(cell.turns[-1])], cell.turns[-1]),
                    "same text": same_text(cell, cells["plain"]),
                    "plan": describe(outcome.plans[method]),
                    "levels": levels,
                }
            )
    return found


def shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "NO"
        case float():
            return f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    main()
