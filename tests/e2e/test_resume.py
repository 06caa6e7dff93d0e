"""A stopped run goes on as if it had never stopped: same metrics, same weights, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.studies.runs import read_metrics
from tests.e2e.world import finish, start, write_config

# What may differ between two runs of the same thing: times, and the engine's log-probs in their
# last bits (they depend on which requests it happens to batch together).
VARYING = (
    "time/",
    "throughput/",
    "push/",
    "elapsed_s",
    "policy/engine_gap",
    "policy/context_shift_kl",
)


def rows(run):
    return [
        {k: v for k, v in r.items() if not k.startswith(VARYING)}
        for r in read_metrics(run)
        if "reward/initial" in r
    ]


@pytest.mark.slow
def test_resume_identity(tmp_path):
    training = {"steps": 4, "checkpoint_every": 1}
    parallel = {"world_size": 2, "tensor": 2}
    straight = write_config(tmp_path, "straight", training=training, parallel=parallel)
    code, out, err = finish(start(straight))
    assert code == 0, out + err
    split = write_config(tmp_path, "split", training=training, parallel=parallel)
    for steps in (2, 3, 4):
        code, out, err = finish(start(split, f"training.steps={steps}"))
        assert code == 0, out + err
        assert ("continuing after step" in out) == (steps > 2)
    assert rows(tmp_path / "split") == rows(tmp_path / "straight")
    ends = [
        HFCheckpoint(tmp_path / n / "checkpoints" / "step_000004") for n in ("split", "straight")
    ]
    assert all(torch.equal(*(e.get(n) for e in ends)) for n in ends[0].shapes())
    kept = sorted(p.name for p in (tmp_path / "split" / "state").glob("step_*"))
    assert kept == ["step_000003", "step_000004"]
    samples = (tmp_path / "split" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(x)["step"] for x in samples] == [1, 1, 2, 2, 3, 3, 4, 4]
