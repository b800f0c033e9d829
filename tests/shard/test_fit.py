"""Whether a model fits: each rank's bytes, a cache of what GPUs have free, and the smallest layout that has room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hispec_ray.config import Settings
from hispec_ray.model.architecture import Architecture
from hispec_ray.model.layout import weight_bytes
from hispec_ray.model.parallel import piece_of, whole
from hispec_ray.model.weights import open_model
from hispec_ray.shard.fit import Fit, fit, smallest
from hispec_ray.shard.gpus import Gpu
from hispec_ray.shard.machine import Machine, described
from hispec_ray.shard.shard import Shard, blocks_that_fit, resources_of_rank
from hispec_ray.shard.stages import stages_of

GIB = 2**30
SHAPES = {
    "8b": (32, 4096, 32, 8, 14336, 128256, 8192),
    "70b": (80, 8192, 64, 8, 28672, 32000, 4096),
}


def shaped(name: str, **others: Any) -> Architecture:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    values = dict(zip((*names, "max_position_embeddings"), SHAPES[name], strict=True))
    return Architecture.from_config(LlamaConfig(**values, tie_word_embeddings=False, **others))


def asked(*stages: tuple[int, int], device: str = "cuda", model: Any = None, **others: Any) -> Settings:
    tree = {"model": {"device": device, **(model or {})}, **others}
    if stages:
        tree["parallel"] = {"stages": [{"layers": layers, "tp": tp} for layers, tp in stages]}
    return Settings.model_validate(tree)


def test_a_gpu_gives_its_cache_what_the_weights_leave() -> None:
    a = shaped("8b")
    found = fit(asked(), a, described("1x1x80GiB"))
    weights = weight_bytes(a, whole(a), torch.bfloat16)
    block = 2 * 32 * 8 * 128 * 16 * 2  # keys and values, layers, heads, head, positions, bytes
    assert found.problem == ""
    (rank,) = found.ranks
    assert rank.needs.weight_bytes == weights
    assert found.blocks == int((0.9 * (80 * GIB - weights) - GIB) / block)
    assert rank.cache_bytes == found.blocks * block
    assert rank.left_bytes == 80 * GIB - weights - rank.cache_bytes
    assert found.tokens == 16 * found.blocks
    assert found.sequences(8192) == found.blocks // 512
    assert found.sequences(8193) == found.blocks // 513


def test_all_ranks_have_as_many_blocks_as_the_fullest() -> None:
    found = fit(asked((20, 4), (60, 4)), shaped("70b"), described("2x4x80GiB"))
    first, last = found.ranks[0], found.ranks[4]
    assert [(one.stage, one.rank, one.machine, one.gpu) for one in found.ranks] == [
        (stage, rank, stage, rank) for stage in (0, 1) for rank in range(4)
    ]
    assert last.cache_bytes == 3 * first.cache_bytes
    assert last.left_bytes < 80 * GIB * 0.1 + GIB < first.left_bytes


def test_ranks_take_gpus_in_the_order_of_their_links() -> None:
    links = {0: {1: "SYS", 2: "NV4", 3: "SYS"}, 1: {0: "SYS", 2: "SYS", 3: "NV4"}}
    links |= {2: {0: "NV4", 1: "SYS", 3: "SYS"}, 3: {0: "SYS", 1: "NV4", 2: "SYS"}}
    machine = Machine("a", 8, GIB, tuple(Gpu(index, "", "", 80 * GIB, 80 * GIB, links[index]) for index in range(4)))
    assert [one.gpu for one in fit(asked((40, 2), (40, 2)), shaped("70b"), [machine]).ranks] == [0, 2, 1, 3]


def test_ranks_on_cpus_share_the_memory_of_their_node() -> None:
    a = shaped("8b")
    found = fit(asked((32, 2), device="cpu"), a, described("1x2cpux32GiB"))
    assert {one.left_bytes for one in found.ranks} == {32 * GIB - sum(one.needs.weight_bytes + one.cache_bytes for one in found.ranks)}
    assert all(GIB - one.needs.block_bytes < one.cache_bytes <= GIB for one in found.ranks)
    assert found.problem == ""
    assert fit(asked((32, 2), device="cpu"), a, described("1x2cpux16GiB")).problem == (
        "node 1 has 16.0 GiB free; weights and cache take 17.0 GiB there"
    )


@pytest.mark.parametrize(
    ("settings", "cluster", "problem"),
    [
        (
            asked(),
            "2x4x80GiB",
            "node 1, GPU 0: no room for a cache: of the 80.0 GiB free on the GPU the weights take 128.5 and passes 1.0,",
        ),
        (asked((80, 8)), "2x4x16GiB", "node 1, GPU 0: no room for a cache: of the 16.0 GiB free on the GPU the weights take 16.1 and"),
        (asked((80, 16)), "2x4x80GiB", "parallel.stages.0.tp is 16 and each rank takes 1 CPU, 1 GPU; stages of 16 ranks do not fit into"),
        (
            asked((80, 4), cache={"memory_gib": 48}),
            "2x4x80GiB",
            "node 1, GPU 0 has 80.0 GiB free; weights and cache take 80.1 GiB there, passes 1 GiB",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(settings: Settings, cluster: str, problem: str) -> None:
    found = fit(settings, shaped("70b"), described(cluster))
    assert found.problem.startswith(problem)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            asked((10, 2), (70, 2)),
            "parallel.stages.0.layers is 10; drafting and checking never leave the first stage, so it must be from 20",
        ),
        (asked((20, 2), (20, 2)), "parallel.stages have 20 \\+ 20 = 40 layers; they must add up to the model's 80"),
        (asked((80, 65)), "parallel.stages.0.tp is 65; it must be from 1 to 64 for this model"),
        (asked(model={"max_model_len": 4097}), "model.max_model_len is 4097; for this model it must be from 1 to 4096"),
        (asked(speculation={"exits": {"draft": 81}}), "speculation.exits.draft is 81; it must be from 1 to 80"),
        (
            asked(speculation={"exits": {"heads": "/nowhere"}}),
            "speculation.exits.heads is '/nowhere': its card /nowhere.json cannot be read",
        ),
    ],
)
def test_what_the_model_cannot_is_an_error(settings: Settings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(settings, shaped("70b"), described("20x4x80GiB"))


def layers_and_ranks(found: Fit | None) -> list[tuple[int | None, int]] | None:
    if found is None:
        return None
    return [(stage.layers, stage.tp) for stage in found.parallel.stages] if found.parallel else []


@pytest.mark.parametrize(
    ("name", "cluster", "settings", "layout"),
    [
        ("8b", "1x1x24GiB", asked(), []),
        ("70b", "2x4x80GiB", asked(), [(80, 2)]),
        ("70b", "2x4x24GiB", asked(), [(40, 3), (40, 3)]),
        ("70b", "8x1x24GiB", asked(), None),  # 20 layers, up to the check exit, must be together
        (
            "70b",
            "8x1x24GiB",
            asked(speculation={"exits": {"draft": 4, "check": 8}}),
            [(11, 1), (11, 1), (12, 1), (11, 1), (12, 1), (11, 1), (12, 1)],
        ),
        ("70b", "2x2x24GiB", asked(), None),
        ("70b", "3x1x80GiB", asked(speculation={"exits": {"check": 45}}), [(45, 1), (35, 1)]),
        ("8b", "1x4cpux64GiB", asked(device="cpu"), []),
        ("8b", "3x1cpux8GiB", asked(device="cpu"), [(10, 1), (11, 1), (11, 1)]),
        ("8b", "3x4cpux8GiB", asked(device="cpu"), None),  # Ray packs stages on one node as long as it has CPUs
        ("8b", "1x4cpux8GiB", asked(device="cpu"), None),
    ],
)
def test_the_smallest_layout_is_found(name: str, cluster: str, settings: Settings, layout: list[tuple[int, int]] | None) -> None:
    a, machines = shaped(name), described(cluster)
    found = smallest(settings, a, machines)
    assert layers_and_ranks(found) == layout
    if found:
        assert found.problem == ""
        assert found.sequences(found.max_model_len) >= 1


@pytest.mark.parametrize(
    ("model", "takes"),
    [({"device": "cuda", "threads": 3}, {"CPU": 1, "GPU": 1}), ({"threads": 3}, {"CPU": 3}), ({}, {"CPU": 1})],
)
def test_a_rank_takes_a_gpu_or_the_cpus_of_its_threads(model: dict[str, Any], takes: dict[str, float]) -> None:
    assert resources_of_rank(Settings.model_validate({"model": model})) == takes


def test_a_longer_context_takes_more_gpus() -> None:
    a = shaped("8b")
    long = Architecture.from_config(LlamaConfig(**{**a.config.to_dict(), "max_position_embeddings": 131072}))
    machines = described("1x4x24GiB")
    assert layers_and_ranks(smallest(asked(), long, machines)) == [(32, 2)]
    only = smallest(asked(), long, described("1x1x24GiB"))
    assert only
    assert 0 < only.tokens < 131072


def test_a_shard_gives_its_cache_what_was_planned(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, free = open_model(str(tiny_folder)), 2 * GIB
    settings = Settings.model_validate(
        {"model": {"path": str(tiny_folder), "device": "cuda"}, "parallel": {"stages": [{"layers": 3, "tp": 2}, {"layers": 5, "tp": 2}]}}
    )
    planned = fit(settings, source.architecture, [Machine("a", 8, 0, tuple(Gpu(i, "", "", 4 * GIB, free) for i in range(4)))])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 4 * GIB))
    assert settings.parallel
    stages = stages_of(settings.parallel, source.architecture, 2)
    rooms = [blocks_that_fit(settings, source, piece) for stage in stages for piece in stage.pieces]
    assert planned.blocks == min(rooms)
    fixed = settings.model_copy(update={"cache": settings.cache.model_copy(update={"blocks": 7})})
    assert blocks_that_fit(fixed, source, stages[0].pieces[0]) == 7
    free = GIB
    with pytest.raises(ValueError, match=r"no room for a cache: of the 1\.0 GiB free on the GPU the weights take 0\.0 and passes 1\.0"):
        blocks_that_fit(settings, source, stages[0].pieces[0])


def test_without_a_gpu_cuda_is_refused_before_anything_is_read(tiny_folder: Path) -> None:
    settings = Settings.model_validate({"model": {"path": str(tiny_folder), "device": "cuda"}})
    source = open_model(str(tiny_folder))
    for load in (lambda: blocks_that_fit(settings, source, whole(source.architecture)), lambda: Shard(settings, source)):
        with pytest.raises(ValueError, match=r"model.device is 'cuda' and torch sees no CUDA device here"):
            load()


@pytest.mark.parametrize("ranks", [1, 2])
def test_trained_exits_are_counted(ranks: int, tiny_folder: Path, block_heads: Path) -> None:
    source = open_model(str(tiny_folder))
    settings = Settings.model_validate({"model": {"path": str(tiny_folder)}, "speculation": {"exits": {"heads": str(block_heads)}}})
    a = source.architecture
    plain = fit(settings.model_copy(update={"speculation": asked().speculation}), a, described("1x4cpux1GiB")).ranks[0]
    with_exits = fit(settings, a, described("1x4cpux1GiB")).ranks[0]
    shard = Shard(settings, source)
    assert with_exits.needs.block_bytes * 8 == plain.needs.block_bytes * 15  # seven exits with a layer each
    assert shard.cache_bytes == with_exits.cache_bytes
    layer = weight_bytes(a, piece_of(a, range(1), ranks, 0, embeds=False, reads=False), torch.bfloat16)
    if ranks == 1:
        assert with_exits.needs.weight_bytes - plain.needs.weight_bytes == 7 * layer
        assert shard.weight_bytes == plain.needs.weight_bytes
    else:
        cut = settings.model_copy(update={"parallel": asked((8, 2)).parallel})
        without = cut.model_copy(update={"speculation": asked().speculation})
        one, other = (fit(each, a, described("1x4cpux1GiB")).ranks[0].needs.weight_bytes for each in (cut, without))
        assert one - other == 7 * layer
