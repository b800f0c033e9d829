"""Tiny random checkpoints of every supported family, made with transformers, for tests that need weights but not sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

_COMMON = {
    "vocab_size": 300, "num_hidden_layers": 4, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GATED = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", **_GATED, "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", **_GATED, "num_attention_heads": 8, "rope_parameters": _LLAMA3_ROPE},
    "smollm": {"model_type": "llama", **_GATED, "hidden_size": 48, "num_attention_heads": 6, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_GATED, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **_GATED},
    "qwen3": {"model_type": "qwen3", **_GATED, "hidden_size": 48, "head_dim": 16, "tie_word_embeddings": True},
    "opt": {
        "model_type": "opt", "hidden_size": 48, "ffn_dim": 96, "num_attention_heads": 4, "max_position_embeddings": 256,
        "activation_function": "relu",
    },
}  # fmt: skip
"""What each family's config says, by the name that `make_checkpoint` takes."""


def make_config(family: str, **overrides: Any) -> Any:
    """Return the transformers config of a family, with `overrides` on top of FAMILIES."""
    values = {**_COMMON, **FAMILIES[family], **overrides}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def make_checkpoint(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a random fp32 model of a family (without a tokenizer) into `folder` and return it. Same arguments, same weights.

    Norm weights lie around 1, biases and layer norms' shifts are not zero, matrices keep the rows' size: nothing in the
    weights may be left out without the logits telling.
    """
    model = AutoModelForCausalLM.from_config(make_config(family, **overrides), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 0.2)
            elif parameter.dim() == 1:
                parameter.copy_(1 + noise * 0.1)
            else:
                parameter.copy_(noise * (0.5 if "embed" in name else parameter.shape[1] ** -0.5))
    model.save_pretrained(folder)
    return Path(folder)


def make_gguf(path: Path, checkpoint: Path, kind: str = "gpt2", split: str = "smollm", **fields: Any) -> Path:
    """Write a tiny llama, qwen2 or qwen3 checkpoint as an fp32 GGUF file, the way llama.cpp's converter does, and return its path.

    The vocabulary of 300 is three special tokens, the 256 bytes and 41 merges. `fields` are further metadata strings.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    family, size = config.model_type, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [f"Ġ {letter}" for letter in letters] + ["Ġ Ġ", "Ċ Ċ"] + [f"t {letter}" for letter in letters[:13]]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for key, value in fields.items():
        writer.add_string(key, value)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            # LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = np.ascontiguousarray(value.reshape(heads, 2, size // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape))
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        writer.add_tensor(stored, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
