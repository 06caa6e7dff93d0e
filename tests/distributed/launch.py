"""Start a worker module on several gloo ranks and collect what rank 0 reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_ranks(
    world: int, module: str, job: dict[str, Any], tmp: Path, extra_env: dict[str, str] | None = None
) -> Any:
    """Run `python -m module JOB.json OUT.json` under torchrun; returns the JSON of OUT."""
    job_file, out = tmp / f"job-{world}.json", tmp / f"out-{world}.json"
    job_file.write_text(json.dumps(job))
    env = dict(os.environ, OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", PYTHONWARNINGS="ignore")
    env["PYTHONPATH"] = str(ROOT)
    env |= extra_env or {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={world}", "-m", module, str(job_file), str(out)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise AssertionError(f"{module} on {world} ranks failed:\n{done.stderr[-6000:]}")
    return json.loads(out.read_text())
