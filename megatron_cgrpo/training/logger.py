"""Console, metrics.jsonl, samples.jsonl and wandb. Only rank 0 has one."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

import yaml
from rich.console import Console
from rich.markup import escape

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.policy.states import STATES, is_complete, latest_state, sweep
from megatron_cgrpo.process import stop_signals_held

STOPPED = "stopped"
"""File that a run leaves when it was asked to stop and did so cleanly."""
LAUNCHED = ("submitted.yaml", "slurm", "local", "failures")
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


class RunLogger:
    """Writes what happens; every line is flushed, so that a killed run loses none."""

    def __init__(self, config: Config, root: Path, resumed: dict[str, Any] | None = None) -> None:
        self.root = root
        self.console = Console(quiet=not config.logging.progress, soft_wrap=True)
        if resumed is not None:
            # Steps after the checkpoint are done again.
            for name in ("metrics.jsonl", "samples.jsonl"):
                _keep_steps(root / name, resumed["step"])
        self.wandb_id = config.logging.wandb.id or (resumed or {}).get("wandb_id")
        self._metrics = open(root / "metrics.jsonl", "a", encoding="utf-8")
        self._samples = open(root / "samples.jsonl", "a", encoding="utf-8")
        self._wandb = self._start_wandb(config)
        self._start = time.time()

    def _start_wandb(self, config: Config):
        w = config.logging.wandb
        if w.mode == "disabled":
            return None
        import wandb

        self.wandb_id = self.wandb_id or uuid.uuid4().hex[:8]
        with stop_signals_held():
            return wandb.init(
                project=w.project,
                name=config.run.name,
                id=self.wandb_id,
                resume="allow",
                mode=w.mode,
                dir=str(self.root),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True, console="off"),
            )

    def step(self, step: int, values: dict[str, Any]) -> None:
        """One line of metrics."""
        row = {"step": step, "elapsed_s": round(time.time() - self._start, 3), **values}
        self._write(self._metrics, [row])
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def samples(self, rows: list[dict]) -> None:
        """Lines of samples.jsonl."""
        self._write(self._samples, rows)

    def _write(self, file: TextIO, rows: list[dict]) -> None:
        """A full disk costs lines of the log, not the run."""
        try:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
        except OSError as e:
            self.warn(f"cannot write {file.name}: {e.strerror}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def warn(self, message: str) -> None:
        """Say what somebody else worded: nothing in it is markup."""
        self.say(f"[bold red]{escape(message)}[/]")

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._wandb is not None:
            self._wandb.finish()


def _keep_steps(path: Path, last: int) -> None:
    """Drop the lines of steps after `last`, and a line that a crash cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line)
        except json.JSONDecodeError:
            continue
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


def step_line(step: int, steps: int, m: dict[str, Any]) -> str:
    """The console's line of a step."""
    parts = [
        f"step {step:>4}/{steps}",
        f"reward {m['reward/initial']:.3f}",
        f"failed {m['groups/all_failed']:.2f}",
    ]
    if m["samples/refinements_attempted"]:
        parts.append(f"rescued {m['groups/rescue_rate']:.2f}")
        parts.append(f"ρ {m['policy/rho_mean']:.2f}")
    parts += [
        f"entropy {m['policy/entropy']:.3f}",
        f"|g| {m['gradient/norm']:.3f}",
        f"gap {m['policy/engine_gap_max']:.1e}",
        f"{m['time/step_s']:.1f} s",
    ]
    if m["truncated/initial"] > 0.9:
        parts.append("[bold red]over 90 % of responses are truncated[/]")
    return "  ".join(parts)
