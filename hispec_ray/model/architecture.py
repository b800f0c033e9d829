"""What a checkpoint's config says about the decoder: sizes, kinds of norm and activation, rotary tables, depths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
"""The values of `model_type` that the decoder computes."""

_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_OPT_POSITION_OFFSET = 2  # transformers' OPTLearnedPositionalEmbedding skips two rows
_OPT_NORM_EPS = 1e-5  # OPT's config has no field for it: torch's LayerNorm default


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's shape. Everything that the decoder and the weights' loader need to know of a config.

    attention_limit: the most positions for which attention over all earlier tokens is what the model means: `max_positions`,
        or less. A sliding window of W lets a token see W positions, itself among them, so up to W tokens full attention is the
        same; the decoder computes no windows, so the usable context ends there. The same with longrope, whose frequencies
        change beyond the original length. Whoever sets the context's length must not pass it.
    sliding_window: W where the model has one, else None.
    qkv_bias, out_bias, mlp_bias: whether these products have a bias (`mlp_bias` means both of the MLP's).
    position_offset: what to add to a position to index the learned positions' rows; 0 without learned positions.
    eos_token_ids: every token that ends a sequence, from the config and the generation config, sorted.
    config: the transformers config that all this was read from (for `rope_tables`).
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_positions: int
    attention_limit: int
    sliding_window: int | None
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "relu"]
    gated: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    learned_positions: bool
    position_offset: int
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    config: Any = field(repr=False, compare=False)

    @classmethod
    def from_config(cls, config: Any, generation_config: Any = None) -> Architecture:
        """Read a transformers config (and the generation config's end tokens).

        Raises ValueError where the config asks for something that the decoder does not compute: names the field, its value
        and what is supported.
        """
        check_family(config.model_type)
        _check_common(config)
        eos_ids = _token_ids(config) | _token_ids(generation_config)
        read = _read_opt if config.model_type == "opt" else _read_rotary
        return cls(
            family=config.model_type,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            vocabulary=config.vocab_size,
            max_positions=config.max_position_embeddings,
            tied_head=bool(config.tie_word_embeddings),
            eos_token_ids=tuple(sorted(eos_ids)),
            config=config,
            **read(config),
        )


def check_family(model_type: str | None) -> None:
    """Raise ValueError unless `model_type` is one of FAMILIES."""
    if model_type not in FAMILIES:
        _refuse("model_type", model_type, "one of " + ", ".join(FAMILIES))


def check_exits(layers: int, draft: int, check: int) -> None:
    """Raise ValueError unless 1 <= draft <= check <= layers; all three may be equal (every exit at the full depth)."""
    if not 1 <= draft <= layers:
        raise ValueError(f"speculation.exits.draft is {draft}; it must be from 1 to {layers} (the model's depth)")
    if not draft <= check <= layers:
        raise ValueError(f"speculation.exits.check is {check}; it must be from {draft} (the draft exit) to {layers} (the model's depth)")


def rope_tables(config: Any, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 `[positions, head_dim // 2]` each, as transformers computes them (its scaling factor multiplied in).

    Raises ValueError for a kind of rotary embedding whose frequencies would depend on the running length within `positions`.
    """
    rope = _check_rope(config)
    limit = _rope_limit(config)
    if positions > limit:
        raise ValueError(
            f"the context would have {positions} positions, but rope_parameters.rope_type is {rope['rope_type']!r}, whose frequencies "
            f"change with the running length beyond {limit}; model.max_model_len must be from 1 to {limit}"
        )
    frequencies, scale = _frequencies(config, rope)
    angles = torch.arange(positions)[:, None].float() * frequencies
    return angles.cos() * scale, angles.sin() * scale


def _frequencies(config: Any, rope: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Return the angle that each pair of dimensions turns per position, fp32 `[head_dim // 2]`, and the factor on cos and sin."""
    if rope["rope_type"] != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        return frequencies, scale
    # transformers keeps this kind in each model's own class, not among ROPE_INIT_FUNCTIONS
    size = _head_dim(config)
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0


def _read_rotary(config: Any) -> dict[str, Any]:
    """The fields of llama, mistral, qwen2 and qwen3."""
    family = config.model_type
    if config.hidden_act != "silu":
        _refuse("hidden_act", config.hidden_act, "'silu'")
    if config.num_attention_heads % config.num_key_value_heads:
        _refuse("num_key_value_heads", config.num_key_value_heads, f"a divisor of num_attention_heads ({config.num_attention_heads})")
    _check_rope(config)
    window = _window(config)
    attention_bias = family in ("llama", "qwen3") and bool(config.attention_bias)
    return {
        "kv_heads": config.num_key_value_heads,
        "head_dim": _head_dim(config),
        "intermediate": config.intermediate_size,
        "attention_limit": min(config.max_position_embeddings, _rope_limit(config), window or config.max_position_embeddings),
        "sliding_window": window,
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "activation": "silu",
        "gated": True,
        "qkv_bias": attention_bias or family == "qwen2",
        "out_bias": attention_bias,
        "mlp_bias": family == "llama" and bool(config.mlp_bias),
        "qk_norm": family == "qwen3",
        "learned_positions": False,
        "position_offset": 0,
    }


def _read_opt(config: Any) -> dict[str, Any]:
    for name, wanted in (
        ("activation_function", "relu"),
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
        ("word_embed_proj_dim", config.hidden_size),
    ):
        value = getattr(config, name, wanted)
        if value != wanted:
            _refuse(name, value, f"{wanted!r} (hidden_size)" if name == "word_embed_proj_dim" else repr(wanted))
    return {
        "kv_heads": config.num_attention_heads,
        "head_dim": _head_dim(config),
        "intermediate": config.ffn_dim,
        "attention_limit": config.max_position_embeddings,
        "sliding_window": None,
        "norm": "layer",
        "norm_eps": _OPT_NORM_EPS,
        "activation": "relu",
        "gated": False,
        "qkv_bias": bool(config.enable_bias),
        "out_bias": bool(config.enable_bias),
        "mlp_bias": bool(config.enable_bias),
        "qk_norm": False,
        "learned_positions": True,
        "position_offset": _OPT_POSITION_OFFSET,
    }


def _check_common(config: Any) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else getattr(quantization, "quant_method", quantization)
        _refuse("quantization_config.quant_method", method, "no quantised checkpoints but GGUF files")
    sizes = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
    for name in sizes if config.model_type == "opt" else [*sizes, "num_key_value_heads", "intermediate_size"]:
        if not isinstance(getattr(config, name), int) or getattr(config, name) < 1:
            _refuse(name, getattr(config, name), "a whole number from 1")
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and (not isinstance(head_dim, int) or head_dim < 1):
        _refuse("head_dim", head_dim, "a whole number from 1, or none")
    if head_dim is None and config.hidden_size % config.num_attention_heads:
        _refuse("num_attention_heads", config.num_attention_heads, f"a divisor of hidden_size ({config.hidden_size})")


def _check_rope(config: Any) -> dict[str, Any]:
    """Return the config's rotary parameters, or raise ValueError where they are of a kind that is not computed."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope or "rope_theta" not in rope:
        _refuse("rope_parameters", rope, "one set of rotary parameters, with rope_type and rope_theta, for all layers")
    if rope["rope_type"] not in _ROPE_KINDS:
        _refuse("rope_parameters.rope_type", rope["rope_type"], "one of " + ", ".join(_ROPE_KINDS))
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        _refuse("partial_rotary_factor", partial, "1 (the whole head is turned)")
    return rope


def _rope_limit(config: Any) -> int:
    """The most positions over which the frequencies do not depend on the running length."""
    rope = config.rope_parameters
    if rope["rope_type"] == "longrope":
        return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    if rope["rope_type"] == "dynamic":
        return int(config.max_position_embeddings)
    return 2**31 - 1


def _window(config: Any) -> int | None:
    """The sliding window that is in force in every layer, or None. Raises ValueError where layers differ."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    if kinds not in (["full_attention"], ["sliding_attention"]):
        _refuse("layer_types", ", ".join(kinds), "layers that are all full_attention or all sliding_attention")
    in_force = config.model_type == "mistral" or kinds == ["sliding_attention"]
    window = getattr(config, "sliding_window", None) if in_force else None
    if kinds == ["sliding_attention"] and not window:
        _refuse("sliding_window", window, "a whole number from 1 where layer_types is sliding_attention")
    return window


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _token_ids(config: Any) -> set[int]:
    """The end-of-sequence ids that a config or generation config names."""
    ids = getattr(config, "eos_token_id", None)
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def _refuse(name: str, value: object, valid: str) -> NoReturn:
    raise ValueError(f"the model's config says {name} is {value!r}; supported: {valid}")
