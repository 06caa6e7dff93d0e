"""Llama 2, 3, 3.1, 3.2, 3.3."""

from typing import Any

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.families.base import AFTER, ATTENTION, BEFORE, DENSE_MLP, Family


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise ConfigError("llama models with attention_bias or mlp_bias are not supported")
    return {}


LLAMA = Family("llama", ATTENTION + DENSE_MLP, _read, BEFORE, AFTER)
