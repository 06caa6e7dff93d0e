"""Whole Hugging Face tensors out of the running shards, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from megatron_cgrpo.conversion.plan import Entry
from megatron_cgrpo.policy.model import PolicyModel
from megatron_cgrpo.policy.parallel import device


def stream_hf(
    model: PolicyModel, everywhere: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every (HF name, tensor) of the model in the order of its plan.

    Collective over all ranks, which must iterate in lockstep: each parameter is gathered over the
    tensor-parallel group of the stage that owns it and sent on to global rank 0; the other ranks
    yield None. With `everywhere` each rank yields the tensor (broadcast over the pipeline).

    Beside the shards a rank holds one gathered parameter and its split copies at a time.
    """
    mine = model.parameters_by_name()
    owners = _owners(model, mine)
    stages = dist.get_process_group_ranks(ps.get_pipeline_model_parallel_group())
    my_stage = ps.get_pipeline_model_parallel_rank()
    takes_part = everywhere or ps.get_data_parallel_rank() == 0
    lead = ps.get_tensor_model_parallel_rank() == 0
    for entry, owner in zip(model.plan, owners):
        parts: list[torch.Tensor | None] = [None] * len(entry.hf_names)
        if takes_part and my_stage == owner:
            name = next(n for n in entry.megatron if n in mine)
            parts = _gather(model, entry, mine[name], keep=lead or everywhere)
        for i, dims in enumerate(entry.hf_shapes):
            part = parts[i]
            if everywhere and len(stages) > 1:
                if my_stage != owner:
                    part = _empty(dims, model)
                part = part.contiguous()
                dist.broadcast(part, stages[owner], group=ps.get_pipeline_model_parallel_group())
            elif takes_part and lead and owner != 0:
                if my_stage == owner:
                    dist.send(part.contiguous(), stages[0])
                    part = None
                elif my_stage == 0:
                    part = _empty(dims, model)
                    dist.recv(part, stages[owner])
            yield entry.hf_names[i], part


def _owners(model: PolicyModel, mine: dict[str, torch.nn.Parameter]) -> list[int]:
    """The pipeline stage that holds each entry, the same list on every rank."""
    held = [any(n in mine for n in e.megatron) for e in model.plan]
    table = torch.tensor(held, dtype=torch.int32, device=device())
    group = ps.get_pipeline_model_parallel_group()
    everyone = [torch.empty_like(table) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, table, group=group)
    return torch.stack(everyone).argmax(0).tolist()


def _gather(
    model: PolicyModel, entry: Entry, parameter: torch.Tensor, keep: bool
) -> list[torch.Tensor | None]:
    local = parameter.detach().contiguous()
    group = ps.get_tensor_model_parallel_group()
    size = dist.get_world_size(group)
    shards = [local]
    if entry.rule.dim is not None and size > 1:
        shards = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(shards, local, group=group)
    if not keep:
        return [None] * len(entry.hf_names)
    return entry.rule.unshard(shards, model.shape)


def _empty(dims: tuple[int, ...], model: PolicyModel) -> torch.Tensor:
    return torch.empty(dims, dtype=model.config.params_dtype, device=device())
