"""Does speculation write what plain decoding writes? Token by token, over prompts, precisions, temperatures, exits and windows.

Each setting meets every prompt once, in one of four conditions that rotate over the settings: alone; in a batch of 16; in a
batch with so few cache blocks that sequences are preempted; and once its prompt has been read before, so that it is found in
the prefix cache. The reference is one run of plain decoding of all prompts; plain is among the settings too. A run that differs
is examined: where the two choices that part are closer than a near-tie's gap it is named so. On a CPU it fails all the same.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import common, prompts
from hispec_ray import LLM, SamplingParams, Settings
from hispec_ray.config import SpeculationSettings
from hispec_ray.core.plan import Rows
from hispec_ray.speculation.choice import gumbel
from hispec_ray.tuning.planner import PLAIN, describe

CONDITIONS = ("alone", "batch", "preempted", "cached")


def plan(
    method: str, draft: int | None = None, check: int | None = None, draft_tokens: int = 2, window: int = 4, **others: object
) -> SpeculationSettings:
    """Settings that always guess as far as they may: the pace would stop what does not pay."""
    exits = {"draft": draft, "check": check}
    tokens = {"draft_tokens": draft_tokens, "window": window}
    return SpeculationSettings.model_validate({"method": method, "exits": exits, **tokens, "pace": "fixed", **others})


SETTINGS = (
    plan("hispec", 3, 7, 2, 4),
    plan("hispec", 30, 30, 2, 4),
    plan("hispec", 24, 28, 4, 6, drafter="mixed", lookup_confidence=0.2, stop_below=0.5, branch_below=2.0, branches=3),
    plan("single", 27, None, 3),
    plan("single", drafter="lookup", draft_tokens=6, lookup_confidence=0.1),
    plan("hispec", 20, 26, 3, 4),
    plan("hispec", 1, 2, 1, 2),
    plan("hispec", None, 24, 3, 6, drafter="lookup", lookup_confidence=0.1, branch_below=1.0, branches=2),
    plan("hispec", 28, 29, 4, 8, branch_below=1.0, branches=1),
    plan("hispec", 8, 20, 2, 3, drafter="mixed", pace="auto"),
    plan("hispec", None, 20, 3, 8, drafter="lookup", pace="auto"),
    plan("single", 6, None, 1),
    plan("plain"),
)
SEED = 11
LONGEST, LONGEST_QUICK = 160, 64  # prompt tokens; with longer ones the preempted runs would do little but read prompts again
NEAR_TIE = 1e-3  # of the scores (logits over temperature, with the noise)


@dataclass
class Tally:
    """What came of the runs of one precision."""

    runs: int = 0
    identical: int = 0
    near_ties: int = 0
    preemptions: int = 0
    cached_rows: int = 0
    acceptance: dict[str, float] = field(default_factory=dict)


def settings_of(dtype: str, threads: int | None, speculation: SpeculationSettings, blocks: int) -> Settings:
    model = {"dtype": dtype, "threads": threads}
    return Settings.model_validate({"model": model, "speculation": speculation.model_dump(), "cache": {"blocks": blocks}})


def params_for(count: int, tokens: int, temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=SEED + i, max_tokens=tokens, ignore_eos=True) for i in range(count)]


def gap_at(dtype: str, threads: int | None, known: list[int], params: SamplingParams) -> float:
    """Return the distance of the two best scores for the token after `known`, from a model of its own: its cache is nobody else's."""
    engine = LLM(settings_of(dtype, threads, PLAIN, 1024)).engine
    decoder, layers = engine.shard.decoder, engine.source.architecture.layers
    positions = np.arange(len(known))
    rows = Rows(np.array(known), positions, np.zeros(len(known), dtype=np.int64), np.arange(decoder.blocks)[None], positions, positions)
    scores = decoder.logits(layers, decoder.run(0, layers, decoder.embed(rows), rows)[-1:])
    if params.temperature:
        assert params.seed is not None
        scores = scores / params.temperature + gumbel([params.seed], [len(known)], scores.shape[1])
    best = scores[0].topk(2).values
    return float(best[0] - best[1])


def compare(
    tally: Tally,
    llm: LLM,
    expected: list[list[int]],
    done: list[tuple[int, list[int]]],
    prompt_ids: list[tuple[int, ...]],
    params: list[SamplingParams],
) -> None:
    for index, tokens in done:
        tally.runs += 1
        if tokens == expected[index]:
            tally.identical += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(tokens, expected[index], strict=True)) if a != b)
        model = llm.settings.model
        gap = gap_at(model.dtype, model.threads, [*prompt_ids[index], *expected[index][:at]], params[index])
        tally.near_ties += gap < NEAR_TIE
        common.console.print(f"prompt {index} differs at token {at}: gap {gap:.2e}")


def run_condition(llm: LLM, condition: str, texts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[list[int]]:
    """Return token ids for the prompts, run as the condition says."""
    if condition == "alone":
        return [llm.generate([ids], [p])[0].choices[0].token_ids for ids, p in zip(texts, params, strict=True)]
    if condition == "cached":
        llm.generate(texts, [SamplingParams(temperature=0, max_tokens=1)] * len(texts))
    return [completion.choices[0].token_ids for completion in llm.generate(texts, params)]


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0], "exactness")
    options.add_argument("--prompts", type=int, default=100)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument(
        "--alone", type=int, default=10, help="prompts a setting runs one by one; the rest are shared by the other conditions"
    )
    options.add_argument("--settings", type=int, default=len(SETTINGS), help="how many of the settings, from the first")
    options.add_argument("--data", type=Path, default=None, help="folder of .jsonl prompts (default: prompts written by the benchmark)")
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = options.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.alone = 10, 12, 1
    chosen = (SETTINGS[0], SETTINGS[2]) if args.quick else SETTINGS[: args.settings]
    tallies: dict[str, Tally] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=common.console
    ) as progress:
        bar = progress.add_task("runs", total=2 * len(args.dtypes) * (len(chosen) + 1) * args.prompts)
        for dtype in args.dtypes:
            tallies[dtype] = measure(
                args, dtype, chosen, lambda n: progress.advance(bar, n), lambda text: progress.update(bar, description=text)
            )
    report(args.out, tallies, chosen, quick=args.quick)


def measure(
    args: argparse.Namespace,
    dtype: str,
    chosen: tuple[SpeculationSettings, ...],
    advance: Callable[[int], None],
    announce: Callable[[str], None],
) -> Tally:
    tally = Tally()
    accepted: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    plain = LLM(settings_of(dtype, args.threads, PLAIN, 1024))
    texts = prompts.from_folder(args.data, args.prompts) if args.data else prompts.mixed(args.prompts)
    ids = [plain.encode(text)[: LONGEST_QUICK if args.quick else LONGEST] for text in texts]
    expected: dict[float, list[list[int]]] = {}
    for temperature in (0.0, 0.8):
        announce(f"{dtype} plain T={temperature}")
        each = params_for(len(ids), args.tokens, temperature)
        expected[temperature] = [completion.choices[0].token_ids for completion in plain.generate(ids, each)]
        advance(len(ids))
    needs = sorted(-(-(len(prompt) + args.tokens) // 16) for prompt in ids)
    together = min(16, (len(ids) - args.alone) // 3)
    scarce = max(needs[-1], sum(needs) * together // len(needs) * 3 // 5)  # of what the preempted condition's prompts take on average
    for number, method in enumerate(chosen):
        name = describe(method)
        llms = {blocks: LLM(settings_of(dtype, args.threads, method, blocks), like=plain) for blocks in (1024, scarce)}
        for temperature in (0.0, 0.8):
            announce(f"{dtype} {name} T={temperature}")
            before = tally.runs, tally.identical
            each = params_for(len(ids), args.tokens, temperature)
            order = [(i + number * 7) % len(ids) for i in range(len(ids))]
            share = (len(ids) - args.alone) // 3
            groups = (order[: args.alone], *(order[args.alone + share * k : args.alone + share * (k + 1)] for k in range(2)))
            groups = (*groups, order[args.alone + 2 * share :])
            for condition, group in zip(CONDITIONS, groups, strict=True):
                llm = llms[scarce if condition == "preempted" else 1024]
                done = run_condition(llm, condition, [ids[i] for i in group], [each[i] for i in group])
                compare(tally, llm, expected[temperature], list(zip(group, done, strict=True)), ids, each)
                llm.engine.scheduler.check_integrity()
                advance(len(group))
            runs, identical = tally.runs - before[0], tally.identical - before[1]
            common.console.print(f"{dtype}, {name}, temperature {temperature}: {identical} of {runs} runs identical")
        tally.preemptions += llms[scarce].engine.scheduler.preemptions
        for llm in llms.values():
            tally.cached_rows += llm.engine.scheduler.cached_rows
            for level, counts in zip(llm.engine.levels, llm.engine.counts, strict=True):
                accepted[f"{name}: {level}"] += counts.accepted
                seen[f"{name}: {level}"] += counts.seen
    tally.acceptance = {key: accepted[key] / seen[key] for key in seen if seen[key]}
    return tally


def report(out: Path, tallies: dict[str, Tally], chosen: tuple[SpeculationSettings, ...], *, quick: bool) -> None:
    common.table(
        "Token ids against plain decoding",
        ("precision", "runs", "identical", "near-ties", "preemptions", "rows from the prefix cache"),
        [(name, t.runs, t.identical, t.near_ties, t.preemptions, t.cached_rows) for name, t in tallies.items()],
    )
    figure, axes = plt.subplots(figsize=(9, 0.42 * sum(2 if c.method == "hispec" else 1 for c in chosen) + 1.6), layout="constrained")
    names = list(next(iter(tallies.values())).acceptance)
    for offset, (dtype, tally) in enumerate(tallies.items()):
        places = [i + (0.76 * offset + 0.38) / len(tallies) for i in range(len(names))]
        label = f"{dtype}: {tally.identical} of {tally.runs} runs identical"
        axes.barh(places, [100 * tally.acceptance[n] for n in names], height=0.72 / len(tallies), label=label)
    axes.set_yticks([i + 0.38 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("tentative tokens that the level keeps, %")
    figure.suptitle(
        "The text is plain decoding's at any acceptance\n(method, guesser, exits, draft tokens / window: who looks)", fontsize=11
    )
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "exactness.png", dpi=120)
    runs, identical, near = (sum(getattr(t, key) for t in tallies.values()) for key in ("runs", "identical", "near_ties"))
    details = {name: vars(tally) for name, tally in tallies.items()}
    common.finish("exactness", out, {"runs": runs, "identical": identical, "near_ties": near}, details)
    # the few short prompts of a quick run never crowd each other out
    if identical < runs or not all((t.preemptions or quick) and t.cached_rows for t in tallies.values()):
        sys.exit("the text differed, or nothing was preempted or found in the prefix cache")


if __name__ == "__main__":
    main()
