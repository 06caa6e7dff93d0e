"""Building megatron-core's GPTModel from a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.plan import Entry, check_tensors, fill, plan_for
from megatron_cgrpo.conversion.rules import padded_vocab
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.conversion.shape import ModelShape
from megatron_cgrpo.policy import cpu
from megatron_cgrpo.policy.layers import HiddenOutputLayer, block_spec, has_transformer_engine

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
        tensor_model_parallel_size=p.tensor,
        pipeline_model_parallel_size=p.pipeline,
        virtual_pipeline_model_parallel_size=p.virtual_pipeline,
        expert_model_parallel_size=p.expert,
        sequence_parallel=p.sequence_parallel,
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
            _scale_rope(chunk, shape)
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(chunk)
    model = PolicyModel(chunks, tcfg, shape, plan_for(shape))
    _mark_sharded(model)
    return model


def load_weights(model: PolicyModel, checkpoint: HFCheckpoint) -> None:
    """Fill every parameter from a Hugging Face checkpoint; each rank reads what it holds.

    Raises:
        ValueError: when names or shapes differ from the plan, or a parameter stays unfilled.
    """
    shape = model.shape
    check_tensors(
        model.plan,
        checkpoint.shapes(),
        str(checkpoint.root),
        ignore=("lm_head.weight",) if shape.tied else (),
    )
    tp, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    mine = model.parameters_by_name()
    for entry in model.plan:
        for name in (*entry.megatron, *_tied_copy(entry, model)):
            if name in mine:
                parts = [checkpoint.get(n) for n in entry.hf_names]
                fill(mine.pop(name), entry, parts, shape, tp, rank)
    if mine:
        raise ValueError(f"no weights for the parameters {sorted(mine)}")


def _mark_sharded(model: PolicyModel) -> None:
    """Tell Megatron which parameters are cut over TP ranks: gradient norms and clipping count
    the others once. It marks them itself only with `perform_initialization`.
    """
    mine = model.parameters_by_name()
    for entry in model.plan:
        if entry.rule.dim is None:
            continue
        for name in (*entry.megatron, *_tied_copy(entry, model)):
            if name in mine and not getattr(mine[name], "tensor_model_parallel", False):
                for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    if hasattr(mine[name], attribute):
                        delattr(mine[name], attribute)
                set_tensor_model_parallel_attributes(mine[name], True, entry.rule.dim, 1)


def _tied_copy(entry: Entry, model: PolicyModel) -> tuple[str, ...]:
    """With tied embeddings the last pipeline stage holds a copy under the output layer's name."""
    tied = model.shape.tied and "embedding.word_embeddings.weight" in entry.megatron
    return ("output_layer.weight",) if tied else ()


def _global_name(name: str, chunk: GPTModel) -> str:
    if not name.startswith("decoder.layers."):
        return name
    head, _, tail = name.removeprefix("decoder.layers.").partition(".")
    index = chunk.decoder.layers[int(head)].layer_number - 1
    return f"decoder.layers.{index}.{tail}"


def _scale_rope(chunk: GPTModel, shape: ModelShape) -> None:
    """Llama-3 frequency scaling from the checkpoint's own numbers.

    Megatron's `rope_scaling` switch knows only the factor and fixes the other three constants.
    """
    s = shape.rope_scaling
    rope = chunk.rotary_pos_emb
    inv = rope.inv_freq
    wavelength = 2 * torch.pi / inv
    original, low, high = (
        s["original_max_position_embeddings"],
        s["low_freq_factor"],
        s["high_freq_factor"],
    )
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    rope.inv_freq = (1 - smooth) * inv / s["factor"] + smooth * inv
