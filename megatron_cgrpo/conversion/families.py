"""Tables of the model families. To add one: a `Table`, an entry in TABLES, a case in ModelShape."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cgrpo.conversion.plan import Line
from megatron_cgrpo.conversion.rules import (
    FUSED_QKV,
    GATED_MLP,
    REPLICATED,
    ROW,
    VOCAB,
)
from megatron_cgrpo.conversion.shape import ModelShape


@dataclass(frozen=True)
class Table:
    before: tuple[Line, ...]
    layer: tuple[Line, ...]
    after: tuple[Line, ...]


def _hidden(s: ModelShape):
    return (s.hidden,)


def _vocab(s: ModelShape):
    return (s.vocab, s.hidden)


def _head(s: ModelShape):
    return (s.head_dim,)


def _q(s: ModelShape):
    return (s.heads * s.head_dim, s.hidden)


def _kv(s: ModelShape):
    return (s.kv_heads * s.head_dim, s.hidden)


def _up(s: ModelShape):
    return (s.ffn, s.hidden)


_MEG = "decoder.layers.{i}."
_HF = "model.layers.{i}."
_ATT = _HF + "self_attn."

_DECODER = Table(
    before=(
        Line(
            ("embedding.word_embeddings.weight",),
            (("model.embed_tokens.weight", _vocab),),
            VOCAB,
        ),
    ),
    layer=(
        Line(
            (
                _MEG + "input_layernorm.weight",
                _MEG + "self_attention.linear_qkv.layer_norm_weight",
            ),
            ((_HF + "input_layernorm.weight", _hidden),),
            REPLICATED,
        ),
        Line(
            (_MEG + "self_attention.linear_qkv.weight",),
            (
                (_ATT + "q_proj.weight", _q),
                (_ATT + "k_proj.weight", _kv),
                (_ATT + "v_proj.weight", _kv),
            ),
            FUSED_QKV,
        ),
        Line(
            (_MEG + "self_attention.linear_qkv.bias",),
            (
                (_ATT + "q_proj.bias", lambda s: _q(s)[:1]),
                (_ATT + "k_proj.bias", lambda s: _kv(s)[:1]),
                (_ATT + "v_proj.bias", lambda s: _kv(s)[:1]),
            ),
            FUSED_QKV,
            when=lambda s: s.qkv_bias,
        ),
        Line(
            (_MEG + "self_attention.q_layernorm.weight",),
            ((_ATT + "q_norm.weight", _head),),
            REPLICATED,
            when=lambda s: s.qk_norm,
        ),
        Line(
            (_MEG + "self_attention.k_layernorm.weight",),
            ((_ATT + "k_norm.weight", _head),),
            REPLICATED,
            when=lambda s: s.qk_norm,
        ),
        Line(
            (_MEG + "self_attention.linear_proj.weight",),
            ((_ATT + "o_proj.weight", lambda s: _q(s)[::-1]),),
            ROW,
        ),
        Line(
            (
                _MEG + "pre_mlp_layernorm.weight",
                _MEG + "mlp.linear_fc1.layer_norm_weight",
            ),
            ((_HF + "post_attention_layernorm.weight", _hidden),),
            REPLICATED,
        ),
        Line(
            (_MEG + "mlp.linear_fc1.weight",),
            ((_HF + "mlp.gate_proj.weight", _up), (_HF + "mlp.up_proj.weight", _up)),
            GATED_MLP,
        ),
        Line(
            (_MEG + "mlp.linear_fc2.weight",),
            ((_HF + "mlp.down_proj.weight", lambda s: _up(s)[::-1]),),
            ROW,
        ),
    ),
    after=(
        Line(("decoder.final_layernorm.weight",), (("model.norm.weight", _hidden),), REPLICATED),
        Line(
            ("output_layer.weight",),
            (("lm_head.weight", _vocab),),
            VOCAB,
            when=lambda s: not s.tied,
        ),
    ),
)

TABLES = {"llama": _DECODER, "qwen2": _DECODER, "qwen3": _DECODER}
