"""Training checkpoints: resume is bit for bit the straight run, twice in a row; and the same
training goes on at another layout."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.tiny import make_model


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint")
    models = {
        "tied": str(make_model(root / "tied", "qwen3", True)),
        "untied": str(make_model(root / "untied", "qwen2", False)),
    }
    job = {"models": models, "tmp": str(root / "states")}
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
