"""Whole Hugging Face tensors out of the running shards, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from megatron_cgrpo.conversion.plan import Entry
from megatron_cgrpo.policy.model import PolicyModel, shard_group
from megatron_cgrpo.policy.parallel import device


def stream_hf(
    model: PolicyModel, everywhere: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every (HF name, tensor) of the model in the order of its plan.

    Collective over all ranks, which must iterate in lockstep: each parameter is gathered over the
    (expert-)tensor-parallel group of one owner and sent on to global rank 0; the other ranks
    yield None. With `everywhere` each rank yields the tensor (broadcast over experts and stages).

    Beside the shards a rank holds one gathered parameter and its split copies at a time.
    """
    mine = model.parameters_by_name()
    stages = _stages(model, mine)
    for entry in model.plan:
        owner = _Owner.of(entry, stages[entry.index[:1] or entry.key], model)
        if everywhere:
            parts = _everywhere(model, entry, owner, mine)
        else:
            parts = _to_rank_zero(model, entry, owner, mine)
        yield from zip(entry.hf_names, parts)


@dataclass(frozen=True)
class _Owner:
    """Which ranks hold a parameter: those of a pipeline stage and, for experts, an expert rank."""

    stage: int
    expert: int | None

    @classmethod
    def of(cls, entry: Entry, stage: int, model: PolicyModel) -> _Owner:
        if entry.expert is None:
            return cls(stage, None)
        per_rank = model.shape.experts // ps.get_expert_model_parallel_world_size()
        return cls(stage, entry.expert // per_rank)

    @property
    def mine(self) -> bool:
        return self.stage == ps.get_pipeline_model_parallel_rank() and (
            self.expert is None or self.expert == ps.get_expert_model_parallel_rank()
        )

    @property
    def first_replica(self) -> bool:
        """This rank is in the data-parallel replica that sends."""
        if self.expert is None:
            return ps.get_data_parallel_rank(with_context_parallel=True) == 0
        return ps.get_expert_data_parallel_rank() == 0

    def source(self) -> int:
        """On rank 0: the global rank that sends. Pipeline stages are the outermost dimension."""
        stages = dist.get_process_group_ranks(ps.get_pipeline_model_parallel_group())
        if self.expert is None:
            return stages[self.stage]
        experts = dist.get_process_group_ranks(ps.get_expert_model_parallel_group())
        return experts[self.expert] + stages[self.stage] - stages[0]


def _to_rank_zero(
    model: PolicyModel, entry: Entry, owner: _Owner, mine: dict[str, torch.nn.Parameter]
) -> list[torch.Tensor | None]:
    nothing = [None] * len(entry.hf_names)
    if dist.get_rank() == 0 and owner.source() != 0:
        parts = [_empty(dims, model) for dims in entry.hf_shapes]
        for part in parts:
            dist.recv(part, owner.source())
        return parts
    if not (owner.mine and owner.first_replica):
        return nothing
    lead = shard_group(entry).rank() == 0
    parts = _gather(model, entry, mine, keep=lead)
    if dist.get_rank() == 0:
        return parts
    if lead:
        for part in parts:
            dist.send(part.contiguous(), 0)
    return nothing


def _everywhere(
    model: PolicyModel, entry: Entry, owner: _Owner, mine: dict[str, torch.nn.Parameter]
) -> list[torch.Tensor]:
    if owner.mine:
        parts = [p.contiguous() for p in _gather(model, entry, mine, keep=True)]
    else:
        parts = [_empty(dims, model) for dims in entry.hf_shapes]
    hops = [(ps.get_pipeline_model_parallel_group(), owner.stage)]
    if owner.expert is not None and owner.stage == ps.get_pipeline_model_parallel_rank():
        hops.insert(0, (ps.get_expert_model_parallel_group(), owner.expert))
    for group, index in hops:
        if group.size() > 1:
            for part in parts:
                dist.broadcast(part, dist.get_process_group_ranks(group)[index], group=group)
    return parts


def _stages(model: PolicyModel, mine: dict[str, torch.nn.Parameter]) -> dict[Any, int]:
    """The pipeline stage of every layer, as (layer,), and of every other entry, by key."""
    here = {e.index[:1] or e.key for e in model.plan if any(n in mine for n in e.megatron)}
    group = ps.get_pipeline_model_parallel_group()
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, here, group=group)
    return {place: stage for stage, places in enumerate(everyone) for place in places}


def _gather(
    model: PolicyModel, entry: Entry, mine: dict[str, torch.nn.Parameter], keep: bool
) -> list[torch.Tensor | None]:
    local = next(mine[n] for n in entry.megatron if n in mine).detach().contiguous()
    group = shard_group(entry)
    shards = [local]
    if entry.rule.dim is not None and group.size() > 1:
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local, group=group)
    if not keep:
        return [None] * len(entry.hf_names)
    return entry.rule.unshard(shards, model.shape)


def _empty(dims: tuple[int, ...], model: PolicyModel) -> torch.Tensor:
    return torch.empty(dims, dtype=model.config.params_dtype, device=device())


def drain(tensors: Iterator[Any]) -> None:
    """Take part in a stream whose tensors another rank keeps."""
    for _ in tensors:
        pass
