"""How fast is plain decoding, and where does its time go? SmolLM2-135M, bf16, against transformers on the same weights.

Every figure is a median of ratios taken in alternation in this one process; the served path is measured against an engine of the
same settings, turn by turn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import common, prompts, server
from hispec_ray import LLM, SamplingParams
from hispec_ray.core.plan import Rows

CONTEXTS = (64, 256, 512)
ROWS = (1, 2, 4, 5, 6, 8, 12, 16, 32)
_FRESH = itertools.count(1000)  # first tokens of prompts that no earlier prompt shares


def text_ids(llm: LLM, count: int) -> tuple[int, ...]:
    """Return `count` token ids of ordinary text."""
    return llm.encode("\n".join(prompts.mixed(60)))[:count]


def forward(llm: LLM, ids: tuple[int, ...], start: int, count: int) -> Callable[[], torch.Tensor]:
    """Return a call that runs rows start .. start + count through all layers and the head, on blocks 0, 1, 2 ..."""
    decoder = llm.engine.shard.decoder
    layers = llm.engine.source.architecture.layers
    positions = np.arange(start, start + count)
    rows = Rows(np.array(ids[start : start + count]), positions, np.zeros(count, np.int64), np.arange(decoder.blocks)[None], positions,
                np.arange(count))  # fmt: skip

    def call() -> torch.Tensor:
        return decoder.logits(layers, decoder.run(0, layers, decoder.embed(rows), rows))

    return call


class Peer:
    """transformers on the same weights: `generate` with its static choices, and one forward pass."""

    def __init__(self, llm: LLM, dtype: torch.dtype) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(llm.engine.source.folder, dtype=dtype).eval()

    @torch.inference_mode()
    def seconds_per_token(self, ids: tuple[int, ...], tokens: int) -> float:
        batch = torch.tensor([ids])
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(batch)}
        first = common.seconds(lambda: self.model.generate(batch, max_new_tokens=1, min_new_tokens=1, **options))
        whole = common.seconds(lambda: self.model.generate(batch, max_new_tokens=tokens + 1, min_new_tokens=tokens + 1, **options))
        return (whole - first) / tokens

    @torch.inference_mode()
    def prefill(self, ids: tuple[int, ...]) -> float:
        batch = torch.tensor([ids])
        return common.seconds(lambda: self.model(batch, use_cache=True, logits_to_keep=1))


def plain_seconds_per_token(llm: LLM, ids: tuple[int, ...], tokens: int) -> float:
    """Seconds a token of plain decoding after the first, at batch 1."""
    stream = llm.stream(ids, SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True))
    next(stream)
    start = time.perf_counter()
    for _ in stream:
        pass
    return (time.perf_counter() - start) / tokens


def batch_tokens_per_second(llm: LLM, ids: tuple[int, ...], batch: int, tokens: int) -> float:
    """Tokens a second over `batch` equal-length prompts, from the step that finds them all prefilled."""
    llm.generate([[*ids, 1000 + i] for i in range(batch)], SamplingParams(temperature=0, max_tokens=1))  # fills the prefix cache
    start = time.perf_counter()
    llm.generate([[*ids, 1000 + i] for i in range(batch)], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return batch * tokens / (time.perf_counter() - start)


def outside_model(llm: LLM, ids: tuple[int, ...], tokens: int) -> float:
    """Share of plain steps spent outside the decoder's own calls: scheduler, plan, choice, detokenising, Python between them."""
    decoder: Any = llm.engine.shard.decoder
    inside = 0.0

    def timed(name: str) -> Callable[..., Any]:
        method = getattr(type(decoder), name)

        @functools.wraps(method)
        def call(*arguments: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            result = method(decoder, *arguments)
            inside += time.perf_counter() - start
            return result

        return call

    names = ("embed", "run", "logits")
    for name in names:
        setattr(decoder, name, timed(name))
    stream = llm.stream(ids, SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True))
    next(stream)
    inside = 0.0
    whole = common.seconds(lambda: list(stream))
    for name in names:
        delattr(decoder, name)
    return (whole - inside) / whole


def bandwidth() -> float:
    """Bytes a second that all threads read from memory together: the sum of half a gigabyte, best of seven."""
    block = torch.ones(2**27)
    return block.nbytes / min(common.seconds(block.sum) for _ in range(7))


def arithmetic() -> float:
    """Multiplications and additions a second that all threads do together: an fp32 product of two matrices, best of seven."""
    a, b = torch.randn(2, 1024, 1024)
    return 2 * 1024**3 / min(common.seconds(lambda: a @ b) for _ in range(7))


def held_bytes(llm: LLM, batch: int) -> int:
    """Bytes of hidden rows that wait between segments at most, counted over a run of `batch` sequences."""
    engine = llm.engine
    llm.generate([[*text_ids(llm, 40 + i)] for i in range(batch)], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    return engine.shard.peak_held_bytes


def served_seconds_per_token(url: str, ids: tuple[int, ...], tokens: int) -> float:
    """Seconds a token between the first and the last event of a streamed completion."""
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": list(ids),
        "max_tokens": tokens + 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    first = last = 0.0
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
                event = json.loads(line[6:])
    completion = event["usage"]["completion_tokens"]
    if completion != tokens + 1:
        raise RuntimeError(f"asked for {tokens + 1} tokens, the server counted {completion}")
    return (last - first) / tokens


def against_transformers(llm: LLM, peer: Peer, ids: tuple[int, ...], contexts: Sequence[int], runs: int, tokens: int) -> list[list[float]]:
    """Return context, tokens a second of transformers and of ours, and their ratio, a line for each context."""
    lines = []
    for context in contexts:
        prompt = ids[:context]
        contestants = {
            "peer": functools.partial(peer.seconds_per_token, prompt, tokens // 2),
            "ours": functools.partial(plain_seconds_per_token, llm, prompt, tokens),
        }
        turns = common.alternate(runs, contestants)
        speeds = (1 / statistics.median(turns[name]) for name in ("peer", "ours"))
        lines.append([context, *speeds, common.median_ratio(turns["peer"], turns["ours"])])
    common.table("Plain decoding, batch 1, tokens a second", ("context", "transformers", "hispec_ray", "ratio"), lines)
    return lines


def passes_by_rows(llm: LLM, ids: tuple[int, ...], counts: Sequence[int], runs: int) -> tuple[dict[int, float], float]:
    """Return seconds of a pass by its rows, at context 300, and what eight rows cost of one."""
    for start in range(0, 576, 64):  # fill the cache that the passes read
        forward(llm, ids, start, 64 if start < 512 else 32)()
    turns = common.alternate(runs, {str(n): functools.partial(common.seconds, forward(llm, ids, 300, n)) for n in counts})
    passes = {n: statistics.median(turns[str(n)]) for n in counts}
    lines = [(n, 1e3 * t, t / passes[1]) for n, t in passes.items()]
    common.table("One pass at context 300, by rows", ("rows", "ms", "of one row"), lines)
    return passes, common.median_ratio(turns["8"], turns["1"])


def batch16(llm: LLM, ids: tuple[int, ...], runs: int, tokens: int) -> tuple[dict[str, float], float]:
    """Return tokens a second at batch 1 and 16 and their ratio."""
    contestants = {str(n): functools.partial(batch_tokens_per_second, llm, ids[:64], n, tokens) for n in (1, 16)}
    turns = common.alternate(runs, contestants)
    return {name: statistics.median(figures) for name, figures in turns.items()}, common.median_ratio(turns["16"], turns["1"])


def prefill_512(llm: LLM, peers: dict[str, Peer], ids: tuple[int, ...], runs: int) -> dict[str, float]:
    """Return seconds to read 512 prompt tokens and choose the next: ours through the engine, past the prefix cache."""
    contestants: dict[str, Callable[[], float]] = {name: functools.partial(peer.prefill, ids[:512]) for name, peer in peers.items()}
    contestants["hispec_ray bf16"] = lambda: common.seconds(
        lambda: llm.generate([[next(_FRESH), *ids[:511]]], SamplingParams(temperature=0, max_tokens=1))
    )
    turns = common.alternate(runs, contestants)
    medians = {name: statistics.median(figures) for name, figures in turns.items()}
    common.table("Prefill of 512 tokens", ("contestant", "s"), list(medians.items()))
    return medians


def memory_overhead(threads: int | None) -> tuple[dict[int, int], int]:
    """Return bytes of waiting hidden rows by batch, and of weights and cache, where every window is filled."""
    llm = LLM({"model": {"threads": threads}, "speculation": {"pace": "fixed"}})
    shard = llm.engine.shard
    total = shard.weight_bytes + shard.cache_bytes
    held = {batch: held_bytes(llm, batch) for batch in (1, 16)}
    lines = [(n, b, f"{100 * b / total:.4f}") for n, b in held.items()]
    common.table("Hidden rows that the hierarchy keeps", ("sequences", "bytes", "% of weights and cache"), lines)
    return held, total


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0], "decode")
    options.add_argument("--runs", type=int, default=7, help="turns of each alternation")
    options.add_argument("--no-server", action="store_true", help="leave the served path out")
    args = options.parse_args()
    runs, tokens = (2, 12) if args.quick else (args.runs, 48)
    llm = LLM({"model": {"threads": args.threads}, "speculation": {"method": "plain"}, "cache": {"blocks": 2048}})
    ids = text_ids(llm, 600)
    peers = {"transformers bf16": Peer(llm, torch.bfloat16)}
    details: dict[str, Any] = {"threads": llm.settings.model.thread_count()}

    lines = against_transformers(llm, peers["transformers bf16"], ids, CONTEXTS[:1] if args.quick else CONTEXTS, runs, tokens)
    passes, rows8 = passes_by_rows(llm, ids, (1, 8) if args.quick else ROWS, 3 * runs)
    outside = statistics.median(outside_model(llm, ids[:200], tokens) for _ in range(runs))
    speeds, batch_ratio = batch16(llm, ids, runs, tokens)
    if not args.quick:
        peers["transformers fp32"] = Peer(llm, torch.float32)
        details["prefill_512_s"] = prefill_512(llm, peers, ids, min(runs, 3))
    del peers
    shard, a = llm.engine.shard, llm.engine.source.architecture
    read = shard.weight_bytes + 300 * 2 * a.layers * a.kv_heads * a.head_dim * 2
    memory, roof = bandwidth(), arithmetic()
    parameters = shard.weight_bytes / 2
    most = max(passes)
    common.table(
        "What the machine can do, and what a pass reaches",
        ("", "measured", "reached"),
        [
            ("memory, GB/s (one row)", memory / 1e9, read / passes[1] / 1e9),
            (f"arithmetic, GFLOP/s ({most} rows)", roof / 1e9, 2 * parameters * most / passes[most] / 1e9),
        ],
    )
    served = None if args.no_server else served_cost(args, llm, ids, runs, tokens)
    held, total = memory_overhead(args.threads)
    details |= {
        "against_transformers": lines,
        "pass_ms": {n: 1e3 * t for n, t in passes.items()},
        "batch_tokens_per_second": speeds,
        "bandwidth_gb_s": {"measured": memory / 1e9, "reached": read / passes[1] / 1e9},
        "gflop_s": {"measured": roof / 1e9, "reached": 2 * parameters * most / passes[most] / 1e9},
        "held_bytes": held,
        "weights_and_cache_bytes": total,
    }
    headline = {
        "plain_vs_transformers": round(min(line[3] for line in lines), 3),
        "rows8_vs_rows1": round(rows8, 3),
        "outside_model": round(outside, 4),
        "batch16_vs_batch1": round(batch_ratio, 3),
        "bandwidth_share": round(read / passes[1] / memory, 3),
        "served_ms_per_token": None if served is None else round(served, 3),
        "memory_overhead": held[1] / total,
    }
    draw(args.out, details, headline)
    common.finish("decode", args.out, headline, details)


def served_cost(args: argparse.Namespace, llm: LLM, ids: tuple[int, ...], runs: int, tokens: int) -> float:
    """Milliseconds a token that HTTP, the proxy, the ingress and the coordinator add at batch 1."""
    plain = server.settings({"model": {"threads": args.threads}, "speculation": {"method": "plain"}})
    with server.running({"/": plain}) as served:
        turns = common.alternate(runs, {
            "served": lambda: served_seconds_per_token(served.url, ids[:64], 2 * tokens),
            "offline": lambda: plain_seconds_per_token(llm, ids[:64], 2 * tokens),
        })  # fmt: skip
    common.table("Batch 1, ms a token", ("path", "median"), [(name, 1e3 * statistics.median(figures)) for name, figures in turns.items()])
    return 1e3 * statistics.median(a - b for a, b in zip(turns["served"], turns["offline"], strict=True))


def draw(out: Path, details: dict[str, Any], headline: dict[str, Any]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    contexts = [str(row[0]) for row in details["against_transformers"]]
    for offset, (column, name) in enumerate(((1, "transformers generate"), (2, "hispec_ray, plain"))):
        values = [row[column] for row in details["against_transformers"]]
        bars = left.bar([i + 0.4 * offset for i in range(len(contexts))], values, width=0.38, label=name)
        left.bar_label(bars, fmt="%.0f")
    left.set_xticks([i + 0.2 for i in range(len(contexts))], contexts)
    left.set_xlabel("tokens of context")
    left.set_ylabel("tokens a second")
    left.set_title(f"Batch 1, bf16, {details['threads']} threads", loc="left")
    left.set_ylim(top=1.3 * max(max(row[1:3]) for row in details["against_transformers"]))
    left.legend(frameon=False, loc="upper left")
    rows = list(details["pass_ms"])
    right.plot(rows, [details["pass_ms"][n] for n in rows], marker="o")
    right.set_ylim(bottom=0)
    right.set_xlabel("rows in a pass")
    right.set_ylabel("ms")
    right.set_title(f"A pass by its rows: 8 cost {headline['rows8_vs_rows1']:.2f} of one", loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "decode.png", dpi=120)


if __name__ == "__main__":
    main()
