"""Building megatron-core's GPTModel from a Hugging Face directory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.plan import Entry, plan_for
from megatron_cgrpo.conversion.rules import padded_vocab
from megatron_cgrpo.conversion.shape import ModelShape
from megatron_cgrpo.policy import cpu
from megatron_cgrpo.policy.layers import HiddenOutputLayer, block_spec, has_transformer_engine
from megatron_cgrpo.policy.parallel import device
from megatron_cgrpo.policy.rope import scaled_rope, softmax_scale

# Parameters of experts one by one (local_experts.3.linear_fc1.weight) or grouped
# (linear_fc1.weight3), numbered within this rank.
_EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, config: Config) -> TransformerConfig:
    """Megatron's configuration of this model at this layout."""
    dtype, p = DTYPES[config.model.dtype], config.parallel
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }[config.model.recompute]
    return TransformerConfig(
        **_expert_config(shape, config),
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        softmax_scale=softmax_scale(shape),
        tensor_model_parallel_size=p.tensor,
        pipeline_model_parallel_size=p.pipeline,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline,
        num_layers_in_first_pipeline_stage=p.first_stage_layers,
        num_layers_in_last_pipeline_stage=p.last_stage_layers,
        sequence_parallel=p.sequence_parallel,
        context_parallel_size=p.context,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=has_transformer_engine(),
        # Without it, packed sequences cost host synchronisations in every layer.
        apply_rope_fusion=has_transformer_engine(),
        # Micro-batches differ in length; megatron-core asks for this dispatcher even when dense.
        variable_seq_lengths=p.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        # Interleaving with the default p2p gives wrong gradients on gloo, without an error.
        batch_p2p_comm=p.virtual_pipeline is None,
        overlap_p2p_comm=p.virtual_pipeline is not None,
        deallocate_pipeline_outputs=p.pipeline > 1,
        **recompute,
    )


def _expert_config(shape: ModelShape, config: Config) -> dict:
    """Megatron's options of a mixture. No balancing loss: the router learns from the reward."""
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        # Softmax over the chosen logits is the normalised choice of the softmax over all.
        "moe_router_pre_softmax": not shape.normalize_top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": has_transformer_engine(),
        "expert_model_parallel_size": config.parallel.expert,
        "expert_tensor_parallel_size": config.parallel.expert_tensor or config.parallel.tensor,
    }


@dataclass(frozen=True)
class PolicyModel:
    """This rank's model chunks (one, or one per virtual stage) and what they are made from."""

    chunks: list[GPTModel]
    config: TransformerConfig
    shape: ModelShape
    plan: list[Entry]

    def parameters_by_name(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters under global names (layer numbers of the whole model)."""
        out = {}
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                out[_global_name(name, chunk)] = parameter
        return out


def build_model(shape: ModelShape, config: Config) -> PolicyModel:
    """This rank's chunks with uninitialised weights."""
    tcfg = transformer_config(shape, config)
    chunks = []
    stages = range(config.parallel.virtual_pipeline or 1)
    for stage in stages:
        vp = stage if len(stages) > 1 else None
        with cpu.cuda_names():
            chunk = GPTModel(
                tcfg,
                block_spec(tcfg, vp),
                vocab_size=padded_vocab(shape.vocab, config.parallel.tensor),
                max_sequence_length=shape.context,
                position_embedding_type="rope",
                rotary_base=shape.rope_theta,
                rope_scaling=False,
                share_embeddings_and_output_weights=shape.tied,
                parallel_output=True,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
                vp_stage=vp,
            )
        if chunk.post_process and config.model.output_layer == "fused":
            # GPTModel names the class of its output layer itself (a hook comes with 0.18); changing
            # the class keeps its parameters and their names.
            chunk.output_layer.__class__ = HiddenOutputLayer
        if shape.rope_scaling is not None:
            chunk.rotary_pos_emb.inv_freq = scaled_rope(shape)[0].to(device())
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(chunk)
    model = PolicyModel(chunks, tcfg, shape, plan_for(shape))
    _mark_sharded(model)
    return model


def shard_group(entry: Entry) -> dist.ProcessGroup:
    """The ranks over which a parameter is cut: experts have a tensor-parallel size of their own."""
    if entry.expert is not None:
        return ps.get_expert_tensor_parallel_group()
    return ps.get_tensor_model_parallel_group()


def _mark_sharded(model: PolicyModel) -> None:
    """Tell Megatron which parameters are cut over TP ranks: gradient norms and clipping count
    the others once. It marks them itself only with `perform_initialization`.
    """
    mine = model.parameters_by_name()
    for entry in model.plan:
        if entry.rule.dim is None:
            continue
        for name in (*entry.megatron, *tied_copy(entry, model)):
            if name in mine and not getattr(mine[name], "tensor_model_parallel", False):
                for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    if hasattr(mine[name], attribute):
                        delattr(mine[name], attribute)
                set_tensor_model_parallel_attributes(mine[name], True, entry.rule.dim, 1)


def tied_copy(entry: Entry, model: PolicyModel) -> tuple[str, ...]:
    """With tied embeddings the last pipeline stage holds a copy under the output layer's name."""
    tied = model.shape.tied and "embedding.word_embeddings.weight" in entry.megatron
    return ("output_layer.weight",) if tied else ()


def _global_name(name: str, chunk: GPTModel) -> str:
    if not name.startswith("decoder.layers."):
        return name
    head, _, tail = name.removeprefix("decoder.layers.").partition(".")
    layer = chunk.decoder.layers[int(head)]
    expert = _EXPERT.fullmatch(tail)
    if expert is not None:
        first = ps.get_expert_model_parallel_rank() * layer.mlp.num_local_experts
        before, local, after = expert.groups()
        tail = f"{before}{first + int(local)}{after}"
    return f"decoder.layers.{layer.layer_number - 1}.{tail}"
