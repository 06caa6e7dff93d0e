"""One rank of the checkpoint checks: resume identity, and loading at another layout."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_cgrpo.algorithm.batch import build_batch
from megatron_cgrpo.config import parse_config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.policy.parallel import initialize
from tests.groups import groups


def build(root: str, layout: dict, **optimizer):
    from megatron_cgrpo.policy.actor import MegatronActor

    config = parse_config(
        {
            "model": {"path": root, "dtype": "float32"},
            "data": {"path": "unused"},
            "parallel": {
                "world_size": dist.get_world_size() if dist.is_initialized() else 2,
                **layout,
            },
            "optimizer": {"lr": 1e-2, "lr_schedule": "linear", "warmup_steps": 3, **optimizer},
            "algorithm": {"responses": 4, "refinements": 2},
            "rollout": {"max_prompt_tokens": 60, "max_response_tokens": 60},
            "training": {"problems_per_step": 4, "micro_batch_tokens": 256, "steps": 8},
        }
    )
    initialize(config.parallel)
    shape = shape_of(json.loads((Path(root) / "config.json").read_text()))
    return MegatronActor(config, shape, HFCheckpoint(root))


def run(actor, first, last):
    """Steps first … last − 1 on data that depends on the step; the gradient norms."""
    norms = []
    for step in range(first, last):
        batch = build_batch(groups(step, 4), actor.config.algorithm, 1, 60)
        micro_batches = actor.prepare(batch, 1)
        actor.score(micro_batches)
        norms.append(actor.train(micro_batches[0]).grad_norm)
    return norms


def tensors(actor):
    from megatron_cgrpo.policy.export import stream_hf

    return {n: t.clone() for n, t in stream_hf(actor.model, everywhere=True)}


def full_disk(actor, root: Path, background: bool) -> dict:
    """A checkpoint that fits, one that does not, and one when there is room again."""
    from megatron_cgrpo.policy.checkpoint import CheckpointError, StateSaver

    if dist.get_rank() == 0:
        (root / ".step_000009.partial").mkdir(parents=True)
    saver, failed = StateSaver(actor, root, 2, background), False
    saver.save(1, {})
    saver.wait()
    if dist.get_rank() == 0:
        (root / "filler").write_bytes(bytes(shutil.disk_usage(root).free - 100_000))
    dist.barrier()
    try:
        saver.save(2, {})
        saver.wait()
    except CheckpointError:
        failed = True
    left = sorted(p.name for p in root.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "filler").unlink()
    dist.barrier()
    again = StateSaver(actor, root, 2, background)
    again.save(3, {})
    again.wait()
    return {"failed": failed, "left": left, "then": sorted(p.name for p in root.iterdir())}


def main(job: dict, out: str) -> None:
    from megatron_cgrpo.policy.checkpoint import StateSaver, load_state
    from megatron_cgrpo.policy.states import latest_state

    report = {}
    states = Path(job["tmp"])
    for name, root in job["models"].items():
        for sharded in (True, False):
            where = states / f"{name}-{sharded}"
            layout = {"tensor": 2}
            straight = build(root, layout, sharded=sharded)
            want = run(straight, 0, 6)
            end = tensors(straight)
            actor = build(root, layout, sharded=sharded)
            norms = []
            # Before the first update, as when no group of a whole run has a learning signal.
            StateSaver(actor, where, 2).save(0, {"step": 0})
            for part in range(3):
                if part or sharded:
                    actor = build(root, layout, sharded=sharded)
                    load_state(actor, latest_state(where))
                norms += run(actor, 2 * part, 2 * part + 2)
                StateSaver(actor, where, 2).save(2 * part + 2, {"step": 2 * part + 2})
            same = all(torch.equal(t, end[n]) for n, t in tensors(actor).items())
            kept = sorted(p.name for p in where.glob("step_*"))
            # At other layouts, from the middle.
            moved, far = [], []
            for other_layout in ({"pipeline": 2}, {"context": 2}):
                other = build(root, other_layout, sharded=sharded)
                load_state(other, where / "step_000004")
                norms_there = run(other, 4, 6)
                moved += [abs(a - b) / b for a, b in zip(norms_there, want[4:])]
                far += [(t - end[n]).abs().max().item() for n, t in tensors(other).items()]
            report[f"{name}, sharded={sharded}"] = {
                "norms_equal": norms == want,
                "weights_equal": same,
                "kept": kept,
                "moved": max(moved),
                "moved_weights": max(far),
                "lr": [actor._lr(), other._lr(), straight._lr()],
            }
    if job["small_disk"]:
        for name, background in (("foreground", False), ("background", True)):
            actor = build(job["models"]["untied"], {"tensor": 2})
            report[name] = full_disk(actor, Path(job["small_disk"]) / name, background)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
