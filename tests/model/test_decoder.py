"""Promises of the decoders: transformers' numbers, and a row that is the same to the bit whatever runs beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES, make_checkpoint
from transformers import AutoModelForCausalLM

from hispec_ray.core.plan import Rows
from hispec_ray.model.decoder import Decoder
from hispec_ray.model.native_decoder import NativeDecoder
from hispec_ray.model.torch_decoder import TorchDecoder
from hispec_ray.model.weights import ModelSource, open_model

SIZE = 16
BLOCKS = 128

Part = tuple["Text", int, int]
"""A text and the positions [from, to) of it that are to be run."""


@dataclass
class Text:
    """Tokens and the blocks that hold them."""

    tokens: list[int]
    table: list[int]

    @classmethod
    def random(cls, length: int, vocabulary: int, seed: int, table: Sequence[int] | None = None) -> Text:
        rng = random.Random(seed)
        tokens = [rng.randrange(vocabulary) for _ in range(length)]
        return cls(tokens, list(table or rng.sample(range(BLOCKS), -(-length // SIZE))))


def rows_of(parts: Sequence[Part]) -> Rows:
    """The rows of one pass over several texts, in this order."""
    nowhere = BLOCKS * 1000  # past the last block of a table: never to be read
    tables = np.full((len(parts), max(len(text.table) for text, _, _ in parts)), nowhere, dtype=np.int64)
    tokens, positions, lines = [], [], []
    for line, (text, begin, end) in enumerate(parts):
        tables[line, : len(text.table)] = text.table
        tokens += text.tokens[begin:end]
        positions += range(begin, end)
        lines += [line] * (end - begin)
    position, line_of = np.array(positions, dtype=np.int64), np.array(lines, dtype=np.int64)
    slots = tables[line_of, position // SIZE] * SIZE + position % SIZE
    return Rows(np.array(tokens, dtype=np.int64), position, line_of, tables, slots, np.arange(len(tokens), dtype=np.int64))


@torch.inference_mode()
def run(decoder: Decoder, parts: Sequence[Part], *depths: int) -> list[torch.Tensor]:
    """Run one pass in segments that end at `depths`; return the hidden rows at each, then the last one's logits."""
    rows = rows_of(parts)
    hidden = decoder.embed(rows)
    found = []
    for first, last in itertools.pairwise((0, *depths)):
        hidden = decoder.run(first, last, hidden, rows)
        found.append(hidden.clone())
    return [*found, decoder.logits(depths[-1], hidden)]


def native(source: ModelSource, dtype: torch.dtype = torch.float32, threads: int = 1) -> NativeDecoder:
    positions = min(1024, source.architecture.attention_limit)
    return NativeDecoder(source.architecture, source.weights(dtype), positions=positions, blocks=BLOCKS, block_size=SIZE, threads=threads)


def plain_torch(source: ModelSource, dtype: torch.dtype = torch.float32, threads: int = 1) -> TorchDecoder:
    torch.set_num_threads(threads)
    positions = min(1024, source.architecture.attention_limit)
    device = torch.device("cpu")
    return TorchDecoder(source.architecture, source.weights(dtype), positions=positions, blocks=BLOCKS, block_size=SIZE, device=device)


Build = Callable[..., Decoder]
DECODERS = pytest.mark.parametrize("build", [native, plain_torch])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@torch.inference_mode()
def reference(source: ModelSource, tokens: list[int]) -> torch.Tensor:
    """transformers' logits, fp32 `[len(tokens), vocabulary]`."""
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    return model(torch.tensor([tokens])).logits[0]


def in_passes(decoder: Decoder, text: Text, cuts: Sequence[int]) -> torch.Tensor:
    """The logits of a whole text that is run up to each cut in turn, every pass in two segments."""
    depth = decoder.architecture.layers
    return torch.cat([run(decoder, [(text, begin, end)], depth // 2, depth)[-1] for begin, end in itertools.pairwise((0, *cuts))])


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "linear rope": ("llama2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn rope": (
        "llama2",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "attention and mlp biases": ("llama2", {"attention_bias": True, "mlp_bias": True}),
    "odd sizes": (
        "llama3",
        {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 58},
    ),
}


@DECODERS
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, build: Build, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    source = open_model(str(make_checkpoint(tmp_path, family, **overrides)))
    length = min(400, source.architecture.max_positions)
    text = Text.random(length, source.architecture.vocabulary, seed=1)
    cuts = [37, 101, 256 - 23, *range(256 - 22, 256), length] if length > 256 else [100, length - 16, *range(length - 15, length + 1)]
    logits = in_passes(build(source), text, cuts)
    expected = reference(source, text.tokens)
    assert expected.std() > 0.3, "logits this flat would agree by accident"
    assert (logits - expected).abs().max() < 1e-4


def test_the_default_models_logits_are_those_of_transformers(default_source: ModelSource) -> None:
    words = "The three primary colours are red, yellow and blue. 1, 2, 3, 4, 5, 漢字 🎉\n    return x ** 2"
    tokens = default_source.tokenizer().encode(words)
    text = Text(tokens, [7, 3, 99, 4][: -(-len(tokens) // SIZE)])
    logits = in_passes(native(default_source), text, [len(tokens) - 8, *range(len(tokens) - 7, len(tokens) + 1)])
    expected = reference(default_source, tokens)
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


# Sizes at which a library that picks its method by the number of rows is known to differ: the default model's width and MLP.
WIDE = {
    "num_hidden_layers": 2, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "head of 8": ("llama3", {}),
    "head of 12, learned positions": ("opt", {}),
    "head of 20, query norms": ("qwen3", {"head_dim": 20}),
    "wide": ("llama2", WIDE),
}


@pytest.fixture(scope="session", params=SHAPES)
def shaped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    family, overrides = SHAPES[request.param]
    return open_model(str(make_checkpoint(tmp_path_factory.mktemp("shaped"), family, **overrides)))


def contents(decoder: Decoder, text: Text) -> torch.Tensor:
    """The keys and values of every layer in a text's blocks, in the text's order."""
    assert isinstance(decoder, NativeDecoder | TorchDecoder)
    cache = decoder.cache if isinstance(decoder, NativeDecoder) else decoder.cache.pool
    return cache[:, :, text.table]


def together(decoder: Decoder, texts: Sequence[Text], seed: int) -> dict[int, list[torch.Tensor]]:
    """Run texts to their ends side by side, in chunks of random sizes and in random order; what `run` returns, per text."""
    rng = random.Random(seed)
    depth = decoder.architecture.layers
    done = [0] * len(texts)
    found: dict[int, list[list[torch.Tensor]]] = {index: [] for index in range(len(texts))}
    while open_texts := [index for index, text in enumerate(texts) if done[index] < len(text.tokens)]:
        chosen = rng.sample(open_texts, rng.randint(1, len(open_texts)))
        parts = []
        for index in chosen:
            end = min(len(texts[index].tokens), done[index] + rng.choice((1, 1, 2, 3, 5, 8, 13, 40)))
            parts.append((texts[index], done[index], end))
            done[index] = end
        results = run(decoder, parts, 1, depth)
        row = 0
        for index, (_, begin, end) in zip(chosen, parts, strict=True):
            found[index].append([result[row : row + end - begin] for result in results])
            row += end - begin
    return {index: [torch.cat(pieces) for pieces in zip(*passes, strict=True)] for index, passes in found.items()}


@DECODERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_what_runs_beside_it(shaped: ModelSource, build: Build, dtype: torch.dtype) -> None:
    vocabulary, depth = shaped.architecture.vocabulary, shaped.architecture.layers
    blocks = list(range(BLOCKS))
    random.Random(5).shuffle(blocks)
    lengths = (83, 1, 57, 130, 16) if build is native else (37, 1, 18)  # torch takes its time
    texts = [Text.random(length, vocabulary, length, [blocks.pop() for _ in range(-(-length // SIZE))]) for length in lengths]
    elsewhere = [Text(text.tokens, [blocks.pop() for _ in text.table]) for text in texts]

    alone = build(shaped, dtype)
    one_by_one = [[run(alone, [(text, at, at + 1)], 1, depth) for at in range(len(text.tokens))] for text in texts]
    expected = [[torch.cat(pieces) for pieces in zip(*rows, strict=True)] for rows in one_by_one]
    keys = [contents(alone, text) for text in texts]

    for threads, placed, seed in ((1, texts, 1), (2, elsewhere, 2)):
        decoder = build(shaped, dtype, threads)
        found = together(decoder, placed, seed)
        for index, text in enumerate(placed):
            for name, mine, other in zip(("at depth 1", "at full depth", "logits"), expected[index], found[index], strict=True):
                assert torch.equal(mine, other), f"{name}, text {index}, {threads} threads"
            assert torch.equal(keys[index], contents(decoder, text)), f"keys and values of text {index}, {threads} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_default_model_does_not_depend_on_what_runs_beside_it(default_source: ModelSource, dtype: torch.dtype) -> None:
    depth = default_source.architecture.layers
    texts = [Text.random(length, 49152, length, range(10 * index, 10 * index + 3)) for index, length in enumerate((21, 13, 34))]
    alone = native(default_source, dtype)
    rows = [run(alone, [(texts[0], at, at + 1)], 1, depth) for at in range(21)]
    expected = [torch.cat(pieces) for pieces in zip(*rows, strict=True)]
    keys = contents(alone, texts[0]).clone()
    alone._model.threads = 2
    texts[0].table = [90, 80]
    for mine, other in zip(expected, together(alone, texts, 3)[0], strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(keys[:, :, :2], contents(alone, texts[0]))


@DECODERS
def test_a_row_may_be_written_for_several_branches(tiny_folder: Path, build: Build) -> None:
    """A row from which two branches descend has a slot in each branch's own block; both then go on as if each had run it."""
    source = open_model(str(tiny_folder))
    depth = source.architecture.layers
    text = Text.random(40, 300, 1, [5, 9, 2])
    one, other = Text([*text.tokens, 11], [5, 9, 2]), Text([*text.tokens, 12], [5, 9, 30])
    decoder = build(source)
    expected = [run(build(source), [(branch, 0, 41)], depth)[-1][-1] for branch in (one, other)]
    run(decoder, [(text, 0, 32)], depth)
    rows = rows_of([(text, 32, 40)])
    twice = np.concatenate((rows.slots, 30 * SIZE + rows.positions % SIZE))
    rows = Rows(rows.tokens, rows.positions, rows.table, rows.tables, twice, np.concatenate((rows.slot_rows, rows.slot_rows)))
    with torch.inference_mode():
        decoder.run(0, depth, decoder.embed(rows), rows)
    logits = run(decoder, [(one, 40, 41), (other, 40, 41)], depth)[-1]
    assert torch.equal(logits[0], run(decoder, [(one, 40, 41)], depth)[-1][0])
    for mine, wanted in zip(logits, expected, strict=True):
        assert torch.equal(mine, wanted)
    assert not torch.equal(logits[0], logits[1])


def test_rejected_rows_leave_no_trace(tiny_folder: Path) -> None:
    """Rows that were run for tokens that did not survive are simply written over."""
    source = open_model(str(tiny_folder))
    depth = source.architecture.layers
    text = Text.random(50, 300, 1, [5, 9, 2, 8])
    wrong = Text([*text.tokens[:33], *reversed(text.tokens[33:])], text.table)
    decoder = native(source)
    run(decoder, [(wrong, 0, 50)], depth)
    logits = run(decoder, [(text, 33, 50)], depth)[-1]
    assert torch.equal(logits, run(native(source), [(text, 0, 50)], depth)[-1][33:])
