"""Triton kernels without a GPU: values under the interpreter, machine code by offline compilation.

The two need different processes: a process that interprets cannot compile.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

ROOT = Path(__file__).parents[2]


def run_cases(name: str, **env: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", f"tests/kernels/{name}.py"],
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr


def test_values_under_the_interpreter():
    run_cases("interpreted_cases", TRITON_INTERPRET="1")


@pytest.mark.parametrize(("world", "interpret"), [(2, True), (4, True), (2, False)])
def test_tensor_parallel_ranks(world, interpret, tmp_path):
    env = {"TRITON_INTERPRET": "1"} if interpret else {}
    report = run_ranks(world, "tests.kernels.tp_worker", {}, tmp_path, env)
    assert report["error"] < 1e-5 and report["triton"] == interpret


def test_machine_code_of_every_configuration(tmp_path):
    run_cases("offline_cases", TRITON_CACHE_DIR=str(tmp_path))
