"""Which training checkpoints are complete, and which is the latest: files only, no Megatron."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

STATES = "state"
"""Folder of the training checkpoints in a run directory."""
RUN_STATE = "run.json"
LATEST, BEST = "latest", "best"
"""Files that name the newest complete checkpoint and the one with the best validation score."""
VALIDATION = "validation"
"""Key of the validation score in the run state; absent or None where none was taken."""


def is_complete(path: Path) -> bool:
    """A checkpoint gets its run state last, and its name only when it is complete."""
    return (path / RUN_STATE).exists() and not path.name.startswith(".")


def read_run_state(path: Path) -> dict[str, Any]:
    """What rank 0 saved with the checkpoint."""
    return json.loads((path / RUN_STATE).read_text())


def complete_states(root: Path) -> list[Path]:
    """All complete checkpoints, in the order they were written.

    A run that was taken back to an earlier step writes lower numbers later.
    """
    found = [p for p in root.glob("step_*") if is_complete(p)]
    return sorted(found, key=lambda p: ((p / RUN_STATE).stat().st_mtime_ns, p.name))


def latest_state(root: Path) -> Path | None:
    """The checkpoint that `latest` names; the newest complete one if that is gone."""
    pointer = root / LATEST
    if pointer.exists():
        named = root / pointer.read_text().strip()
        if is_complete(named):
            return named
    found = complete_states(root)
    return found[-1] if found else None


def publish(partial: Path, target: Path, run_state: dict[str, Any], keep: int) -> None:
    """Give a written checkpoint its name and point `latest` at it; delete all but the newest
    `keep` and the best by validation."""
    (partial / RUN_STATE).write_text(json.dumps(run_state))
    _sync(partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    root = target.parent
    _point(root, LATEST, target)
    states = complete_states(root)
    best = _best(states)
    if best is not None:
        _point(root, BEST, best)
    for old in states[:-keep]:
        if old != best:
            # Renamed first: a half-deleted one must not look complete.
            doomed = old.with_name(f".{old.name}.old")
            os.replace(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _best(states: list[Path]) -> Path | None:
    """The newest of those with the highest validation score."""
    scored = [(read_run_state(s).get(VALIDATION), s) for s in states]
    return max((pair for pair in scored if pair[0] is not None), default=(None, None))[1]


def _point(root: Path, name: str, target: Path) -> None:
    pointer = root / f".{name}.partial"
    pointer.write_text(target.name + "\n")
    os.replace(pointer, root / name)


def _sync(directory: Path) -> None:
    """Have the disk hold the files before they get the name of a complete checkpoint."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
