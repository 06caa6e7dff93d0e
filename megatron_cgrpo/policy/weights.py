"""Initial weights of this rank's model chunks, from either form of checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps

from megatron_cgrpo.conversion.megatron_io import MegatronCheckpoint
from megatron_cgrpo.conversion.plan import check_tensors, fill
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.policy import cpu
from megatron_cgrpo.policy.model import PolicyModel, shard_group, tied_copy


def sharding_metadata() -> dict[str, Any]:
    """How parameters and optimizer state are described in distributed checkpoints."""
    return {
        # The default format cannot be loaded at another data-parallel size on gloo.
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
    }


def load_weights(model: PolicyModel, checkpoint: HFCheckpoint) -> None:
    """Fill every parameter from a Hugging Face checkpoint; each rank reads what it holds.

    Raises:
        ValueError: when names or shapes differ from the plan, or a parameter stays unfilled.
    """
    shape = model.shape
    check_tensors(model.plan, checkpoint.shapes(), checkpoint.root, shape, checkpoint.file_of)
    mine = model.parameters_by_name()
    for entry in model.plan:
        for name in (*entry.megatron, *tied_copy(entry, model)):
            if name in mine:
                parts = [checkpoint.get(n) for n in entry.hf_names]
                group = shard_group(entry)
                fill(mine.pop(name), entry, parts, shape, group.size(), group.rank())
    if mine:
        raise ValueError(f"no weights for the parameters {sorted(mine)}")


def non_finite(model: PolicyModel) -> list[str]:
    """Hugging Face names of the tensors, on any rank, that hold NaN or infinite values. Collective,
    and the same on every rank."""
    made_of = {m: e.hf_names for e in model.plan for m in e.megatron}
    bad = [
        name
        for parameter, tensor in model.parameters_by_name().items()
        if not torch.isfinite(tensor).all()
        for name in made_of.get(parameter, (parameter,))
    ]
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, bad)
    return sorted({name for names in found for name in names})


def load_distributed(model: PolicyModel, root: Path, hf: Path) -> None:
    """Fill every parameter from a distributed checkpoint saved at any layout. Collective.

    Args:
        root: a converted checkpoint or a training checkpoint; its optimizer state is left alone.
        hf: directory with config.json.

    Raises:
        ValueError: when its parameters differ from the model's plan.
    """
    MegatronCheckpoint(root, hf)
    with cpu.cuda_names():
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                # Rows that pad the vocabulary here may be in no checkpoint.
                parameter.data.zero_()
            wanted = {
                name: tensor
                for name, tensor in chunk.sharded_state_dict(metadata=sharding_metadata()).items()
                # TransformerEngine's scaling factors: none in bfloat16 and float32.
                if not name.endswith("_extra_state")
            }
            state = dist_checkpointing.load(wanted, str(root))
            chunk.load_state_dict(state, strict=False)
