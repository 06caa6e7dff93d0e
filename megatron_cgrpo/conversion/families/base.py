"""What a family's table is made of, and the lines that most decoders share.

Shapes are names of dimensions, read from `ModelShape`: "q hidden" is (heads · head_dim, hidden).
`{i}` is a layer's number, `{e}` an expert's, both counted over the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_cgrpo.conversion.rules import (
    FUSED_QKV,
    GATED_MLP,
    REPLICATED,
    ROW,
    VOCAB,
    Rule,
)

MEG = "decoder.layers.{i}."
HF = "model.layers.{i}."
_ATT = HF + "self_attn."


@dataclass(frozen=True)
class Line:
    """One row of a family's table.

    Attributes:
        megatron: the parameter's names in Megatron's layer specs (local, TransformerEngine); the
            last one is its name in distributed checkpoints.
        hf: the Hugging Face tensors it is made of, with their shapes.
        rule: how they are fused and cut over ranks.
        when: the switch of `ModelShape` that must be on for the line to apply.
    """

    megatron: tuple[str, ...]
    hf: tuple[tuple[str, str], ...]
    rule: Rule
    when: str | None = None


@dataclass(frozen=True)
class Family:
    """A family of models: the lines of its embedding, of a layer, and of what follows.

    `read` turns config.json into the switches of `ModelShape` that set the family apart; it raises
    ConfigError for what we cannot run.
    """

    model_type: str
    layer: tuple[Line, ...]
    read: Callable[[dict[str, Any]], dict[str, Any]]
    before: tuple[Line, ...]
    after: tuple[Line, ...]


BEFORE = (
    Line(
        ("embedding.word_embeddings.weight",),
        (("model.embed_tokens.weight", "vocab hidden"),),
        VOCAB,
    ),
)
AFTER = (
    Line(("decoder.final_layernorm.weight",), (("model.norm.weight", "hidden"),), REPLICATED),
    Line(("output_layer.weight",), (("lm_head.weight", "vocab hidden"),), VOCAB, when="untied"),
)
ATTENTION = (
    Line(
        (
            MEG + "input_layernorm.weight",
            MEG + "self_attention.linear_qkv.layer_norm_weight",
        ),
        ((HF + "input_layernorm.weight", "hidden"),),
        REPLICATED,
    ),
    Line(
        (MEG + "self_attention.linear_qkv.weight",),
        (
            (_ATT + "q_proj.weight", "q hidden"),
            (_ATT + "k_proj.weight", "kv hidden"),
            (_ATT + "v_proj.weight", "kv hidden"),
        ),
        FUSED_QKV,
    ),
    Line(
        (MEG + "self_attention.linear_qkv.bias",),
        (
            (_ATT + "q_proj.bias", "q"),
            (_ATT + "k_proj.bias", "kv"),
            (_ATT + "v_proj.bias", "kv"),
        ),
        FUSED_QKV,
        when="qkv_bias",
    ),
    Line(
        (MEG + "self_attention.q_layernorm.weight",),
        ((_ATT + "q_norm.weight", "head_dim"),),
        REPLICATED,
        when="qk_norm",
    ),
    Line(
        (MEG + "self_attention.k_layernorm.weight",),
        ((_ATT + "k_norm.weight", "head_dim"),),
        REPLICATED,
        when="qk_norm",
    ),
    Line(
        (MEG + "self_attention.linear_proj.weight",),
        ((_ATT + "o_proj.weight", "hidden q"),),
        ROW,
    ),
)
DENSE_MLP = (
    Line(
        (MEG + "pre_mlp_layernorm.weight", MEG + "mlp.linear_fc1.layer_norm_weight"),
        ((HF + "post_attention_layernorm.weight", "hidden"),),
        REPLICATED,
    ),
    Line(
        (MEG + "mlp.linear_fc1.weight",),
        ((HF + "mlp.gate_proj.weight", "ffn hidden"), (HF + "mlp.up_proj.weight", "ffn hidden")),
        GATED_MLP,
    ),
    Line(
        (MEG + "mlp.linear_fc2.weight",),
        ((HF + "mlp.down_proj.weight", "hidden ffn"),),
        ROW,
    ),
)
