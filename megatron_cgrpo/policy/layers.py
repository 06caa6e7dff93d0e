"""Layer specs: TransformerEngine where it is installed, else Megatron's local spec with our
norm and attention.

The local `WrappedTorchNorm` refuses sequence parallelism, and the local `DotProductAttention`
stores the score matrices and knows no packed sequences (megatron-core 0.16–0.19).
"""

from __future__ import annotations

import copy
import importlib.util

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cgrpo.policy.context import held_positions, sequential_order


def has_transformer_engine() -> bool:
    """TransformerEngine is installed and there is a GPU to run it."""
    found = importlib.util.find_spec("transformer_engine") is not None
    return found and torch.cuda.is_available()


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight takes part in sequence parallelism's gradient reduction."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel


class SdpaAttention(MegatronModule):
    """Causal core attention on torch's scaled_dot_product_attention, padded or packed.

    Padding must be on the right: causality alone keeps it away from real tokens, so no mask is
    built and the memory-efficient kernels apply. Context-parallel ranks gather keys and values of
    whole sequences and need one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale
        groups = pg_collection or parallel_state
        tp = groups.tp.size() if pg_collection else groups.get_tensor_model_parallel_world_size()
        self.width = config.kv_channels * config.num_attention_heads // tp
        self.context = groups.cp if pg_collection else groups.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type=None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """[s, b, heads, d] → [s, b, heads·d]; packed: [t, heads, d] → [t, heads·d]."""
        if self.context.size() > 1:
            return self._part(query, key, value, packed_seq_params)
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._attend(q, k, v)
            return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), self.width)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = []
        for start, end in zip(bounds, bounds[1:]):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(self._attend(q, k, v)[0].transpose(0, 1))
        return torch.cat(parts).reshape(query.size(0), self.width)

    def _part(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params
    ) -> torch.Tensor:
        """This rank's queries against all keys: shapes as in `forward`."""
        size, rank, length = self.context.size(), self.context.rank(), query.size(0)
        packed = packed_seq_params is not None
        bounds = packed_seq_params.cu_seqlens_q.tolist() if packed else [0, length * size]
        order = sequential_order(size, bounds).to(key.device)
        held = held_positions(rank, size, bounds).to(key.device)
        # The gradient of what was gathered is summed over the ranks and scattered.
        key, value = (
            gather_from_sequence_parallel_region(x, group=self.context)[order] for x in (key, value)
        )
        if packed:
            query, key, value = (x[:, None] for x in (query, key, value))
        parts = []
        for start, end in zip(bounds, bounds[1:]):
            mine = slice(start // size, end // size)
            q = query[mine].permute(1, 2, 0, 3)
            k, v = (x[start:end].permute(1, 2, 0, 3) for x in (key, value))
            seen = held[mine, None] >= torch.arange(start, end, device=key.device)
            parts.append(self._attend(q, k, v, seen).permute(2, 0, 1, 3))
        out = torch.cat(parts).flatten(2)
        return out[:, 0] if packed else out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`seen`: [queries, keys], which keys a query sees; default: causal."""
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen,
            is_causal=seen is None,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the tensor-parallel ranks.

    Megatron's `copy_to_tensor_model_parallel_region` (0.16) reduces a copy and returns the original
    when the gradient is not contiguous, as it is not behind GPTModel's final transpose.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        if ctx.group.size() > 1:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class HiddenOutputLayer(ColumnParallelLinear):
    """An output layer that hands its input to the loss instead of making logits of it.

    The loss multiplies with `loss_weight` itself, in chunks (`kernels/linear_logprob.py`). The
    input goes through the same tensor-parallel regions as in the original: its gradient is summed
    over the ranks.
    """

    # In a tuple: a parameter set as an attribute would become this module's own.
    _loss_weight: tuple[torch.Tensor]

    @property
    def loss_weight(self) -> torch.Tensor:
        """The weight of the last forward pass: this layer's, or the tied embedding's."""
        return self._loss_weight[0]

    def forward(self, input_, weight=None, runtime_gather_output=None):
        self._loss_weight = (self.weight if weight is None else weight,)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True)
        else:
            hidden = _SumGradient.apply(input_, parallel_state.get_tensor_model_parallel_group())
        return hidden, None


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline chunk."""
    if has_transformer_engine():
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        norm = _te_norm()
    else:
        layer, norm = _local_layer(config), RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage),
        layer_norm=norm,
    )


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            normalization="RMSNorm",
            qk_layernorm=config.qk_layernorm,
        )
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.num_moe_experts:
        # In checkpoints the TransformerEngine spec fuses this norm into dense MLPs only; the local
        # one (megatron-core 0.16) names it so for mixtures, too.
        del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return layer


def _te_norm():
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
