"""Megatron's data parallelism, (distributed) optimizer and learning-rate schedule."""

from __future__ import annotations

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.policy import cpu
from megatron_cgrpo.policy.model import DTYPES, PolicyModel


def wrap_model(model: PolicyModel, config: Config) -> list[DistributedDataParallel]:
    """The chunks with gradient buffers (float32) reduced over the data-parallel ranks."""
    model.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=config.optimizer.sharded,
    )
    wrapped = []
    with cpu.cuda_names():
        for i, chunk in enumerate(model.chunks):
            inner = Float16Module(model.config, chunk) if model.config.bf16 else chunk
            wrapped.append(
                DistributedDataParallel(model.config, ddp, inner, disable_bucketing=i > 0)
            )
    return wrapped


def build_optimizer(
    chunks: list[DistributedDataParallel], config: Config
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam with decoupled weight decay on matrices only, and its schedule in optimizer steps."""
    o = config.optimizer
    dtype = DTYPES[config.model.dtype]
    with cpu.cuda_names():
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=o.lr,
                min_lr=min(o.min_lr, o.lr),
                weight_decay=o.weight_decay,
                adam_beta1=o.beta1,
                adam_beta2=o.beta2,
                adam_eps=o.eps,
                clip_grad=o.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=o.sharded,
            ),
            chunks,
            use_gloo_process_groups=not torch.cuda.is_available(),
        )
    total = config.training.steps * config.training.mini_batches
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=min(o.min_lr, o.lr),
        lr_warmup_steps=o.warmup_steps,
        lr_decay_steps=max(total, o.warmup_steps + 1),
        lr_decay_style=o.lr_schedule,
        # The multipliers that exempt norms and biases act through this scheduler only.
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


class GradientStash:
    """Finished gradients set aside, so that another pass can be accumulated and added."""

    def __init__(self, chunks: list[DistributedDataParallel]) -> None:
        self._buffers = [b for c in chunks for b in c.buffers + c.expert_parallel_buffers]
        self._kept = [b.grad_data.clone() for b in self._buffers]

    def add_back(self) -> None:
        for buffer, kept in zip(self._buffers, self._kept):
            buffer.grad_data.add_(kept)
