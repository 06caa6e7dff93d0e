"""A chain world with the shipped policy and a configuration to train on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import yaml

from megatron_cgrpo.studies.quickstart import build_world, quickstart_config

ROOT = Path(__file__).parents[2]
MARK = "CGRPO_TEST_RUN"


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
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {MARK: str(config)},
    )


def finish(process: subprocess.Popen, timeout_s: float = 400) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); a run that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def _weights() -> set[Path]:
    return set(Path("/dev/shm").glob("cgrpo-weights-*"))


_BEFORE = _weights()


def leftovers(root: Path) -> list[str]:
    """What a run in `root` left behind: processes, and weights in shared memory.

    Ranks and verifiers carry a mark in their environment; engine cores overwrite theirs, so every
    one of them counts (tests run one after the other).
    """
    found = [str(p) for p in _weights() - _BEFORE]
    for p in psutil.process_iter(["cmdline", "environ", "name", "status"]):
        if p.info["status"] == psutil.STATUS_ZOMBIE or p.pid == os.getpid():
            continue
        line = " ".join(p.info["cmdline"] or [])
        marked = (p.info["environ"] or {}).get(MARK, "").startswith(str(root))
        if marked or str(root) in line or (p.info["name"] or "").startswith("VLLM"):
            found.append(f"{p.pid} {p.info['name']} {line}")
    return found
