"""Promises of the decoders: transformers' numbers, and a row that is the same to the bit whatever runs beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES, make_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from hispec_ray.core.plan import DraftStarts, Rows
from hispec_ray.model.decoder import Decoder, by_rule, draft_by_passes
from hispec_ray.model.heads import ExitNetwork, Heads, block_weights
from hispec_ray.model.native_decoder import NativeDecoder
from hispec_ray.model.torch_decoder import TorchDecoder
from hispec_ray.model.weights import ModelSource, open_model
from hispec_ray.speculation.choice import choose_native, choose_torch
from hispec_ray.training.student import next_layer

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
    hidden = read = decoder.embed(rows)
    found = []
    for first, last in itertools.pairwise((0, *depths)):
        hidden = read = decoder.run(first, last, hidden, rows)
        found.append(hidden.clone())
        if (own := decoder.exit_layers.get(last)) is not None:
            read = decoder.run(own, own + 1, hidden.clone(), rows)
    return [*found, decoder.logits(depths[-1], read)]


def native(source: ModelSource, dtype: torch.dtype = torch.float32, threads: int = 1, heads: Heads | None = None) -> NativeDecoder:
    positions = min(1024, source.architecture.attention_limit)
    shape = {"positions": positions, "blocks": BLOCKS, "block_size": SIZE}
    return NativeDecoder(source.architecture, source.weights(dtype), threads=threads, heads=heads, **shape)


def plain_torch(source: ModelSource, dtype: torch.dtype = torch.float32, threads: int = 1, heads: Heads | None = None) -> TorchDecoder:
    torch.set_num_threads(threads)
    positions = min(1024, source.architecture.attention_limit)
    shape = {"positions": positions, "blocks": BLOCKS, "block_size": SIZE, "device": torch.device("cpu")}
    return TorchDecoder(source.architecture, source.weights(dtype), choose=choose_torch, heads=heads, **shape)


def graphed(source: ModelSource, dtype: torch.dtype = torch.float32, threads: int = 1, heads: Heads | None = None) -> TorchDecoder:
    """The torch decoder on graphs that are played step by step: with their padding and their tensors that stay where they are."""

    def play(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        result = work().clone()
        return lambda: result.copy_(work()), result

    torch.set_num_threads(threads)
    positions = min(1024, source.architecture.attention_limit)
    shape = {"positions": positions, "blocks": BLOCKS, "block_size": SIZE, "device": torch.device("cpu"), "capture": play}
    return TorchDecoder(source.architecture, source.weights(dtype), choose=choose_torch, heads=heads, **shape)


Build = Callable[..., Decoder]
DECODERS = pytest.mark.parametrize("build", [native, plain_torch, graphed])


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


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 12, 13, 25, 70])
def test_bf16_passes_are_nearly_those_in_fp32_with_the_same_weights(shaped: ModelSource, count: int) -> None:
    """Whatever the number of rows, and the way of the kernels with it: what is rounded are the inputs of products, keys and values."""
    text = Text.random(count, shaped.architecture.vocabulary, count, range(-(-count // SIZE)))
    positions = min(1024, shaped.architecture.attention_limit)
    weights = {name: tensor.float() for name, tensor in shaped.weights(torch.bfloat16).items()}
    exact = NativeDecoder(shaped.architecture, weights, threads=1, positions=positions, blocks=BLOCKS, block_size=SIZE)
    depth = shaped.architecture.layers
    for mine, other in zip(*(run(d, [(text, 0, count)], 1, depth) for d in (native(shaped, torch.bfloat16, 2), exact)), strict=True):
        assert (mine - other).abs().max() < 0.05 * other.abs().max()


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


@DECODERS
def test_spare_blocks_may_stand_beyond_the_context(tiny_folder: Path, build: Build) -> None:
    source = open_model(str(tiny_folder))
    limit = source.architecture.attention_limit
    text = Text.random(limit, 300, 1)
    spare = Text(text.tokens, [*text.table, *({*range(BLOCKS)} - {*text.table})][: len(text.table) + 3])
    decoder = build(source)
    run(decoder, [(text, 0, limit - 2)], 8)
    expected = run(decoder, [(text, limit - 2, limit)], 8)[-1]
    assert torch.equal(run(decoder, [(spare, limit - 2, limit)], 8)[-1], expected)


def test_a_tied_head_is_moved_to_the_device_once(tiny_folder: Path) -> None:
    source = open_model(str(tiny_folder))
    assert source.architecture.tied_head
    shape = {"positions": 16, "blocks": 2, "block_size": SIZE, "device": torch.device("meta")}
    moved = TorchDecoder(source.architecture, source.weights(torch.float32), choose=choose_torch, **shape)._weights
    assert moved["embed.weight"].device.type == "meta"
    assert moved["head.weight"] is moved["embed.weight"]


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


def trained(source: ModelSource, kind: Any, ids: int | None) -> tuple[dict[int, ExitNetwork], Heads]:
    """Random exits at depths 1 and 2, as torch modules and as a decoder takes them; `ids`: how many tokens they score."""
    torch.manual_seed(3)
    width, vocabulary = source.architecture.width, source.architecture.vocabulary
    networks = {depth: ExitNetwork(width, kind, 24) for depth in (1, 2)}
    for network in networks.values():
        for weight in network.parameters():
            torch.nn.init.normal_(weight, std=0.2)
            weight.requires_grad_(False)
    return networks, Heads({depth: network.weights() for depth, network in networks.items()}, some_ids(vocabulary, ids))


def some_ids(vocabulary: int, count: int | None) -> torch.Tensor | None:
    return None if count is None else torch.randperm(vocabulary)[:count].sort().values


def trained_blocks(source: ModelSource, ids: int | None) -> tuple[dict[int, nn.Module], Heads]:
    """As `trained`, with a layer at each exit: the model's next one, changed."""
    torch.manual_seed(3)
    backbone = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    blocks = {depth: next_layer(backbone, depth).requires_grad_(False) for depth in (1, 2)}
    for block in blocks.values():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    exits = {depth: block_weights(block, source.architecture) for depth, block in blocks.items()}
    return blocks, Heads(exits, some_ids(source.architecture.vocabulary, ids))


@DECODERS
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("ids", [None, 77])
@pytest.mark.parametrize("variant", ["llama3", "opt"])
def test_trained_exits_are_the_modules_that_were_trained(variant: str, kind: str, ids: int | None, build: Build, tmp_path: Path) -> None:
    source = open_model(str(make_checkpoint(tmp_path / "model", variant)))
    networks, heads = trained(source, kind, ids)
    text = Text.random(40, source.architecture.vocabulary, 1)
    decoder, bare = build(source, heads=heads), build(source)
    depth = source.architecture.layers
    some = slice(None) if heads.vocabulary is None else heads.vocabulary
    for exit, network in networks.items():
        hidden, logits = run(decoder, [(text, 0, 40)], exit)
        assert torch.equal(hidden, run(bare, [(text, 0, 40)], exit)[0]), "an exit's network must not touch what the next layer reads"
        wanted = bare.logits(exit, network(hidden.float()))[:, some]
        assert float((logits - wanted).abs().max()) < 1e-4
        assert decoder.vocabulary(exit) is heads.vocabulary
        for row in (0, 39):
            assert torch.equal(decoder.logits(exit, hidden[row : row + 1])[0], logits[row]), "a row depends on its neighbours"
    assert torch.equal(run(decoder, [(text, 0, 40)], depth)[-1], run(bare, [(text, 0, 40)], depth)[-1])
    assert decoder.vocabulary(depth) is None


@DECODERS
@pytest.mark.parametrize("ids", [None, 77])
@pytest.mark.parametrize("variant", ["llama3", "opt", "qwen3"])
def test_a_block_is_the_layer_that_was_trained(variant: str, ids: int | None, build: Build, tmp_path: Path) -> None:
    """Beside others, in chunks, in a twin: what the exit reads is what a model says that ends in the block."""
    source = open_model(str(make_checkpoint(tmp_path / "model", variant)))
    blocks, heads = trained_blocks(source, ids)
    text, other = (Text.random(length, source.architecture.vocabulary, length, table) for length, table in ((40, [5, 9, 2]), (7, [3])))
    decoder, bare = build(source, heads=heads), build(source)
    depth = source.architecture.layers
    some = slice(None) if heads.vocabulary is None else heads.vocabulary
    for exit, block in blocks.items():
        hidden, logits = run(decoder, [(text, 0, 40)], exit)
        assert torch.equal(hidden, run(bare, [(text, 0, 40)], exit)[0]), "an exit's layer must not touch what the next layer reads"
        short = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32, num_hidden_layers=exit + 1)
        short.get_decoder().layers[exit] = block
        with torch.inference_mode():
            wanted = short(torch.tensor([text.tokens])).logits[0][:, some]
        assert float((logits - wanted).abs().max()) < 1e-4
        assert decoder.vocabulary(exit) is heads.vocabulary
        twin = decoder.twin(BLOCKS)
        chunks = [run(twin, [(other, at, at + 1), (text, begin, end)], exit)[-1][1:] for at, begin, end in ((0, 0, 31), (1, 31, 40))]
        assert torch.equal(torch.cat(chunks), logits), "a row depends on its neighbours"
    assert torch.equal(run(decoder, [(text, 0, 40)], depth)[-1], run(bare, [(text, 0, 40)], depth)[-1])


@pytest.mark.parametrize("make", [lambda source, ids: trained(source, "mlp", ids), trained_blocks], ids=["mlp", "block"])
@pytest.mark.parametrize("variant", ["smollm", "opt", "qwen3"])
@pytest.mark.parametrize("ids", [None, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_of_drafts_is_the_passes_one_by_one(
    variant: str, ids: int | None, dtype: torch.dtype, make: Callable[..., tuple[Any, Heads]], tmp_path: Path
) -> None:
    """In one native call or in many: the same guesses, runners-up, gaps, hidden rows and keys, for a batch of uneven lengths."""
    source = open_model(str(make_checkpoint(tmp_path / "model", variant)))
    _, heads = make(source, ids)
    heads = Heads({depth: exit.to(dtype) for depth, exit in heads.exits.items()}, heads.vocabulary)
    texts = [
        Text.random(length, source.architecture.vocabulary, length, [9 * i + j for j in range(4)]) for i, length in enumerate((5, 17, 31))
    ]
    tables = np.array([text.table for text in texts])
    steps = np.array([4, 0, 7])
    starts = DraftStarts(
        tokens=np.array([text.tokens[-1] for text in texts]),
        positions=np.array([len(text.tokens) - 1 for text in texts]),
        table=np.arange(3),
        tables=tables,
        steps=steps,
        homes=np.arange(24).reshape(3, 8)[::-1].copy(),
        temperatures=[0.0, 1.0, 0.8],
        seeds=[1, 2, 3],
        ends=[frozenset()] * 3,
    )
    found = []
    for one_by_one in (False, True):
        decoder = native(source, dtype, threads=2, heads=heads)
        run(decoder, [(text, 0, len(text.tokens) - 1) for text in texts], 2, decoder.architecture.layers)
        held = torch.full((24, source.architecture.width), 7.0)
        for stop in (0.0, 0.3):
            drafts = (
                draft_by_passes(decoder, by_rule(choose_native(1), starts), 2, starts, held, stop)
                if one_by_one
                else decoder.draft(2, starts, held, stop)
            )
            found.append((drafts, held.clone(), decoder.cache.view(torch.uint8).clone()))
            assert [len(guesses) for guesses in drafts.guesses] == steps.tolist() or stop
            if stop:
                for gaps, most in zip(drafts.gaps, steps, strict=True):
                    assert all(gap >= stop for gap in gaps[:-1])
                    assert len(gaps) == most or gaps[-1] < stop
        guesses = found[-2][0].guesses
        starts_ends = replace(starts, ends=[frozenset((guesses[0][1], 5)), frozenset((0,)), frozenset(guesses[2][4:5])])
        run_of = partial(draft_by_passes, decoder, by_rule(choose_native(1), starts)) if one_by_one else decoder.draft
        found.append((run_of(2, starts_ends, held, 0.0), held.clone(), decoder.cache.view(torch.uint8).clone()))
        for short, long, ends in zip(found[-1][0].guesses, guesses, starts_ends.ends, strict=True):
            assert short == long[: next((at + 1 for at, id in enumerate(long) if id in ends), len(long))]
    for one, other in zip(found[:3], found[3:], strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])


@DECODERS
def test_copied_slots_read_as_the_ones_they_came_from(tiny_folder: Path, build: Build) -> None:
    source = open_model(str(tiny_folder))
    text = Text.random(30, 300, 1, [5, 9])
    decoder = build(source, heads=trained_blocks(source, None)[1])
    places = np.arange(13)
    for depth in (2, source.architecture.layers):
        expected = run(decoder, [(text, 0, 30)], depth)[-1][-1]
        run(decoder, [(text, 0, 29)], depth)
        decoder.copy_slots(9 * SIZE + places, 33 * SIZE + places)
        moved = Text(text.tokens, [5, 33])
        assert torch.equal(run(decoder, [(moved, 29, 30)], depth)[-1][0], expected)
