"""Process groups: torch.distributed and megatron-core's parallel state."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Parallel
from megatron_cgrpo.policy import cpu


def device() -> torch.device:
    """This rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return cpu.CPU


def initialize(parallel: Parallel, seed: int = 0, timeout_s: float = 7200.0) -> None:
    """Join the job's process group and build Megatron's groups. Reads torchrun's environment.

    Raises:
        ConfigError: if the number of processes is not `parallel.world_size`.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != parallel.world_size:
        raise ConfigError(
            f"{world} processes were started but parallel.world_size is {parallel.world_size}"
        )
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    join(timeout_s)
    _leave_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        create_gloo_process_groups=not torch.cuda.is_available(),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 1234)
    torch.manual_seed(seed)


def join(timeout_s: float) -> None:
    """Join the job's process group, once. Reads torchrun's environment."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and "MASTER_ADDR" not in os.environ:
        # One process needs no rendezvous: no port is taken.
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    else:
        dist.init_process_group(backend, timeout=timeout)


def _leave_groups() -> None:
    """End the groups of an earlier layout in this process.

    megatron-core 0.16's `destroy_model_parallel` forgets most groups without destroying them: each
    of gloo's keeps three threads that wake up all the time.
    """
    from megatron.core import parallel_state

    known = dist.distributed_c10d._world.pg_map
    groups = [g for g in parallel_state._global_process_group_list or [] if g is not None]
    if groups:
        # What is left of an earlier model holds its groups, and so their threads.
        gc.collect()
        dist.barrier()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group in known:
            dist.destroy_process_group(group)


def shutdown() -> None:
    """Leave all groups (every rank must call it)."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
