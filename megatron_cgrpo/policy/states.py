"""Which training checkpoints are complete, and which is the latest: files only, no Megatron."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron_cgrpo.conversion.directories import (
    OLD,
    PARTIAL,
    hidden_name,
    replace_directory,
    sync_files,
)
from megatron_cgrpo.conversion.safetensors_io import read_json

STATES = "state"
"""Folder of the training checkpoints in a run directory."""
RUN_STATE = "run.json"
LATEST, BEST = "latest", "best"
"""Files that name the newest complete checkpoint and the one with the best validation score."""
VALIDATION = "validation"
"""Key of the validation score in the run state; absent or None where none was taken."""
SEQUENCE = "sequence"
"""Key of a checkpoint's place in the order of writing."""
_DOOMED = "doomed"


def is_complete(path: Path) -> bool:
    """A checkpoint gets its run state last, and its name only when it is complete."""
    return (path / RUN_STATE).exists() and not path.name.startswith(".")


def read_run_state(path: Path) -> dict[str, Any]:
    """What rank 0 saved with the checkpoint.

    Raises:
        ValueError: when the file is damaged.
    """
    state = read_json(path / RUN_STATE)
    if not isinstance(state, dict):
        raise ValueError(f"{path / RUN_STATE} is damaged: it holds no JSON object")
    return state


def complete_states(root: Path) -> list[Path]:
    """All complete checkpoints, in the order they were written.

    A run that was taken back to an earlier step writes lower numbers later.
    """
    found = [p for p in root.glob("step_*") if is_complete(p)]
    return sorted(found, key=lambda p: (_field(p, SEQUENCE) or 0, p.name))


def partial_name(target: Path) -> Path:
    """What a checkpoint is called while it is being written."""
    return hidden_name(target, PARTIAL)


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
    root = target.parent
    last = max((_field(s, SEQUENCE) or 0 for s in complete_states(root)), default=0)
    (partial / RUN_STATE).write_text(json.dumps(run_state | {SEQUENCE: last + 1}))
    sync_files(partial)
    replace_directory(partial, target)
    _point(root, LATEST, target)
    states = complete_states(root)
    best = _best(states)
    if best is not None:
        _point(root, BEST, best)
    for old in states[:-keep]:
        if old != best:
            # Renamed first: a half-deleted one must not look complete.
            doomed = hidden_name(old, _DOOMED)
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what a killed run left of checkpoints it was writing, replacing or deleting."""
    for leftover in root.glob(".step_*"):
        target = root / leftover.stem.removeprefix(".")
        if leftover.suffix == f".{OLD}" and not target.exists():
            os.replace(leftover, target)  # killed between the two renames of `replace_directory`
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _best(states: list[Path]) -> Path | None:
    """The newest of those with the highest validation score."""
    scored = [(_field(s, VALIDATION), i, s) for i, s in enumerate(states)]
    return max((s for s in scored if s[0] is not None), default=(None, None, None))[2]


def _field(path: Path, key: str) -> Any:
    """A field of the run state; None where it or the file is unreadable."""
    try:
        return read_run_state(path).get(key)
    except (OSError, ValueError):
        return None


def _point(root: Path, name: str, target: Path) -> None:
    pointer = root / f".{name}.partial"
    pointer.write_text(target.name + "\n")
    os.replace(pointer, root / name)
