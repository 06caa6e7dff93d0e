"""Console, metrics.jsonl, samples.jsonl and wandb. Only rank 0 has one."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.process import stop_signals_held
from megatron_cgrpo.training.directory import Progress


class RunLogger:
    """Writes what happens; every line is flushed, so that a killed run loses none."""

    def __init__(self, config: Config, root: Path, continued: Progress | None = None) -> None:
        self.root = root
        self.console = Console(quiet=not config.logging.progress, soft_wrap=True)
        saved: dict[str, Any] = {}
        if continued is not None and continued.resumed:
            saved = continued.saved
            # Steps after the checkpoint are done again.
            for name in ("metrics.jsonl", "samples.jsonl"):
                _keep_steps(root / name, continued.step)
        self.wandb_id = config.logging.wandb.id or saved.get("wandb_id")
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
    return "  ".join(parts)
