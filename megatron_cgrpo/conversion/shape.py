"""What a Hugging Face config.json says about a decoder, in one flat form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_cgrpo.config.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and switches of a dense decoder. `family` names its table of tensors."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> ModelShape:
        """From a parsed config.json, in the layout of transformers 4 or 5.

        Raises:
            ConfigError: an architecture or an option that we do not support.
        """
        family = hf.get("model_type")
        if family not in ("llama", "qwen2", "qwen3"):
            raise ConfigError(
                f"model_type {family!r} is not supported; supported: llama, qwen2, qwen3"
            )
        if hf.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act {hf['hidden_act']!r} is not supported, only silu")
        if hf.get("use_sliding_window"):
            raise ConfigError("models with use_sliding_window=true are not supported")
        if family in ("llama", "qwen3") and (hf.get("attention_bias") or hf.get("mlp_bias")):
            raise ConfigError(f"{family} models with attention_bias or mlp_bias are not supported")
        # transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` + `rope_scaling`.
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ConfigError(f"rope scaling of kind {kind!r} is not supported")
        heads = hf["num_attention_heads"]
        return cls(
            family=family,
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            ffn=hf["intermediate_size"],
            vocab=hf["vocab_size"],
            context=hf["max_position_embeddings"],
            norm_eps=hf["rms_norm_eps"],
            rope_theta=float(theta),
            rope_scaling=rope if kind == "llama3" else None,
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
