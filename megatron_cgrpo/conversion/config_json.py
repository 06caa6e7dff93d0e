"""What a Hugging Face config.json says about a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.families import FAMILIES
from megatron_cgrpo.conversion.fields import mapping, number, size
from megatron_cgrpo.conversion.shape import ModelShape

# Scalings that are constants of the model, with what they need; `dynamic` and `longrope` change
# with the sequence.
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}


def shape_of(hf: dict[str, Any]) -> ModelShape:
    """The shape that a parsed config.json describes, in the layout of transformers 4 or 5.

    Raises:
        ConfigError: an architecture or an option that we do not support.
    """
    kind = hf.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(
            f"model_type {kind!r:.60} is not supported; supported: {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(hf)
    theta, scaling = _rope(hf)
    heads, hidden = size(hf, "num_attention_heads"), size(hf, "hidden_size")
    grouped = hf.get("num_key_value_heads") is not None
    shape = ModelShape(
        family=family.model_type,
        layers=size(hf, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size(hf, "num_key_value_heads") if grouped else heads,
        head_dim=_head_dim(hf, hidden, heads),
        ffn=size(hf, "intermediate_size"),
        vocab=size(hf, "vocab_size"),
        context=size(hf, "max_position_embeddings"),
        norm_eps=number(hf, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=hf.get("tie_word_embeddings") is True,
    )
    if heads % shape.kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={shape.kv_heads}"
        )
    try:
        return replace(shape, **family.read(hf))
    except KeyError as e:
        raise ConfigError(f"config.json of a {family.model_type} model lacks {e}") from e


def _refuse_unsupported(hf: dict[str, Any]) -> None:
    quantised = hf.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"the model's weights are quantised ({method!r:.60} in config.json's "
            "quantization_config): take the unquantised model, or dequantise it first"
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {hf['hidden_act']!r:.60} is not supported, only silu")
    if hf.get("use_sliding_window"):
        raise ConfigError("models with use_sliding_window=true are not supported")
    tied = hf.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise ConfigError(f"config.json: tie_word_embeddings is {tied!r:.60}, not true or false")


def _head_dim(hf: dict[str, Any], hidden: int, heads: int) -> int:
    if hf.get("head_dim") is not None:
        return size(hf, "head_dim")
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}, "
            "and there is no head_dim"
        )
    return hidden // heads


def _rope(hf: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling parameters or None)."""
    # transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` + `rope_scaling`.
    rope = mapping(hf, "rope_parameters") or mapping(hf, "rope_scaling")
    base = rope if rope.get("rope_theta") is not None else hf
    theta = number(base, "rope_theta") if base.get("rope_theta") is not None else 10000.0
    kind = rope.pop("type", None)
    rope = {"rope_type": kind or "default", **rope, "rope_theta": theta}
    if not isinstance(rope["rope_type"], str) or rope["rope_type"] not in ROPE_KINDS:
        raise ConfigError(
            f"rope scaling of kind {rope['rope_type']!r:.60} is not supported; supported: "
            f"{', '.join(ROPE_KINDS)}"
        )
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("models with partial_rotary_factor other than 1 are not supported")
    for name in ROPE_KINDS[rope["rope_type"]]:
        number(rope, name)
    return theta, None if rope["rope_type"] == "default" else rope
