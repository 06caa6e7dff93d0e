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
LATEST = "latest"


def is_complete(path: Path) -> bool:
    """A checkpoint gets its run state last, and its name only when it is complete."""
    return (path / RUN_STATE).exists() and not path.name.startswith(".")


def read_run_state(path: Path) -> dict[str, Any]:
    """What rank 0 saved with the checkpoint."""
    return json.loads((path / RUN_STATE).read_text())


def complete_states(root: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted(p for p in root.glob("step_*") if is_complete(p))


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
    """Give a written checkpoint its name, point `latest` at it, delete all but `keep`."""
    (partial / RUN_STATE).write_text(json.dumps(run_state))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    pointer = target.with_name(f".{LATEST}.partial")
    pointer.write_text(target.name + "\n")
    os.replace(pointer, target.with_name(LATEST))
    for old in complete_states(target.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
