"""Every file that is deployed says what `serve run` takes, and fits the model and the machines that it is for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ray.serve.schema import ServeDeploySchema
from transformers import LlamaConfig

from hispec_ray import Settings
from hispec_ray.model.architecture import Architecture
from hispec_ray.model.layout import weight_bytes
from hispec_ray.shard.placement import bundles_of
from hispec_ray.shard.shard import levels_for
from hispec_ray.shard.stages import deepest_exit, stages_of

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("deployments/*.yaml"))
GIB = 2**30
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
LLAMA3_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA2_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
MODELS = {
    "smollm2-135m-instruct": LlamaConfig(**SMOLLM2, vocab_size=49152, tie_word_embeddings=True),
    "facebook/layerskip-llama3-8B": LlamaConfig(**LLAMA3_8B, vocab_size=128256),
    "facebook/layerskip-llama2-70B": LlamaConfig(**LLAMA2_70B, vocab_size=32000),
}
MACHINE = {"hispec-8b.yaml": 24, "hispec-70b.yaml": 40}
"""The memory of the smallest GPU that a file is for, GB."""


def application(file: Path) -> dict[str, Any]:
    content = yaml.safe_load(file.read_text())
    ServeDeploySchema.model_validate(content)
    (one,) = content["applications"]
    assert one["import_path"] == "hispec_ray.serving.app:build"
    return dict(one)


def read(file: Path) -> tuple[Settings, Architecture]:
    settings = Settings.model_validate(application(file)["args"])
    return settings, Architecture.from_config(MODELS[settings.model.path])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_fits_its_model(file: Path) -> None:
    settings, a = read(file)
    depths = [level.depth for level in levels_for(settings.speculation, a.layers)]
    assert depths == [round(a.layers / 8), round(a.layers / 4), a.layers] or settings.speculation.drafter == "lookup"
    if settings.parallel:
        stages = stages_of(settings.parallel, a, deepest_exit(settings.speculation, a.layers))
        assert [layer for stage in stages for layer in stage.layers] == list(range(a.layers))


@pytest.mark.parametrize("name", MACHINE)
def test_weights_and_cache_fit_the_gpu(name: str) -> None:
    settings, a = read(ROOT / "deployments" / name)
    assert settings.model.device == "cuda"
    stages = stages_of(settings.parallel, a, 1) if settings.parallel else ()
    pieces = [piece for stage in stages for piece in stage.pieces]
    weights = [weight_bytes(a, piece, torch.bfloat16) for piece in pieces] or [whole_bytes(a)]
    # the rest is for CUDA itself and what a pass needs
    assert max(weights) + settings.cache.memory_gib * GIB < 0.9 * MACHINE[name] * 1e9


def whole_bytes(a: Architecture) -> int:
    one = Settings.model_validate({"parallel": {"stages": [{}]}}).parallel
    assert one
    return weight_bytes(a, stages_of(one, a, 1)[0].pieces[0], torch.bfloat16)


def test_the_large_models_comments_say_what_its_weights_take() -> None:
    file = ROOT / "deployments" / "hispec-70b.yaml"
    settings, a = read(file)
    assert settings.parallel
    taken = [weight_bytes(a, stage.pieces[0], torch.bfloat16) / GIB for stage in stages_of(settings.parallel, a, 1)]
    assert [float(said) for said in re.findall(r"- \{layers: .* ([\d.]+) GiB", file.read_text())] == pytest.approx(taken, abs=0.05)


def test_each_of_the_large_models_stages_has_a_node() -> None:
    settings, _ = read(ROOT / "deployments" / "hispec-70b.yaml")
    assert settings.parallel
    ranks = [stage.tp for stage in settings.parallel.stages]
    each = {"CPU": 1, "GPU": 1}
    nodes = [{"CPU": 48, "GPU": 4}, {"CPU": 48, "GPU": 4}]
    bundles, _ = bundles_of(ranks, each, nodes)
    assert bundles == [{"CPU": 4, "GPU": 4}] * 2
    with pytest.raises(ValueError, match="stages of 4, 4 ranks do not fit"):
        bundles_of(ranks, each, nodes[:1])


def test_kuberay_serves_what_the_deployment_file_says() -> None:
    service = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())["spec"]
    content = yaml.safe_load(service["serveConfigV2"])
    ServeDeploySchema.model_validate(content)
    alone = yaml.safe_load((ROOT / "deployments" / "hispec-70b.yaml").read_text())
    assert content["http_options"].pop("host") == "0.0.0.0"
    del alone["http_options"]["host"]
    assert content == alone
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert (group["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (2, "4")


def test_the_aws_file_is_one_that_ray_up_takes() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config  # noqa: PLC0415  (Ray's own, and only this test's)

    config = yaml.safe_load((ROOT / "cluster" / "aws-70b.yaml").read_text())
    validate_config(prepare_config(config))
    types = config["available_node_types"]
    assert sum(kind["resources"]["GPU"] * kind.get("max_workers", 1) for kind in types.values()) == 8
