"""Does it hold on this machine's GPU? Without a network: parity, exactness, graphs, the memory's roofline, and what guessing gains.

Random weights in the shape of Llama 3 8B: what a pass costs does not depend on what it says, and how often guesses are right is dialled.
With `--tiny` everything runs on a small model, on a CPU too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks import common
from hispec_ray.config import SpeculationSettings
from hispec_ray.core.block_pool import BlockPool
from hispec_ray.core.plan import Rows
from hispec_ray.core.scheduler import Scheduler
from hispec_ray.core.sequence import Sequence as Text
from hispec_ray.model.architecture import Architecture
from hispec_ray.model.layout import layout
from hispec_ray.model.parallel import whole
from hispec_ray.model.torch_decoder import TorchDecoder
from hispec_ray.shard.shard import levels_for, round_for
from hispec_ray.speculation.choice import Choices, choose_torch

SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 128256, "max_position_embeddings": 2048,
    },
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "vocab_size": 300, "max_position_embeddings": 512,
    },
}  # fmt: skip
BLOCK = 16
NEAR_TIE = 0.13
"""Gap of the logits below which two tokens count as tied: two steps of bf16 between 8 and 16."""
HEADS = (16, 128)
"""Sizes of a head at which logits are held against the CPU's: a small one, and that of most models."""
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain"},
    "single": {"method": "single", "draft_tokens": 4, "window": 4},
    "hispec": {"method": "hispec", "draft_tokens": 2, "window": 6},
}


@dataclass
class Machine:
    """Where it runs, and with what."""

    device: torch.device
    dtype: torch.dtype
    architecture: Architecture
    weights: dict[str, torch.Tensor]

    def decoder(self, sequences: int, length: int, choose: Callable[..., Any] = choose_torch, **more: Any) -> TorchDecoder:
        """Return a decoder with a cache for so many sequences of this length."""
        blocks = (sequences + 1) * (length // BLOCK + 3)
        shape: dict[str, Any] = {"positions": min(length + 64, self.architecture.attention_limit), "blocks": blocks, "block_size": BLOCK}
        return TorchDecoder(self.architecture, dict(self.weights), device=self.device, choose=choose, **shape, **more)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Dial:
    """The choice rule's work, and then a text that is known: the full depth says it always, the levels below as often as dialled.

    The full depth too, for in bf16 a batch may choose otherwise at a near-tie, and behind that no guess would be right. All sequences
    of a batch write the same text, so a position is enough to know what comes there.
    """

    def __init__(self, acceptance: float, text: Sequence[int], full: int) -> None:
        """text: with the prompt. full: the depth that says it always."""
        self.acceptance = acceptance
        self.text = text
        self.full = full
        self.depth = 0

    def __call__(self, logits: torch.Tensor, temperatures: Any, seeds: Any, positions: Sequence[int], vocabulary: Any = None) -> Choices:
        real = choose_torch(logits, temperatures, seeds, positions, vocabulary)
        return Choices([self._said(at) for at in positions], real.seconds, real.gaps)

    def _said(self, at: int) -> int:
        if at >= len(self.text):
            return 0
        if self.depth == self.full:
            return self.text[at]
        dice = hashlib.blake2b(repr((self.depth, at)).encode(), digest_size=4).digest()
        right = int.from_bytes(dice, "little") < self.acceptance * 2**32
        return self.text[at] if right else (self.text[at] + 1) % 256


class Watched:
    """A decoder that tells the dial which depth is read."""

    def __init__(self, decoder: TorchDecoder, dial: Dial) -> None:
        self._decoder, self._dial = decoder, dial

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        self._dial.depth = depth
        return self._decoder.logits(depth, hidden)

    def draft(self, depth: int, *others: Any, **more: Any) -> Any:
        self._dial.depth = depth
        return self._decoder.draft(depth, *others, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def random_weights(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, parts in layout(architecture, whole(architecture)).items():
        scale = 1.0 if "embed" in name else parts.shape[-1] ** -0.5
        tensor = torch.randn(parts.shape, generator=generator, dtype=dtype, device=device)
        weights[name] = tensor.mul_(scale) if len(parts.shape) > 1 else tensor.mul_(0.1).add_(1.0)
    return weights


@torch.inference_mode()
def decode(
    machine: Machine, decoder: Any, method: str, prompt: Sequence[int], tokens: int, batch: int, choose: Callable[..., Any]
) -> tuple[list[int], float]:
    """Return what the first of `batch` sequences with the same prompt wrote, and tokens a second without the prompt's reading."""
    layers = machine.architecture.layers
    speculation = SpeculationSettings.model_validate(METHODS[method] | {"pace": "fixed"})
    round_ = round_for(speculation, decoder, layers, choose, None)
    window = levels_for(speculation, layers)[-1].window
    scheduler = Scheduler(BlockPool(decoder.blocks, BLOCK, False), batch, 4096, batch, window)
    texts = [Text(i, str(i), list(prompt), len(prompt) + tokens, 0.0, 0) for i in range(batch)]
    for text in texts:
        scheduler.add(text)
    begun, read = 0.0, 0
    while (plan := scheduler.schedule()) is not None:
        result = round_.run(plan)
        for sequence in result.sequences:
            text = texts[sequence.id]
            kept = sequence.tokens[: text.limit - len(text.tokens)]
            scheduler.update(sequence.id, kept, len(text.tokens) + len(kept) >= text.limit)
        if not begun and all(len(text.tokens) > len(prompt) for text in texts):
            machine.wait()
            begun, read = time.perf_counter(), sum(len(text.tokens) for text in texts)
    machine.wait()
    return texts[0].tokens, (sum(len(text.tokens) for text in texts) - read) / (time.perf_counter() - begun)


@torch.inference_mode()
def parity(machine: Machine, prompt: Sequence[int]) -> float:
    """Return the largest difference of log-probabilities from the CPU's in fp32, along a prompt of small models with heads of each size."""
    differences = []
    for head in HEADS:
        small = Architecture.from_config(LlamaConfig(**SHAPES["tiny"], head_dim=head))
        weights = random_weights(small, torch.float32, torch.device("cpu"))
        found = []
        for device, dtype in ((torch.device("cpu"), torch.float32), (machine.device, machine.dtype)):
            there = Machine(device, dtype, small, {name: tensor.to(device, dtype) for name, tensor in weights.items()})
            decoder = there.decoder(1, 256)
            found.append(logits_along(decoder, [id % small.vocabulary for id in prompt]))
        differences.append(float((found[0] - found[1]).abs().max()))
    return max(differences)


def logits_along(decoder: TorchDecoder, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities `[R, V]` on the CPU behind each token, read in one pass."""
    count = len(tokens)
    places, line = np.arange(count), np.zeros(count, dtype=np.int64)
    tables = np.arange(count // BLOCK + 1)[None, :]
    rows = Rows(np.array(tokens), places, line, tables, places, np.arange(count))
    layers = decoder.architecture.layers
    hidden = decoder.run(0, layers, decoder.embed(rows), rows)
    return decoder.logits(layers, hidden).log_softmax(-1).cpu()


def exactness(machine: Machine, prompt: Sequence[int], plain: Sequence[int], tokens: int) -> tuple[str, float | None]:
    """Hold hispec's text against plain decoding's: "equal", or how far they agree and the gap of the logits where they part."""
    decoder = machine.decoder(1, len(prompt) + tokens)
    found, _ = decode(machine, decoder, "hispec", prompt, tokens, 1, choose_torch)
    if found == list(plain):
        return "equal", None
    at = next(i for i, (one, other) in enumerate(zip(found, plain, strict=True)) if one != other)
    logits = logits_along(machine.decoder(1, len(prompt) + tokens), plain[:at])[-1]
    return f"{at - len(prompt)} of {tokens} tokens equal", abs(float(logits[found[at]] - logits[plain[at]]))


def bandwidth(machine: Machine) -> float:
    """Return bytes a second that the device's memory reads, measured by a sum over far more than its caches hold."""
    size = 1 << (30 if machine.device.type == "cuda" else 25)
    numbers = torch.ones(size, dtype=torch.float32, device=machine.device)
    times = []
    for _ in range(6):
        machine.wait()
        begun = time.perf_counter()
        numbers.sum()
        machine.wait()
        times.append(time.perf_counter() - begun)
    return 4 * size / min(times[1:])


def graphs(machine: Machine, prompt: Sequence[int], tokens: int) -> tuple[float, float]:
    """Return tokens a second of plain decoding with graphs and without."""
    fast = machine.decoder(1, len(prompt) + tokens)
    slow = machine.decoder(1, len(prompt) + tokens)
    slow._graphs = None
    speeds = []
    for decoder in (fast, slow):
        runs = [decode(machine, decoder, "plain", prompt, tokens, 1, choose_torch)[1] for _ in range(3)]
        speeds.append(statistics.median(runs[1:]))  # the first captures
    return speeds[0], speeds[1]


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--tiny", action="store_true", help="a small model, on a CPU too")
    options.add_argument("--tokens", type=int, default=None, help="of each text")
    options.add_argument("--acceptance", type=float, default=0.85, help="of the dial")
    options.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="folder of the table")
    args = options.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not args.tiny:
        raise SystemExit("torch sees no CUDA device here; --tiny runs on a CPU")
    device = torch.device("cuda" if cuda else "cpu")
    if not cuda:
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if cuda else torch.float32
    architecture = Architecture.from_config(LlamaConfig(**SHAPES["tiny" if args.tiny else "8B"]))
    begun = time.perf_counter()
    machine = Machine(device, dtype, architecture, random_weights(architecture, dtype, device))
    tokens = args.tokens or (24 if args.tiny else 128)
    batches = (1, 4) if args.tiny else (1, 2, 4, 8, 16)
    prompt = [3 + (7 * i) % 251 for i in range(64)]

    difference = parity(machine, prompt)
    flash = machine.decoder(1, 64)
    plain, _ = decode(machine, machine.decoder(1, len(prompt) + tokens), "plain", prompt, tokens, 1, choose_torch)
    same, gap = exactness(machine, prompt, plain, tokens)
    graphed, eager = graphs(machine, prompt, tokens)
    weight_bytes = sum(tensor.nbytes for name, tensor in machine.weights.items() if not name.startswith("embed"))
    speed = bandwidth(machine)
    rows: list[tuple[str, Any]] = [
        ("device", torch.cuda.get_device_name() if cuda else "CPU"),
        ("attention", "flash, over the block table" if flash._flash else "gathered"),
        (f"largest difference of log-probabilities from the CPU in fp32, heads of {' and '.join(map(str, HEADS))}", f"{difference:.2g}"),
        ("hispec's text against plain decoding's", same if gap is None else f"{same}, there a gap of {gap:.3g}"),
        ("plain decoding with graphs, without, tokens/s", f"{graphed:.4g}, {eager:.4g}" if flash._graphs else "no graphs here"),
        ("memory's bandwidth, GB/s", f"{speed / 1e9:.4g}"),
        ("plain decoding's share of it", f"{graphed * weight_bytes / speed:.2f}"),
    ]
    results: dict[str, dict[int, float]] = {method: {} for method in METHODS}
    for batch in batches:
        for method in METHODS:
            dial = Dial(args.acceptance, plain, architecture.layers)
            decoder = machine.decoder(batch, len(prompt) + tokens, choose=dial)
            watched = Watched(decoder, dial)
            decode(machine, watched, method, prompt, min(8, tokens), batch, dial)  # captures graphs
            results[method][batch] = decode(machine, watched, method, prompt, tokens, batch, dial)[1]
            del decoder, watched
            if cuda:
                torch.cuda.empty_cache()
    common.table("On this machine", ("", ""), rows)
    title = f"Tokens a second, guesses right with probability {args.acceptance}, against plain"
    table = [
        (batch, *(f"{results[method][batch]:.4g} ({results[method][batch] / results['plain'][batch]:.2f}x)" for method in METHODS))
        for batch in batches
    ]
    common.table(title, ("batch", *METHODS), table)
    write(args.out / "gpu.md", rows, title, table)
    passed = difference < (0.25 if cuda else 1e-3) and (gap is None or gap < NEAR_TIE)
    headline = {
        "passed": passed,
        "roofline_share": round(graphed * weight_bytes / speed, 3),
        "hispec_vs_plain": round(results["hispec"][1] / results["plain"][1], 3),
        "hispec_vs_single": round(results["hispec"][1] / results["single"][1], 3),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(headline))
    raise SystemExit(0 if passed else 1)


def write(path: Path, rows: Sequence[tuple[str, Any]], title: str, table: Sequence[Sequence[Any]]) -> None:
    """Write the tables as Markdown, for docs/gpu.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), "", f"{title}:", ""]
    lines += [f"| batch | {' | '.join(METHODS)} |", "|---|---|---|---|", *(f"| {' | '.join(map(str, line))} |" for line in table)]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
