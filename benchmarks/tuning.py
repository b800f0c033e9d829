"""`hispec tune` against the machine: what it expects of plans and what they then make, and its pick against every plan of a small grid.

All plans of the grid, the pick and plain decoding write the same texts beside each other, some hundredths of a second at a time, with the
pace at work.
"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks import common
from benchmarks.methods import data_sets, encoded, plain_settings
from hispec_ray import LLM
from hispec_ray.config import SpeculationSettings
from hispec_ray.tuning.planner import PLAIN, Bench, against_first, describe
from hispec_ray.tuning.replay import replay
from hispec_ray.tuning.tune import tune

DRAFTS, WINDOWS = (2, 4, 8, 12), (8, 16)


def grid(depths: list[int], heads: str | None) -> list[SpeculationSettings]:
    """Plain decoding, and every method and drafter with a few exits and windows."""
    exits = [(None, None), *((depth, None) for depth in depths), *((None, depth) for depth in depths)]
    exits += [(draft, check) for draft, check in product(depths, depths) if draft < check]
    plans = [PLAIN]
    for (draft, check), drafts, window in product(exits, DRAFTS, WINDOWS):
        method, drafter = "hispec" if check else "single", "exit" if draft else "lookup"
        if (method == "single" and window != WINDOWS[0]) or (method == "hispec" and drafts >= window):
            continue
        tree = {"exits": {"draft": draft, "check": check, "heads": heads}, "draft_tokens": drafts, "window": window}
        plans.append(SpeculationSettings.model_validate({"method": method, "drafter": drafter, **tree}))
    return plans


def main() -> None:
    options = common.parser(__doc__ or "", "tuning")
    options.add_argument("--model", default="abacus", help="as model.path")
    options.add_argument("--heads", default=None, help="a file of trained exits")
    options.add_argument("--data", type=Path, default=None, help="a folder of .jsonl files; prompts of this project where not given")
    options.add_argument("--exits", type=int, default=2, help="of those that hispec tune has timed, how many are in the grid (default 2)")
    options.add_argument("--prompts", type=int, default=None, help="to tune on, and to measure on (default 12)")
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--runs", type=int, default=None)
    asked = options.parse_args()
    runs = asked.runs or (2 if asked.quick else 5)
    count = asked.prompts or (6 if asked.quick else 12)
    settings = plain_settings(asked.model, asked.heads, threads=asked.threads)
    sets = data_sets(asked, count)
    llm = LLM(settings)
    each = -(-count // len(sets))
    prompts = [encoded(llm, item, asked.max_tokens) for data in sets for item in data.halves(each)[0]]
    with common.progress() as progress:
        task = progress.add_task("tuning")
        found = tune(
            settings, prompts, max_tokens=asked.max_tokens, runs=runs, like=llm,
            tell=partial(common.tell, progress, task),
        )  # fmt: skip
        timed = sorted(found.costs.runs)
        depths = timed[:: max(1, len(timed) // asked.exits)][: asked.exits]
        plans = [*grid(depths, asked.heads), found.chosen]
        turns = Bench(settings, found.recordings, asked.max_tokens, like=llm).compare(
            plans, runs, tell=partial(common.tell, progress, task, "running the grid")
        )
    against = [statistics.median(ratios) for ratios in against_first(turns)]
    plain = replay(PLAIN, found.recordings, found.costs, found.layers)[0]
    expected = [replay(plan, found.recordings, found.costs, found.layers)[0] / plain for plan in plans]
    rows = [(describe(plan), one, other, one / other) for plan, one, other in zip(plans, expected, against, strict=True)]
    rows[-1] = (f"{rows[-1][0]} (the pick)", *rows[-1][1:])
    order = sorted(rows, key=lambda row: -row[2])
    common.table(
        f"{asked.model}: plans against plain decoding", ("plan", "expected / plain", "measured / plain", "expected / measured"), order
    )
    checked = [(plan.name(), plan.predicted, plan.measured or 0.0, plan.predicted / (plan.measured or 1.0)) for plan in found.checked]
    common.table("plans that hispec tune has checked, tokens/s", ("plan", "expected", "measured", "expected / measured"), checked)
    asked.out.mkdir(parents=True, exist_ok=True)
    figure, panel = plt.subplots(figsize=(5.5, 5), layout="constrained")
    panel.scatter(expected[:-1], against[:-1], color="#4c78a8", label="the grid")
    panel.scatter(expected[-1:], against[-1:], color="#e45756", marker="*", s=120, label="the pick")
    ends = [0.9 * min(*expected, *against), 1.05 * max(*expected, *against)]
    panel.plot(ends, ends, color="black", linewidth=0.8, label="expected = measured")
    panel.set(xlabel="expected speed / plain", ylabel="measured speed / plain", title=f"hispec tune on {asked.model}")
    panel.legend(frameon=False)
    figure.savefig(asked.out / "tuning.png", dpi=120)
    headline = {
        "worst_checked_error": round(max(abs(ratio - 1) for *_, ratio in checked), 3),
        "median_grid_error": round(statistics.median(abs(ratio - 1) for *_, ratio in rows), 3),
        "pick_vs_best_of_grid": round(against[-1] / max(against[:-1]), 3),
        "pick": describe(found.chosen),
    }
    common.finish("tuning", asked.out, headline, {"plans": rows, "checked": checked})


if __name__ == "__main__":
    main()
