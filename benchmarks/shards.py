"""What do shards cost and gain? A model cut over ranks and stages, each a process with one thread, against one process with two.

All write the same text, and take turns. Where guesses are needed they come from a dial: a drafter that knows the text and is right as
often as it is told to, so that stages are measured at a given acceptance whatever the exits of the model at hand are worth.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import ray

from benchmarks import common, prompts
from hispec_ray import LLM, SamplingParams, Settings
from hispec_ray.core.plan import StepPlan
from hispec_ray.shard.member import Facts
from hispec_ray.shard.ray_group import Actor, RayExecutor
from hispec_ray.speculation.drafters import Guess

DRAFTS = 5
BATCH = 4
"""Sequences in the contest of the stages: enough that both always have some."""
ROUNDS_MS = (30, 100)
"""Lengths of rounds for which the share of what lies around is stated."""
LAYERS = 10
"""Of the first of two stages: the check exit's depth of the default model's deployment."""


class Dial:
    """A `Drafter` that knows the texts: each guess is right with probability `acceptance`, by a hash of its place."""

    def __init__(self, texts: Sequence[Sequence[int]], acceptance: float) -> None:
        self._texts = texts
        self._acceptance = acceptance
        self._known: dict[int, list[int]] = {}

    def begin(self, plan: StepPlan) -> None:
        for id in plan.ended:
            self._known.pop(id, None)
        for sequence in plan.sequences:
            if sequence.history is not None:
                self._known[sequence.id] = list(sequence.history)
            known = self._known[sequence.id]
            known += sequence.tokens[len(known) - sequence.start :]

    def committed(self, id: int, tokens: Sequence[int], seconds: Sequence[int]) -> None:
        self._known[id] += tokens

    def propose(self, id: int, tentative: Sequence[int], most: int, least: float, each: float = 0.0) -> list[Guess]:
        known = [*self._known[id], *tentative]
        text = next((text for text in self._texts if list(text[: len(known)]) == known), None)
        if text is None:
            return []
        guesses = []
        for at in range(len(known), min(len(known) + most, len(text))):
            dice = hashlib.blake2b(repr((at, *text[max(0, at - 3) : at])).encode(), digest_size=4).digest()
            right = int.from_bytes(dice, "little") < self._acceptance * 2**32
            guesses.append(Guess(text[at] if right else text[at] ^ 1, 1.0))
        return guesses


class DialledActor(Actor):
    """A member that guesses by the dial."""

    texts: Sequence[Sequence[int]] = ()
    acceptance = 0.0

    def load(self, blocks: int) -> Facts:
        facts = super().load(blocks)
        assert self._shard
        set_dial(self._shard, self.texts, self.acceptance)
        return facts


def set_dial(shard: Any, texts: Sequence[Sequence[int]], acceptance: float) -> None:
    if shard._round is not None:
        shard._round._drafter = Dial(texts, acceptance)


@contextmanager
def dialled(texts: Sequence[Sequence[int]], acceptance: float) -> Iterator[None]:
    """Let groups that are started in the block guess by the dial."""
    known = type("DialledActor", (DialledActor,), {"texts": texts, "acceptance": acceptance})
    RayExecutor.actor = known
    try:
        yield
    finally:
        RayExecutor.actor = Actor


def settings(threads: int, stages: Sequence[Mapping[str, int]] = (), method: str = "plain") -> Settings:
    speculation = {"method": method, "drafter": "lookup", "draft_tokens": DRAFTS, "window": DRAFTS, "pace": "fixed"}
    parallel = {"stages": stages} if stages else None
    model = {"threads": threads, "max_model_len": 1024}
    return Settings.model_validate({"model": model, "speculation": speculation, "parallel": parallel, "cache": {"blocks": 256}})


def ids_of(llm: LLM, count: int) -> list[tuple[int, ...]]:
    return [llm.encode(text) for text in prompts.mixed(count, 1)]


def tokens_per_second(llm: LLM, asked: Sequence[Sequence[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begun = time.perf_counter()
    llm.generate(asked, params)
    return len(asked) * tokens / (time.perf_counter() - begun)


def overhead(llm: LLM, asked: Sequence[int], tokens: int) -> list[float]:
    """Return, for each round of plain decoding, the milliseconds that the engine's step took beyond the shards' own time."""
    engine = llm.engine
    collect: Callable[[], Any] = engine.executor.collect
    inside: list[float] = []

    def watched() -> Any:
        result = collect()
        inside.append(result.timings.end - result.timings.start)
        return result

    engine.executor.collect = watched  # type: ignore[method-assign]
    outside: list[float] = []
    step = engine.step

    def timed() -> Any:
        begun = time.perf_counter()
        deltas = step()
        outside.append(1e3 * (time.perf_counter() - begun - inside[-1]))
        return deltas

    engine.step = timed  # type: ignore[method-assign]
    llm.generate([asked], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    engine.executor.collect, engine.step = collect, step  # type: ignore[method-assign]
    return outside[2:]  # without the prompt's


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0], "shards")
    options.add_argument("--runs", type=int, default=5, help="turns")
    options.add_argument("--tokens", type=int, default=64, help="of each text")
    options.add_argument("--acceptance", type=float, default=0.8, help="of the dial: probability that a guess is right")
    args = options.parse_args()
    runs, tokens = (1, 24) if args.quick else (args.runs, args.tokens)
    threads = args.threads or 2
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")

    one = LLM(settings(threads))
    asked = ids_of(one, BATCH)
    ranks = LLM(settings(1, [{"tp": 2}]))
    outside = overhead(ranks, asked[0], tokens)
    plain = common.alternate(
        runs,
        {
            "one process": partial(tokens_per_second, one, asked[:1], tokens),
            "two ranks": partial(tokens_per_second, ranks, asked[:1], tokens),
        },
    )
    ranks.engine.close()

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    texts = [[*prompt, *done.choices[0].token_ids] for prompt, done in zip(asked, one.generate(asked, params), strict=True)]
    guessing = LLM(settings(threads, method="single"), like=one)
    set_dial(guessing.engine.shard, texts, args.acceptance)
    with dialled(texts, args.acceptance):
        stages = LLM(settings(1, [{"layers": LAYERS}, {"layers": one.engine.source.architecture.layers - LAYERS}], "single"))
    found = [done.choices[0].token_ids for done in stages.generate(asked, params)]
    if found != [text[len(prompt) :] for text, prompt in zip(texts, asked, strict=True)]:
        raise RuntimeError("the stages wrote another text than one process")
    guessed = common.alternate(
        runs,
        {
            "one process": partial(tokens_per_second, guessing, asked, tokens),
            "two stages": partial(tokens_per_second, stages, asked, tokens),
        },
    )
    executor = stages.engine.executor
    assert isinstance(executor, RayExecutor)
    per_token = executor.sent_bytes() / stages.engine.generated
    full = stages.engine.counts[-1]
    stages.engine.close()
    ray.shutdown()

    round_ms = statistics.median(outside)
    rows = [("time around the shards' own, ms a round", round_ms)]
    rows += [(f"its share of a round of {length} ms, %", 100 * round_ms / (length + round_ms)) for length in ROUNDS_MS]
    common.table("One command a round", ("", ""), rows)
    median = {f"{name}, {kind}": statistics.median(v) for kind, all in (("plain", plain), ("guesses", guessed)) for name, v in all.items()}
    common.table("Tokens a second", ("contestant", "tokens/s"), list(median.items()))
    draw(args.out, outside, plain, guessed)
    headline = {
        "round_overhead_ms": round(round_ms, 2),
        "two_ranks_vs_one": round(median["two ranks, plain"] / median["one process, plain"], 3),
        "two_stages_vs_one": round(median["two stages, guesses"] / median["one process, guesses"], 3),
        "bytes_per_token": round(per_token),
    }
    details = {
        "threads_of_one": threads, "batch": BATCH, "acceptance": args.acceptance, "drafts": DRAFTS, "outside_ms": outside,
        "plain": plain, "guessed": guessed, "accepted_of_seen": full.accepted / max(1, full.seen),
    }  # fmt: skip
    common.finish("shards", args.out, headline, details)


def draw(out: Any, outside: Sequence[float], plain: Mapping[str, Sequence[float]], guessed: Mapping[str, Sequence[float]]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.hist(outside, bins=30)
    left.set_xlabel("ms")
    left.set_ylabel("rounds")
    left.set_title("Time around the shards' own, a round", loc="left")
    labels = [*(f"{name}\nplain" for name in plain), *(f"{name}\nguesses, {BATCH} texts" for name in guessed)]
    values = [statistics.median(all) for all in (*plain.values(), *guessed.values())]
    bars = right.barh(labels, values, color=["C0", "C1", "C0", "C2"])
    right.bar_label(bars, fmt="%.0f", padding=2)
    right.invert_yaxis()
    right.set_xlabel("tokens a second")
    right.set_title("One thread a shard against two in one process", loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "shards.png", dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
