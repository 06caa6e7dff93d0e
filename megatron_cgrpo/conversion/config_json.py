"""What a Hugging Face config.json says about a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.families import FAMILIES
from megatron_cgrpo.conversion.shape import ModelShape

# Scalings that are constants of the model; `dynamic` and `longrope` change with the sequence.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def shape_of(hf: dict[str, Any]) -> ModelShape:
    """The shape that a parsed config.json describes, in the layout of transformers 4 or 5.

    Raises:
        ConfigError: an architecture or an option that we do not support.
    """
    family = FAMILIES.get(hf.get("model_type"))
    if family is None:
        raise ConfigError(
            f"model_type {hf.get('model_type')!r} is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {hf['hidden_act']!r} is not supported, only silu")
    if hf.get("use_sliding_window"):
        raise ConfigError("models with use_sliding_window=true are not supported")
    theta, scaling = _rope(hf)
    try:
        heads = hf["num_attention_heads"]
        shape = ModelShape(
            family=family.model_type,
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            ffn=hf["intermediate_size"],
            vocab=hf["vocab_size"],
            context=hf["max_position_embeddings"],
            norm_eps=hf["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            tied=bool(hf.get("tie_word_embeddings", False)),
        )
        return replace(shape, **family.read(hf))
    except KeyError as e:
        raise ConfigError(f"config.json of a {family.model_type} model lacks {e}") from e


def _rope(hf: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling parameters or None)."""
    # transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` + `rope_scaling`.
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.pop("type", None)
    rope = {"rope_type": kind or "default", **rope, "rope_theta": theta}
    if rope["rope_type"] not in ROPE_KINDS:
        raise ConfigError(
            f"rope scaling of kind {rope['rope_type']!r} is not supported; supported: "
            f"{', '.join(ROPE_KINDS)}"
        )
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("models with partial_rotary_factor other than 1 are not supported")
    return theta, None if rope["rope_type"] == "default" else rope
