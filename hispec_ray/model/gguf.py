"""Turns a GGUF file into a checkpoint folder: its config, its tokenizer and its dequantised tensors, as Hugging Face has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

CONVERSION = 1
"""The version of what `convert_gguf` writes, part of a converted folder's name: raise it when that changes."""

_SHARD_BYTES = 4 * 2**30
_MODULES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert_gguf(source: Path, folder: Path) -> None:
    """Write a GGUF file into an empty folder as a Hugging Face checkpoint: config, tokenizer, the dequantised values in fp32.

    Raises ValueError where the file is damaged or has something that such a checkpoint would not reproduce.
    """
    try:
        reader = GGUFReader(source)
    except (ValueError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{source.name} is not a whole GGUF file: {error}") from error
    bulky = (".tokens", ".token_type", ".merges", ".scores")
    values = {key: field.contents() for key, field in reader.fields.items() if not key.endswith(bulky)}
    family = values.get("general.architecture")
    if family not in _FAMILIES:
        raise ValueError(f"{source.name}: general.architecture is {family!r}; supported: one of {', '.join(_FAMILIES)}")
    scaling = values.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{source.name}: {family}.rope.scaling.type is {scaling!r}; supported in GGUF files: 'none'")

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(**where)
    config.architectures, config.dtype = [_FAMILIES[family]], torch.float32
    config.head_dim = values.get(f"{family}.attention.key_length") or config.hidden_size // config.num_attention_heads
    turned = values.get(f"{family}.rope.dimension_count", config.head_dim)
    if turned != config.head_dim:
        raise ValueError(f"{source.name}: {family}.rope.dimension_count is {turned}; supported: the head's size, {config.head_dim}")
    config.save_pretrained(folder)
    ends = [values[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in values]
    special = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    GenerationConfig(eos_token_id=sorted(set(ends)) or None, **special).save_pretrained(folder)
    _tokenizer(where, values).save_pretrained(folder)
    _save(_tensors(reader, config, family), folder)


def _tokenizer(where: dict[str, Any], values: dict[str, Any]) -> Any:
    """transformers' tokenizer of a GGUF file, with what its reader leaves out of the split named by `tokenizer.ggml.pre` put right."""
    kind, split = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "default")
    # llama.cpp adds BOS with these two unless the file says otherwise, and takes a whole word that is a token before any merge
    whole_words = split in ("llama-bpe", "tekken")
    tokenizer = AutoTokenizer.from_pretrained(**where, **({"add_bos_token": True} if kind == "gpt2" and whole_words else {}))
    backend = tokenizer.backend_tokenizer
    if kind == "llama":
        return tokenizer
    if kind != "gpt2" or split not in ("smollm", "qwen2", "llama-bpe", "tekken", "gpt-2"):
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r} with tokenizer.ggml.pre {split!r}; supported: 'llama', or 'gpt2' with one of smollm, qwen2, "
            "llama-bpe, tekken, gpt-2"
        )
    if split == "smollm":
        # a digit is a word of its own: without this, spaces before a number are split otherwise than in training
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    elif split == "qwen2":
        backend.normalizer = normalizers.NFC()
    elif whole_words:
        backend.model.ignore_merges = True
    return tokenizer


def _tensors(reader: GGUFReader, config: Any, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors under transformers' names, dequantised to fp32."""
    for tensor in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
        if match is None or match[2] not in _MODULES:
            raise ValueError(f"the GGUF file has a tensor {tensor.name!r}, which is not supported; use the model's Hugging Face checkpoint")
        try:
            value = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ValueError(f"tensor {tensor.name!r} has the quantisation {tensor.tensor_type.name}, which is not supported") from error
        if family == "llama" and match[2] in ("attn_q", "attn_k"):
            # llama.cpp interleaves the two halves of each head's rows for its own kind of rotation
            heads = config.num_attention_heads if match[2] == "attn_q" else config.num_key_value_heads
            value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        yield f"{layer}{_MODULES[match[2]]}.{match[3]}", torch.from_numpy(np.ascontiguousarray(value))


def _save(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write model.safetensors, or several files and their index where one would pass _SHARD_BYTES."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    homes: dict[str, str] = {}

    def write() -> None:
        save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors", metadata={"format": "pt"})
        homes.update(dict.fromkeys(shards[-1], f"model-{len(shards):05}.safetensors"))
        shards[-1].clear()

    size = 0
    for name, tensor in tensors:
        if size and size + tensor.nbytes > _SHARD_BYTES:
            write()
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    write()
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
