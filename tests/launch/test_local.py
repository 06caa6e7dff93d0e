"""`python -m launch.local`: a run on this machine through NeMo-Run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cgrpo.studies.runs import read_metrics
from tests.e2e.world import ROOT, write_config

LAUNCHER = Path(f"{sys.prefix}-launch") / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LAUNCHER.exists(), reason=f"no {LAUNCHER} (make launch-env)"),
]


def launch(config: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(LAUNCHER), "-m", "launch.local", str(config), "--python", sys.executable]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_the_exit_code_is_the_runs_outcome(tmp_path):
    config = write_config(tmp_path, "local")
    dry = launch(config, "--dry-run", "training.steps=7")
    assert dry.returncode == 0 and "steps: 7" in dry.stdout and "train" in dry.stdout
    assert not (tmp_path / "local").exists()
    relative = launch(config, "run.directory=runs")
    assert relative.returncode == 2 and "must be an absolute path" in relative.stderr
    refused = launch(config, "data.path=/nowhere.jsonl")
    assert refused.returncode == 1
    assert "data file /nowhere.jsonl does not exist" in refused.stdout + refused.stderr
    done = launch(config, "training.steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_metrics(tmp_path / "local")[-1]["step"] == 1
