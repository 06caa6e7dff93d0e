"""A chain world with the shipped policy and a configuration to train on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import yaml

from megatron_cgrpo.worlds.quickstart import build_world, quickstart_config

ROOT = Path(__file__).parents[2]


def write_config(root: Path, name: str, **sections) -> Path:
    """The quickstart's Critique-GRPO configuration with changes, as a YAML file."""
    policy = root / "world" / "policy"
    if not policy.exists():
        build_world(root / "world", seed=0)
    raw = quickstart_config(root, policy, "critique_grpo", seed=0, steps=2).model_dump(mode="json")
    raw["run"]["name"] = name
    raw["validation"]["limit"] = 40
    for section, values in sections.items():
        raw[section] |= values
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def start(config: Path, *overrides: str) -> subprocess.Popen:
    """`cgrpo train` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_cgrpo.cli", "train", str(config), *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
    )


def finish(process: subprocess.Popen, timeout_s: float = 400) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); a run that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def leftovers(root: Path) -> list[str]:
    """Processes that still mention this run's directory."""
    found = []
    for p in psutil.process_iter(["cmdline"]):
        line = " ".join(p.info["cmdline"] or [])
        if str(root) in line and p.pid != os.getpid():
            found.append(line)
    return found
