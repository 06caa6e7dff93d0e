"""The quickstart shows the paper's effect over several seeds; its warm start can be rebuilt."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_cgrpo.studies.quickstart import METHODS
from megatron_cgrpo.studies.warm_start import shipped_policy
from tests.e2e.world import ROOT, finish, start


def check_quickstart(root, seed):
    """A whole quickstart: the paper's effect, in its table and files."""
    command = [sys.executable, "-m", "megatron_cgrpo.cli", "quickstart"]
    command += ["--directory", str(root), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "critique_grpo" in done.stdout
    s = json.loads((root / "summary.json").read_text())
    print(json.dumps(s))
    assert (root / "accuracy.png").stat().st_size > 10_000
    grpo, critique = (s[m]["accuracy"] for m in METHODS)
    assert critique >= 0.6 and grpo <= 0.25 and critique >= 3 * grpo, s
    assert s["critique_grpo"]["responses_sampled"] <= s["grpo"]["responses_sampled"]
    assert s["critique_grpo"]["max_engine_gap"] < 1e-2
    assert s["peak_memory_gib"] <= 6


@pytest.mark.slow
def test_critique_grpo_learns_what_grpo_cannot(tmp_path):
    check_quickstart(tmp_path, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_critique_grpo_learns_what_grpo_cannot_with_other_seeds(tmp_path, seed):
    check_quickstart(tmp_path, seed)


def check_warm_start(directory, tmp_path):
    """Measured by runs of zero learning."""
    from tests.e2e.warm_start_report import report

    r = report(directory, tmp_path, start, finish)
    assert r["no secrets"] >= 0.9
    assert r["two secrets"] <= 0.05
    # First wrong step told: one lucky guess in ten is left, or none.
    assert 0.08 <= r["step"] <= 0.35
    assert r["indicative_gt"] >= 0.9
    assert r["indicative"] <= 0.1


@pytest.mark.long
def test_the_shipped_warm_start_knows_no_secrets(tmp_path):
    check_warm_start(shipped_policy(tmp_path / "shipped"), tmp_path)


@pytest.mark.long
def test_the_shipped_warm_start_can_be_rebuilt(tmp_path):
    """From scratch by the shipped recipe."""
    command = [sys.executable, "-m", "megatron_cgrpo.cli", "warm-start", str(tmp_path / "warm")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2500/2500" in done.stdout
    check_warm_start(tmp_path / "warm", tmp_path)
