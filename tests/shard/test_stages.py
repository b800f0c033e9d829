"""A model of 70 billion parameters over stages and ranks: everything is owned once, takes what the plan says, and is read alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hispec_ray.config import ParallelSettings, Settings
from hispec_ray.model.architecture import Architecture
from hispec_ray.model.layout import Parts, layout, weight_bytes
from hispec_ray.model.parallel import Piece, piece_of, whole
from hispec_ray.model.torch_decoder import TorchDecoder
from hispec_ray.model.weights import read_architecture
from hispec_ray.shard.fit import fit
from hispec_ray.shard.machine import described
from hispec_ray.shard.stages import Stage, stages_of

CONFIG = LlamaConfig(
    num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672, vocab_size=32000,
    max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
LAYOUTS = [[(20, 4), (60, 4)], [(80, 8)], [(20, 4), (30, 2), (30, 4)]]
CHECK = 20


def parallel(stages: list[tuple[int, int]]) -> ParallelSettings:
    return ParallelSettings.model_validate({"stages": [{"layers": layers, "tp": tp} for layers, tp in stages]})


@pytest.fixture(scope="module")
def a() -> Architecture:
    return Architecture.from_config(CONFIG)


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors, as transformers names them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def areas(parts: Parts) -> list[tuple[str, tuple[range, range]]]:
    """What is taken of each of the checkpoint's tensors: rows and columns."""
    found = []
    for number, (name, shape) in enumerate(zip(parts.names, parts.shapes, strict=True)):
        taken = [range(length) for length in (*shape, 1)[:2]]
        if parts.cut:
            taken[parts.cut.dimension] = parts.cut.ranges[number]
        found.append((name, (taken[0], taken[1])))
    return found


def overlap(one: tuple[range, range], other: tuple[range, range]) -> bool:
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True))


def owned(a: Architecture, stage: Stage) -> dict[str, list[tuple[range, range]]]:
    """By the checkpoint's name, what each rank of a stage has of a tensor."""
    found: dict[str, list[tuple[range, range]]] = {}
    for piece in stage.pieces:
        for parts in layout(a, piece).values():
            for name, area in areas(parts):
                found.setdefault(name, []).append(area)
    return found


@pytest.mark.parametrize("stages", LAYOUTS)
def test_every_parameter_is_owned_once(stages: list[tuple[int, int]], a: Architecture, checkpoint: dict[str, tuple[int, ...]]) -> None:
    ends = {"lm_head.weight", "model.norm.weight"}  # the first stage reads at its exits, the last at the full depth
    homes: Counter[str] = Counter()
    for stage in stages_of(parallel(stages), a, CHECK):
        found = owned(a, stage)
        homes.update(found.keys())
        for name, parts in found.items():
            shape = (*checkpoint[name], 1)[:2]
            if len(checkpoint[name]) == 1:  # a norm: whole on every rank
                assert name.endswith("norm.weight"), name
                assert parts == [(range(shape[0]), range(1))] * len(stage.pieces), name
                continue
            assert sum(len(rows) * len(columns) for rows, columns in parts) == shape[0] * shape[1], name
            assert not any(overlap(one, other) for i, one in enumerate(parts) for other in parts[:i]), name
    twice = ends if len(stages) > 1 else set()
    assert dict(homes) == {name: 2 if name in twice else 1 for name in checkpoint}


def meta_tensors(a: Architecture, piece: Piece) -> dict[str, torch.Tensor]:
    """A piece's weights without memory."""
    return {name: torch.empty(parts.shape, dtype=torch.bfloat16, device="meta") for name, parts in layout(a, piece).items()}


@pytest.mark.parametrize("stages", LAYOUTS)
def test_shards_take_the_bytes_that_were_planned(stages: list[tuple[int, int]], a: Architecture) -> None:
    settings = Settings.model_validate({"model": {"device": "cuda"}, "speculation": {"exits": {"check": CHECK}}})
    settings = settings.model_copy(update={"parallel": parallel(stages)})
    planned = {(one.stage, one.rank): one for one in fit(settings, a, described("3x8x80GiB")).ranks}
    blocks, total = 100, 0
    for number, stage in enumerate(stages_of(parallel(stages), a, CHECK)):
        for rank, piece in enumerate(stage.pieces):
            tensors = meta_tensors(a, piece)
            device = torch.device("meta")
            decoder = TorchDecoder(a, tensors, positions=16, blocks=blocks, block_size=16, device=device, choose=print, piece=piece)
            weights, needs = sum(tensor.nbytes for tensor in decoder._weights.values()), planned.pop((number, rank)).needs
            total += weights
            assert (weights, decoder.cache.pool.nbytes) == (needs.weight_bytes, blocks * needs.block_bytes)
    assert planned == {}
    head, norm = 32000 * 8192 * 2, 8192 * 2
    norms = sum((2 * layers + (number in (0, len(stages) - 1))) * (tp - 1) for number, (layers, tp) in enumerate(stages))
    twice = head + norm if len(stages) > 1 else 0
    assert total == weight_bytes(a, whole(a), torch.bfloat16) + norms * norm + twice


READ = """
import json, sys
from pathlib import Path
import torch
from hispec_ray.model.parallel import piece_of
from hispec_ray.model.weights import open_model

def memory(name):  # of this process alone: ru_maxrss begins at the parent's
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024

source = open_model(sys.argv[1])
a = source.architecture
piece = piece_of(a, range(a.layers), 2, 0)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
weights = source.weights(torch.bfloat16, piece)
print(json.dumps([before, memory("VmHWM"), sum(tensor.nbytes for tensor in weights.values())]))
"""


def test_a_rank_reads_its_share_and_no_more(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 10, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2816}
    config = {"model_type": "llama", **sizes, "vocab_size": 2048, "max_position_embeddings": 512, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    a = read_architecture(str(tmp_path))
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        for parts in layout(a, whole(a)).values()
        for name, shape in zip(parts.names, parts.shapes, strict=True)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) > 200 << 20
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    before, peak, read = json.loads(done.stdout)
    share = weight_bytes(a, piece_of(a, range(10), 2, 0), torch.bfloat16)
    assert read == share
    assert share <= peak - before <= 1.1 * share  # one tensor at a time is in memory twice: as in a large model, a small part of it all


def test_an_exit_too_deep_for_several_stages_is_named(a: Architecture) -> None:
    with pytest.raises(ValueError, match=r"speculation.exits has its deepest at 80; .* it must be from 1 to 79 of the model's 80 layers$"):
        stages_of(parallel([(40, 1), (40, 1)]), a, 80)
