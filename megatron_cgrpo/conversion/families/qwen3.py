"""Qwen3, dense: norms on queries and keys, head_dim of its own."""

from typing import Any

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.families.base import AFTER, ATTENTION, BEFORE, DENSE_MLP, Family


def read_qwen3(hf: dict[str, Any]) -> dict[str, Any]:
    """Switches of the Qwen3 attention."""
    if hf.get("attention_bias"):
        raise ConfigError(f"{hf['model_type']} models with attention_bias are not supported")
    return {"qk_norm": True}


QWEN3 = Family("qwen3", ATTENTION + DENSE_MLP, read_qwen3, BEFORE, AFTER)
