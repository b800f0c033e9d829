"""Promises of a shard: the levels that the settings ask for, each layer once, and settings that do not fit refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import settings_of

from hispec_ray import LLM, SamplingParams, Settings
from hispec_ray.config import SpeculationSettings
from hispec_ray.core.plan import Drafts, DraftStarts, Rows
from hispec_ray.model.decoder import ChooseGuess, Decoder, by_rule, draft_by_passes
from hispec_ray.model.native_decoder import NativeDecoder
from hispec_ray.model.torch_decoder import TorchDecoder
from hispec_ray.shard.shard import Shard, levels_for
from hispec_ray.speculation.choice import choose_native
from hispec_ray.speculation.round import Round


class Recorder:
    """A decoder that fails when a row goes through a layer again though it had not been rejected.

    held[layer][block] are the tokens whose rows the layer has run for the sequence that starts in this block. A run may only
    go on where they end, or fall back to a token that differs: one that was rejected.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.architecture, self.blocks, self.block_size = decoder.architecture, decoder.blocks, decoder.block_size
        layers = self.architecture.layers + len(decoder.exit_layers)
        self.held: list[dict[int, list[int]]] = [{} for _ in range(layers)]
        self.rows = [0] * layers

    def embed(self, rows: Rows) -> torch.Tensor:
        return self._decoder.embed(rows)

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        for layer in range(first, last):
            self.rows[layer] += len(rows)
            for line in sorted(set(rows.table.tolist())):
                mine = rows.table == line
                tokens, positions = rows.tokens[mine].tolist(), rows.positions[mine].tolist()
                held = self.held[layer].setdefault(int(rows.tables[line, 0]), [])
                begin = positions[0]
                assert positions == list(range(begin, begin + len(tokens))), f"layer {layer} runs rows out of order"
                assert begin <= len(held), f"layer {layer} skips rows"
                if layer < self.architecture.layers:  # in an exit's own layer a token may come back that was rejected while another waited
                    assert begin == len(held) or held[begin] != tokens[0], f"layer {layer} runs a row again that nobody rejected"
                held[begin:] = tokens
        return self._decoder.run(first, last, hidden, rows)

    def draft(self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: ChooseGuess | None = None) -> Drafts:
        return draft_by_passes(self, choose or by_rule(choose_native(1), starts), depth, starts, held, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


SETTINGS: list[tuple[Any, ...]] = [
    ("plain",),
    ("single", 6, None, 3),
    ("hispec", 1, 2, 2, 4),
    ("hispec", 4, 6, 1, 3),
    ("hispec", 6, 7, 4, 6),
    ("hispec", 7, 7, 2, 5),
    ("hispec", 8, 8, 2, 4),
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("speculation", "own"), [*((one, False) for one in SETTINGS), *((one, True) for one in SETTINGS[1:4])], ids=str)
def test_a_layer_runs_once_for_a_token_that_survives(
    speculation: Sequence[Any], own: bool, temperature: float, block_heads: Path, tiny_llm: Any
) -> None:
    """The model's layers, and those that exits have to themselves, where rows that nobody has guessed after yet may wait up to a block."""
    # every sequence starts in a block of its own, which it keeps
    llm: LLM = tiny_llm("float32", *speculation, prefix_caching=False, max_batch_rows=24, heads=block_heads if own else None)
    shard = llm.engine.shard
    recorder = Recorder(shard.decoder)
    shard._round = Round(recorder, shard.levels, shard._round._choose)
    prompts = [[3 + index] * (index + 1) * 5 for index in range(6)]
    params = [SamplingParams(temperature=temperature, seed=index, max_tokens=40, ignore_eos=True) for index in range(6)]
    done = llm.generate(prompts, params)
    texts = {tuple(one.prompt_ids) + tuple(one.choices[0].token_ids[:-1]) for one in done}  # the last token is never run
    counts = llm.engine.counts
    rejected = [count.seen - count.accepted for count in counts]
    homes = [next(level for level, one in enumerate(shard.levels) if layer < one.depth) for layer in range(recorder.architecture.layers)]
    asked = [*enumerate(homes), *((one.own, level) for level, one in enumerate(shard.levels) if one.own is not None)]
    assert len(asked) == recorder.architecture.layers + own * (len(shard.levels) - 1)
    for layer, level in asked:
        waits = layer >= recorder.architecture.layers
        for text in texts:
            run = len(text) // shard.decoder.block_size * shard.decoder.block_size if waits else len(text)
            assert any(tuple(held[:run]) == text[:run] for held in recorder.held[layer].values()), f"layer {layer} missed rows of a text"
        survivors = sum(len(text) for text in texts)
        assert counts[level].rows == survivors + sum(rejected[level:])
        assert recorder.rows[layer] <= counts[level].rows if waits else recorder.rows[layer] == counts[level].rows
    if speculation[0] != "plain" and speculation[1] < 8:
        assert 0 < counts[-1].accepted < counts[-1].seen
    if speculation[1:2] == (8,):
        assert rejected == [0, 0, 0], "exits at the full depth were not all accepted"
        assert counts[1].accepted > 50


@pytest.mark.parametrize(
    ("speculation", "layers", "levels"),
    [
        ({}, 32, [("draft", 4, 0), ("check", 8, 2), ("full", 32, 4)]),
        ({}, 30, [("draft", 3, 0), ("check", 7, 2), ("full", 30, 4)]),
        ({}, 2, [("draft", 1, 0), ("check", 1, 2), ("full", 2, 4)]),
        ({"exits": {"check": 2}}, 32, [("draft", 2, 0), ("check", 2, 2), ("full", 32, 4)]),
        ({"exits": {"draft": 20}}, 32, [("draft", 20, 0), ("check", 20, 2), ("full", 32, 4)]),
        ({"method": "plain", "exits": {"draft": 9}}, 32, [("full", 32, 0)]),
        ({"method": "single", "draft_tokens": 5}, 32, [("draft", 4, 0), ("full", 32, 5)]),
        ({"exits": {"draft": 8, "check": 8}, "window": 6}, 8, [("draft", 8, 0), ("check", 8, 2), ("full", 8, 6)]),
    ],
)
def test_levels_follow_the_settings(speculation: dict[str, Any], layers: int, levels: list[tuple[str, int, int]]) -> None:
    found = levels_for(SpeculationSettings.model_validate(speculation), layers)
    assert [(level.name, level.depth, level.window) for level in found] == levels


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"exits": {"draft": 9}}, r"speculation.exits.draft is 9; it must be from 1 to 8"),
        ({"method": "plain", "exits": {"draft": 9}}, r"speculation.exits.draft is 9; it must be from 1 to 8"),
        ({"exits": {"draft": 3, "check": 9}}, r"speculation.exits.check is 9; it must be from 3 .* to 8"),
        ({"method": "single", "exits": {"draft": 9}}, r"speculation.exits.draft is 9; it must be from 1 to 8"),
    ],
)
def test_exits_beyond_the_depth_are_refused_by_name(speculation: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        levels_for(SpeculationSettings.model_validate(speculation), 8)


def test_exits_out_of_order_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"speculation.exits.draft is 5 and speculation.exits.check is 4"):
        Settings.model_validate({"speculation": {"exits": {"draft": 5, "check": 4}}})


def test_settings_that_do_not_fit_are_refused_by_name(tiny_folder: Path) -> None:
    path = {"path": str(tiny_folder)}
    for tree, words in (
        ({"model": {**path, "max_model_len": 4096}}, r"model.max_model_len is 4096; .* from 1 to 512"),
        ({"model": path, "cache": {"memory_gib": 1e-6}}, r"cache.memory_gib is 1e-06"),
        ({"model": {**path, "device": "cuda", "kernels": "native"}}, r"model.kernels is 'native' and model.device is 'cuda'"),
        ({"model": path, "cache": {"blocks": 2**31}}, r"a cache of 2147483648 blocks, .* do not fit into memory"),
        ({"model": {"path": "/nowhere"}}, r"model.path is '/nowhere'"),
    ):
        with pytest.raises(ValueError, match=words):
            LLM(tree)


def test_the_kernels_are_those_asked_for(default_source: Any, tiny_llm: Any) -> None:
    assert isinstance(tiny_llm("float32").engine.shard.decoder, NativeDecoder)
    assert isinstance(tiny_llm("float32", kernels="torch").engine.shard.decoder, TorchDecoder)


@pytest.mark.parametrize("own", [0, 7])
def test_the_pool_fills_the_memory_it_may_have(own: int, block_heads: Path, tiny_folder: Path) -> None:
    """own: layers that exits have to themselves."""
    for kernels, head in (("native", 16), ("torch", 8)):  # a head of 8, which the native kernels pad
        model = {"path": str(tiny_folder), "threads": 1, "kernels": kernels}
        settings = settings_of(model, heads=block_heads if own else None).model_dump()
        settings["cache"] |= {"blocks": None, "memory_gib": 0.01}
        llm = LLM(settings)
        block = 2 * (8 + own) * 2 * head * 16 * 2  # keys and values, layers, heads, head, positions, bytes
        assert llm.engine.pool.blocks == int(0.01 * 2**30) // block
        for shard in (llm.engine.shard, LLM(settings, like=llm).engine.shard):
            decoder = shard.decoder
            cache = decoder.cache if isinstance(decoder, NativeDecoder) else decoder.cache.pool  # type: ignore[attr-defined]
            assert cache.nbytes == shard.cache_bytes == llm.engine.pool.blocks * block
            assert isinstance(shard, Shard)
