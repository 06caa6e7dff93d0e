"""Scaled rotary embeddings, by transformers' own formulas (linear, Llama 3, YaRN).

Megatron's `rope_scaling` switch knows Llama 3's factor only and fixes its other three constants.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_cgrpo.conversion.shape import ModelShape


def scaled_rope(shape: ModelShape) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [head_dim / 2] in float32, factor on cosine and sine)."""
    parameters = dict(shape.rope_scaling)
    config = PretrainedConfig(
        head_dim=shape.head_dim,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.context,
        rope_parameters=parameters,
    )
    config.standardize_rope_params()
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def softmax_scale(shape: ModelShape) -> float | None:
    """Scale of the attention scores; None: 1/√head_dim.

    YaRN multiplies the cosines and sines of queries and keys by a factor, that is the scores by its
    square.
    """
    if shape.rope_scaling is None:
        return None
    _, factor = scaled_rope(shape)
    return None if factor == 1.0 else factor**2 / shape.head_dim**0.5
