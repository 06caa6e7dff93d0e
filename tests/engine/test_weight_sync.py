"""Null sync, real sync and engine faults with real vLLM servers and Megatron shards."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.tiny import make_model

CASES = {
    "tied, TP=2, faults": ("qwen3", True, {"tensor": 2}, 1, True),
    "tied, PP=2, engine TP=2": ("qwen2", True, {"pipeline": 2}, 2, False),
    "untied mixture, EP=2": ("qwen3_moe", False, {"expert": 2}, 1, False),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if "mixture" in c else ()) for c in CASES]
)
def test_weight_sync(case, tmp_path):
    family, tied, layout, engine_tensor, faults = CASES[case]
    # vLLM's CPU experts pad narrower layers, and refuse to load them a second time.
    wide = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    job = {
        "root": str(make_model(tmp_path / "a", family, tied, seed=0, **wide)),
        "other": str(make_model(tmp_path / "b", family, tied, seed=1, **wide)),
        "tmp": str(tmp_path),
        "layout": layout,
        "engine_tensor": engine_tensor,
        "faults": faults,
        "export": "PP=2" in case,
    }
    r = run_ranks(2, "tests.engine.sync_worker", job, tmp_path)
    assert r["fresh_gap"] < 1e-4
    assert r["null_sync_equal"]
    assert r["changed"] and r["new_gap"] < 1e-4
    assert r["push"]["bytes"] > 100_000
    if job["export"]:
        assert r["export_serves_the_same"]
    if faults:
        assert r["answers_after_kill"] == 24
        assert r["lost"] >= 1 and r["restarts"] == 1
        assert r["survived_after_s"] < 200
        assert r["same_weights_after_restart"]
        assert r["served_after_failed_push"] and r["version"] == 3
        assert r["final_restarts"] == 2
