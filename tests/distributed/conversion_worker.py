"""One rank of the round trips: converted checkpoint → this layout → training checkpoint → HF."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_tools import megatron_to_hf
from megatron_cgrpo.config import parse_config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.policy.parallel import initialize


def round_trip(case: dict) -> list[str]:
    """Names of tensors that are not the same bits in this layout's weights."""
    from megatron_cgrpo.policy.actor import MegatronActor
    from megatron_cgrpo.policy.checkpoint import StateSaver
    from megatron_cgrpo.policy.export import stream_hf
    from megatron_cgrpo.policy.model import shard_group

    config = parse_config(
        {
            "model": {
                "path": case["root"],
                "weights": case["megatron"],
                "dtype": case["dtype"],
            },
            "data": {"path": "unused"},
            "parallel": {"world_size": 4, **case["layout"]},
            "rollout": {"max_prompt_tokens": 60, "max_response_tokens": 60},
            "training": {"micro_batch_tokens": 256},
        }
    )
    initialize(config.parallel)
    shape = shape_of(json.loads((Path(case["root"]) / "config.json").read_text()))
    original = HFCheckpoint(case["root"])
    actor = MegatronActor(config, shape, original)
    wrong = [
        name
        for name, tensor in stream_hf(actor.model, everywhere=True)
        if not torch.equal(tensor, original.get(name))
    ]
    for entry in (e for e in actor.model.plan if e.rule.pads):
        for name in (n for n in entry.megatron if n in actor.model.parameters_by_name()):
            rows = actor.model.parameters_by_name()[name]
            first = len(rows) * shard_group(entry).rank()
            if rows[max(shape.vocab - first, 0) :].any():
                wrong.append(f"padding of {name}")
    out = Path(case["out"])
    StateSaver(actor, out, keep=1).save(1, {"step": 1, "version": 0})
    if dist.get_rank() == 0:
        args = argparse.Namespace(
            megatron=out / "step_000001",
            hf=None,
            out=out / "hf",
            force=False,
            threads=2,
            file_gb=0.0001,
        )
        assert megatron_to_hf.main(args) == 0
    dist.barrier()
    return wrong


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    results = [round_trip(case) for case in job["cases"]]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
