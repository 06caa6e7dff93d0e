"""Which training checkpoints stay, and which is named the latest and the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_cgrpo.conversion.directories import written_whole
from megatron_cgrpo.policy.states import complete_states, latest_state, publish


def save(root: Path, step: int, score: float | None = None, keep: int = 2) -> None:
    partial = root / f".step_{step:06d}.partial"
    partial.mkdir(parents=True)
    publish(partial, root / f"step_{step:06d}", {"step": step, "validation": score}, keep)


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


def test_what_was_replaced_comes_back_after_a_kill_between_two_renames(tmp_path):
    target = tmp_path / "out"
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "x").write_text("kept")
    with pytest.raises(RuntimeError), written_whole(target) as partial:
        (partial / "y").write_text("new")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (target / "x").read_text() == "kept"
