"""A model cut over ranks: every number is owned, ranks agree to the bit, and what they compute is what one process computes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from model.tiny import FAMILIES, make_checkpoint, make_config
from shard.crew import together
from test_decoder import BLOCKS, SIZE, Text, run

from hispec_ray.model.architecture import Architecture
from hispec_ray.model.decoder import Decoder
from hispec_ray.model.layout import layout
from hispec_ray.model.native_decoder import NativeDecoder
from hispec_ray.model.parallel import Collective, Piece, piece_of, whole
from hispec_ray.model.torch_decoder import TorchDecoder
from hispec_ray.model.weights import ModelSource, open_model
from hispec_ray.speculation.choice import choose_native, choose_together, choose_torch

SHAPES: dict[str, dict[str, Any]] = {
    "even": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96},
    "SmolLM2's heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 128},
    "fewer key heads than ranks": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "one key head": {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 48},
    "odd sizes": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 10, "intermediate_size": 58},
}


def architecture(**overrides: Any) -> Architecture:
    return Architecture.from_config(make_config("llama2", **overrides))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_head_column_and_id_has_an_owner(shape: str, ranks: int) -> None:
    a = architecture(**SHAPES[shape])
    pieces = [piece_of(a, range(a.layers), ranks, rank) for rank in range(ranks)]
    for name, count in (("heads", a.heads), ("columns", a.intermediate), ("vocabulary", a.vocabulary)):
        owned = [getattr(piece, name) for piece in pieces]
        assert [number for part in owned for number in part] == list(range(count)), f"each of the {name} once, in order"
        assert min(map(len, owned)) > 0
    group = a.heads // a.kv_heads
    for piece in pieces:
        assert {head // group for head in piece.heads} == set(piece.kv_heads), "a rank has the keys that its queries read"
        assert len(piece.heads) % len(piece.kv_heads) == 0
    if a.intermediate % 2 == 0:
        assert all(len(piece.columns) % 2 == 0 for piece in pieces), "bf16 is packed in pairs"


def test_the_columns_make_up_for_uneven_heads() -> None:
    """SmolLM2's nine heads on two ranks are six and three; the weights of a layer are halves all the same."""
    a = Architecture.from_config(
        make_config(
            "smollm", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=49152, head_dim=64
        )
    )
    sizes = []
    for rank in range(2):
        parts = layout(a, piece_of(a, range(1), 2, rank))
        sizes.append(sum(part.numbers for name, part in parts.items() if name.startswith("layers.")))
    assert max(sizes) / min(sizes) < 1.03


@pytest.mark.parametrize(("overrides", "ranks"), [({}, 5), ({"num_attention_heads": 2, "num_key_value_heads": 1}, 3), ({}, 0)])
def test_more_ranks_than_there_is_to_cut_are_refused(overrides: dict[str, Any], ranks: int) -> None:
    a = architecture(**overrides)
    with pytest.raises(ValueError, match=f"tp is {ranks}; it must be from 1 to {a.heads} for this model of {a.heads} query heads"):
        piece_of(a, range(a.layers), ranks, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_part_of_every_tensor_and_no_more(family: str, tmp_path: Any) -> None:
    source = open_model(str(make_checkpoint(tmp_path, family)))
    a = source.architecture
    everything = source.weights(torch.float32)
    wholly = layout(a, whole(a))
    for stage, layers in enumerate((range(2), range(2, a.layers))):
        for rank in range(2):
            piece = piece_of(a, layers, 2, rank, embeds=stage == 0)
            parts = layout(a, piece)
            read = source.weights(torch.float32, piece)
            assert read.keys() - {"head.weight"} == parts.keys() - {"head.weight"}
            for name, part in parts.items():
                assert torch.equal(read[name], part.of(everything[name])), name
                assert part.shapes == wholly[name].shapes
    pieces = [layout(a, piece_of(a, range(a.layers), 2, rank)) for rank in range(2)]
    shared = [name for name in wholly if "norm" in name or name.startswith("positions")]  # every rank has those whole
    for name, parts in wholly.items():
        owned = sum(piece[name].numbers for piece in pieces if name in piece)
        assert owned == parts.numbers * (2 if name in shared else 1), name


def build(kind: str, source: ModelSource, dtype: torch.dtype, piece: Piece, collective: Collective) -> Decoder:
    shape: dict[str, Any] = {"positions": 256, "blocks": BLOCKS, "block_size": SIZE, "piece": piece, "collective": collective}
    weights = source.weights(dtype, piece)
    if kind == "native":
        return NativeDecoder(source.architecture, weights, threads=1, choose=choose_together(choose_native(1), collective.gather), **shape)
    return TorchDecoder(source.architecture, weights, device=torch.device("cpu"), choose=choose_torch, **shape)


def logits_of(source: ModelSource, kind: str, ranks: int, dtype: torch.dtype, cuts: list[int]) -> list[torch.Tensor]:
    """Each rank's whole logits along a text that is run in passes up to the cuts, each pass in two segments."""
    a = source.architecture
    text = Text.random(cuts[-1], a.vocabulary, seed=1)

    def rank(collective: Collective) -> torch.Tensor:
        decoder = build(kind, source, dtype, piece_of(a, range(a.layers), ranks, collective.rank), collective)
        found = []
        for begin, end in pairwise((0, *cuts)):
            logits = run(decoder, [(text, begin, end)], a.layers // 2, a.layers)[-1]
            whole_logits, vocabulary = decoder.whole(a.layers, logits)
            assert vocabulary is None
            found.append(whole_logits)
        return torch.cat(found)

    return together(ranks, rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_one_process_computes_and_agree_to_the_bit(family: str, kind: str, ranks: int, tmp_path: Any) -> None:
    source = open_model(str(make_checkpoint(tmp_path, family)))
    (expected,) = logits_of(source, kind, 1, torch.float32, [20])
    found = logits_of(source, kind, ranks, torch.float32, [20])
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert (found[0] - expected).abs().max() < 1e-4
    assert torch.equal(logits_of(source, kind, ranks, torch.float32, [1, 2, 7, 20])[0], found[0]), "whatever the passes"
