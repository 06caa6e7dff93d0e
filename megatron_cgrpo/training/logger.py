"""Console, metrics.jsonl, samples.jsonl and wandb. Only rank 0 has one."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config


def prepare_run_directory(config: Config) -> Path:
    """Create the run's directory and write the resolved configuration there.

    Raises:
        ConfigError: when it holds the metrics of another run and `run.overwrite` is off.
    """
    root = Path(config.run.directory).expanduser().absolute() / config.run.name
    if (root / "metrics.jsonl").exists():
        if not config.run.overwrite:
            raise ConfigError(
                f"{root} holds an earlier run; choose another run.name or set run.overwrite=true"
            )
        shutil.rmtree(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "config.yaml").write_text(
            yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
        )
    except OSError as e:
        raise ConfigError(f"cannot write to the run directory {root}: {e.strerror}") from e
    return root


class RunLogger:
    """Writes what happens; every line is flushed, so that a killed run loses none."""

    def __init__(self, config: Config, root: Path) -> None:
        self.root = root
        self.console = Console(quiet=not config.logging.progress, soft_wrap=True)
        self._metrics = open(root / "metrics.jsonl", "a", encoding="utf-8")
        self._samples = open(root / "samples.jsonl", "a", encoding="utf-8")
        self._wandb = self._start_wandb(config)
        self._start = time.time()

    def _start_wandb(self, config: Config):
        w = config.logging.wandb
        if w.mode == "disabled":
            return None
        import wandb

        return wandb.init(
            project=w.project,
            name=config.run.name,
            id=w.id,
            mode=w.mode,
            dir=str(self.root),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def step(self, step: int, values: dict[str, Any]) -> None:
        """One line of metrics."""
        row = {"step": step, "elapsed_s": round(time.time() - self._start, 3), **values}
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def samples(self, rows: list[dict]) -> None:
        for row in rows:
            self._samples.write(json.dumps(row) + "\n")
        self._samples.flush()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._wandb is not None:
            self._wandb.finish()


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
