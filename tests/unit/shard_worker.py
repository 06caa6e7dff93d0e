"""Builds single ranks of large jobs on the meta device and reports their parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_cgrpo.config import parse_config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.policy import cpu


def shard(job: dict, rank: int) -> dict:
    """Parameters of one rank, dense and of experts, and where it stands."""
    from megatron.core import parallel_state as ps

    from megatron_cgrpo.policy.model import build_model

    config, shape = parse_config(job["config"]), shape_of(job["hf"])
    p = config.parallel
    dist.init_process_group("fake", rank=rank, world_size=p.world_size, store=FakeStore())
    ps.initialize_model_parallel(
        p.tensor,
        p.pipeline,
        p.virtual_pipeline,
        context_parallel_size=p.context,
        expert_model_parallel_size=p.expert,
        expert_tensor_parallel_size=p.expert_tensor,
        create_gloo_process_groups=False,
    )
    with torch.device("meta"):
        model = build_model(shape, config)
    sizes = {n: q.numel() for n, q in model.parameters_by_name().items()}
    assert all(q.device.type == "meta" for q in model.parameters_by_name().values())
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    found = {
        "stage": ps.get_pipeline_model_parallel_rank(),
        "dense": sum(sizes.values()) - experts,
        "experts": experts,
    }
    ps.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def main(jobs: list[dict], out: Path) -> None:
    cpu.install()
    out.write_text(json.dumps([[shard(j, r) for r in j["ranks"]] for j in jobs]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
