"""Training checkpoints: resume is bit for bit the straight run, twice in a row; and the same
training goes on at another layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.disk import small_disk
from tests.distributed.launch import ROOT, run_ranks
from tests.tiny import make_model


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint")
    models = {
        "tied": str(make_model(root / "tied", "qwen3", True)),
        "untied": str(make_model(root / "untied", "qwen2", False)),
    }
    (root / "disk").mkdir()
    with small_disk(root / "disk", "64m") as mounted:
        job = {
            "models": models,
            "tmp": str(root / "states"),
            "small_disk": str(root / "disk") if mounted else None,
        }
        return run_ranks(2, "tests.distributed.checkpoint_worker", job, root)


CASES = [f"{m}, sharded={s}" for m in ("tied", "untied") for s in (True, False)]


@pytest.mark.parametrize("case", CASES)
def test_resume_is_identical(report, case):
    r = report[case]
    assert r["norms_equal"] and r["weights_equal"], r
    assert r["kept"] == ["step_000004", "step_000006"]
    assert len(set(r["lr"])) == 1


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_at_another_layout(report, case):
    r = report[case]
    assert r["moved"] < 1e-3 and r["moved_weights"] < 1e-3, r


@pytest.mark.parametrize("how", ["foreground", "background"])
def test_a_full_disk_leaves_the_complete_ones(report, how):
    if how not in report:
        pytest.skip("needs the right to mount a tmpfs")
    r = report[how]
    assert r["failed"], r
    assert r["left"] == ["filler", "latest", "step_000001"]
    assert r["then"] == ["latest", "step_000001", "step_000003"]


@pytest.mark.slow
def test_killed_while_saving_twenty_times(tmp_path):
    """SIGKILL at random moments, in foreground and background saves: what `latest` names loads and
    holds the weights that were saved, and no life begins before where the last one got to."""
    job = {
        "model": str(make_model(tmp_path / "model", "qwen3", True)),
        "states": str(tmp_path / "states"),
        "tmp": str(tmp_path),
        "kills": 20,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    env = dict(os.environ, OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.crash_worker"]
        + [str(tmp_path / "job.json"), str(tmp_path / "out.json")],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["steps"]) == 20 and result["steps"] == sorted(result["steps"])
    assert result["killed_while_saving"] >= 5, result
    assert set(p.name for p in (tmp_path / "states").glob("[a-z]*")) >= {"latest"}
