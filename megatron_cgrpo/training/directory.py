"""The directory of a run: made, cleared, and where its training is continued from."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.policy.states import STATES, is_complete, latest_state, read_run_state, sweep

STOPPED = "stopped"
"""File that a run leaves when it was asked to stop and did so cleanly."""
LAUNCHED = ("submitted.yaml", "supervisor.py", "slurm", "local", "failures")
"""What launch/ keeps in a run directory."""


def prepare_run_directory(config: Config, again: bool = False) -> Path:
    """Create the run's directory and write the resolved configuration there.

    A directory whose run is to be continued (`training.resume`) stays as it is.

    Args:
        again: the same job is started anew; what it wrote before its first checkpoint is replaced,
            the rest is continued, also with `run.overwrite`.

    Raises:
        ConfigError: when it holds an earlier run that is neither continued nor overwritten, or
            the checkpoint to resume from is not there.
    """
    root = Path(config.run.directory).expanduser().absolute() / config.run.name
    # Before a checkpoint is chosen: one of them may have been replaced half-way.
    sweep(root / STATES)
    if config.run.overwrite and not again:
        wanted = Path(config.training.resume).absolute()
        if root in wanted.parents:
            raise ConfigError(
                f"run.overwrite would delete {root}, which training.resume wants to continue from"
            )
        # Only what was a run of ours.
        if (root / "config.yaml").exists() or (root / "metrics.jsonl").exists():
            _clear(root)
    if again and resume_from(config, root) is None:
        for name in ("metrics.jsonl", "samples.jsonl"):
            (root / name).unlink(missing_ok=True)
    if (root / "metrics.jsonl").exists() and resume_from(config, root) is None:
        raise ConfigError(
            f"{root} holds an earlier run without a checkpoint to continue from; choose another "
            "run.name or set run.overwrite=true"
        )
    resume_from(config, root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / STOPPED).unlink(missing_ok=True)
        (root / "config.yaml").write_text(
            yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
        )
    except OSError as e:
        raise ConfigError(f"cannot write to the run directory {root}: {e.strerror}") from e
    return root


def _clear(root: Path) -> None:
    """Delete a run, but for what its launcher has just put there."""
    for path in root.iterdir():
        if path.name in LAUNCHED:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def resume_from(config: Config, root: Path) -> Path | None:
    """The training checkpoint that this run continues; None for a fresh start.

    Raises:
        ConfigError: when `training.resume` names a path that holds no complete checkpoint.
    """
    wanted = config.training.resume
    if wanted == "never":
        return None
    if wanted == "auto":
        return latest_state(root / STATES)
    if not is_complete(Path(wanted)):
        raise ConfigError(f"training.resume={wanted} is not a complete training checkpoint")
    return Path(wanted)


@dataclass(frozen=True)
class Progress:
    """How far a run had come when it was started.

    `checkpoint` is the one it continues (None: a fresh start), `saved` what rank 0 wrote with it.
    """

    checkpoint: Path | None
    saved: dict[str, Any]

    @property
    def resumed(self) -> bool:
        return self.checkpoint is not None

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self.saved.get("step", 0)

    @property
    def version(self) -> int:
        """Of the policy's weights."""
        return self.saved.get("version", 0)


def read_progress(config: Config, root: Path) -> Progress:
    """Where this run begins; as `resume_from`."""
    checkpoint = resume_from(config, root)
    return Progress(checkpoint, {} if checkpoint is None else read_run_state(checkpoint))
