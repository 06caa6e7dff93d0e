"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from megatron_cgrpo.conversion.families.base import AFTER, ATTENTION, BEFORE, DENSE_MLP, Family

QWEN2 = Family("qwen2", ATTENTION + DENSE_MLP, lambda hf: {"qkv_bias": True}, BEFORE, AFTER)
