"""Which training checkpoints stay, and which is named the latest and the best."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_cgrpo.conversion.directories import written_whole
from megatron_cgrpo.policy.states import (
    complete_states,
    latest_state,
    partial_name,
    publish,
    read_run_state,
    sweep,
)


def save(root: Path, step: int, score: float | None = None, keep: int = 2) -> None:
    target = root / f"step_{step:06d}"
    partial_name(target).mkdir(parents=True)
    publish(partial_name(target), target, {"step": step, "validation": score}, keep)


def steps(root: Path) -> set[int]:
    return {int(p.name.removeprefix("step_")) for p in complete_states(root)}


def test_the_newest_and_the_best_stay(tmp_path):
    for step, score in ((1, 0.2), (2, 0.7), (3, None), (4, 0.5), (5, 0.7), (6, None)):
        save(tmp_path, step, score)
        assert latest_state(tmp_path).name == f"step_{step:06d}"
    # The later of two equal scores.
    assert steps(tmp_path) == {5, 6}
    save(tmp_path, 7), save(tmp_path, 8)
    assert steps(tmp_path) == {5, 7, 8}
    assert (tmp_path / "best").read_text().strip() == "step_000005"


def test_without_validation_there_is_no_best(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1)
    assert steps(tmp_path) == {3} and not (tmp_path / "best").exists()


def test_a_run_taken_back_keeps_what_it_writes(tmp_path):
    for step in (8, 9, 10):
        save(tmp_path, step)
    save(tmp_path, 5)
    assert latest_state(tmp_path).name == "step_000005" and steps(tmp_path) == {5, 10}
    (tmp_path / "latest").unlink()
    assert latest_state(tmp_path).name == "step_000005"


def test_a_copy_with_other_times_keeps_its_order(tmp_path):
    for step in (8, 9):
        save(tmp_path, step)
    os.utime(tmp_path / "step_000008" / "run.json")
    save(tmp_path, 10)
    assert steps(tmp_path) == {9, 10}


def test_a_damaged_run_state_stops_no_other_checkpoint(tmp_path):
    save(tmp_path, 1, 0.5)
    (tmp_path / "step_000001" / "run.json").write_text("{")
    save(tmp_path, 2, 0.1), save(tmp_path, 3, 0.1)
    assert steps(tmp_path) == {2, 3}
    (tmp_path / "step_000003" / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is not valid JSON"):
        read_run_state(latest_state(tmp_path))
    (tmp_path / "step_000003" / "run.json").write_text("[]")
    save(tmp_path, 4, 0.1)
    assert latest_state(tmp_path).name == "step_000004"


def test_what_a_killed_run_left_is_swept(tmp_path):
    save(tmp_path, 1)
    for name in (".step_000002.partial", ".step_000000.doomed", ".step_000001.old"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step_000003.old").mkdir()
    (tmp_path / ".step_000003.old" / "run.json").write_text("{}")
    sweep(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"latest", "step_000001", "step_000003"}


def test_what_was_replaced_comes_back_after_a_kill_between_two_renames(tmp_path):
    target = tmp_path / "out"
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "x").write_text("kept")
    with pytest.raises(RuntimeError), written_whole(target) as partial:
        (partial / "y").write_text("new")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (target / "x").read_text() == "kept"
