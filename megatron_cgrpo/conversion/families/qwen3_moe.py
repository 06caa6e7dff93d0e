"""Qwen3 mixture of experts: the Qwen3 attention, a router and routed experts in every layer."""

from typing import Any

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.families.base import (
    AFTER,
    ATTENTION,
    BEFORE,
    HF,
    MEG,
    Family,
    Line,
)
from megatron_cgrpo.conversion.families.qwen3 import read_qwen3
from megatron_cgrpo.conversion.fields import size
from megatron_cgrpo.conversion.rules import GATED_MLP, REPLICATED, ROW

_EXPERT = HF + "mlp.experts.{e}."
_LOCAL = MEG + "mlp.experts.local_experts.{e}."
# TransformerEngine's grouped experts.
_GROUPED = MEG + "mlp.experts."


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    if hf.get("mlp_only_layers") or hf.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "qwen3_moe models with dense layers (mlp_only_layers, decoder_sparse_step) are not "
            "supported"
        )
    return read_qwen3(hf) | {
        # transformers ≥ 5.19 writes `num_local_experts`, the published files `num_experts`.
        "experts": size(hf, "num_experts", "num_local_experts"),
        "experts_per_token": size(hf, "num_experts_per_tok"),
        "expert_ffn": size(hf, "moe_intermediate_size"),
        "normalize_top_k": bool(hf.get("norm_topk_prob", False)),
    }


_EXPERTS = (
    Line(
        (MEG + "pre_mlp_layernorm.weight",),
        ((HF + "post_attention_layernorm.weight", "hidden"),),
        REPLICATED,
    ),
    Line((MEG + "mlp.router.weight",), ((HF + "mlp.gate.weight", "experts hidden"),), REPLICATED),
    Line(
        (_GROUPED + "linear_fc1.weight{e}", _LOCAL + "linear_fc1.weight"),
        (
            (_EXPERT + "gate_proj.weight", "expert_ffn hidden"),
            (_EXPERT + "up_proj.weight", "expert_ffn hidden"),
        ),
        GATED_MLP,
    ),
    Line(
        (_GROUPED + "linear_fc2.weight{e}", _LOCAL + "linear_fc2.weight"),
        ((_EXPERT + "down_proj.weight", "hidden expert_ffn"),),
        ROW,
    ),
)

QWEN3_MOE = Family("qwen3_moe", ATTENTION + _EXPERTS, _read, BEFORE, AFTER)
