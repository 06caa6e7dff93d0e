"""The record of a run, on rank 0: its metrics and timings, and the guards that watch them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import Progress as Bar

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.policy.states import VALIDATION
from megatron_cgrpo.training.directory import STOPPED, Progress
from megatron_cgrpo.training.guards import Watch
from megatron_cgrpo.training.logger import RunLogger, step_line

MOSTLY_TRUNCATED = 0.9
"""Share of truncated responses over which a step warns."""


class Clock:
    """Seconds of the phases of a step, and of the whole step."""

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        """A step begins now; what came before belongs to none."""
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """The phases of this step and `step_s`; the next step begins."""
        now = time.perf_counter()
        lap, self._phases = {**self._phases, "step_s": now - self._start}, {}
        self._start = now
        return lap


class Record:
    """Tells what happens, and asks for a stop when a guard says that going on is of no use.

    Args:
        ask_to_stop: asks all ranks to stop after the current step.
    """

    def __init__(
        self, config: Config, root: Path, progress: Progress, ask_to_stop: Callable[[], None]
    ) -> None:
        self.root, self._steps = root, config.training.steps
        self._logger = RunLogger(config, root, progress)
        self._watch, self._ask_to_stop = Watch(config.training.guards), ask_to_stop
        self._guard: str | None = None
        self._accuracy: float | None = None
        if progress.resumed:
            where = escape(str(progress.checkpoint))
            self.say(f"continuing after step {progress.step} ({where})")

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.close()

    def say(self, text: str) -> None:
        """A line on the console."""
        self._logger.say(text)

    def warn(self, message: str) -> None:
        """A line that stands out."""
        self._logger.warn(message)

    def samples(self, rows: list[dict]) -> None:
        """Lines of samples.jsonl."""
        self._logger.samples(rows)

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar, only on a terminal; what it gives moves it on by one."""
        console = self._logger.console
        with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(title, total=total)
            yield lambda: bar.advance(task)

    def report(self, step: int, values: dict[str, float], seconds: dict[str, float]) -> None:
        """Write a step's metrics, `seconds` of its phases among them, and hold them against the
        guards."""
        self._accuracy = None
        row = values | {f"time/{k}": round(v, 4) for k, v in seconds.items()}
        trained = seconds["score_s"] + seconds["train_s"]
        row["throughput/rollout_tokens_per_s"] = row["tokens/generated"] / seconds["rollout_s"]
        row["throughput/trainer_tokens_per_s"] = row["tokens/scored"] / trained
        self._logger.step(step, row)
        self.say(step_line(step, self._steps, row))
        if row["truncated/initial"] > MOSTLY_TRUNCATED:
            self.warn(
                f"{row['truncated/initial']:.0%} of the responses of step {step} reached "
                "rollout.max_response_tokens: raise it, or is their end token missing "
                "(rollout.stop_token_ids)?"
            )
        warnings, self._guard = self._watch.check(row)
        for warning in warnings:
            self.warn(warning)
        if self._guard is not None:
            self.warn(f"stopping: {self._guard}")
            self._ask_to_stop()

    def validation(self, step: int, score: float | None) -> None:
        """Write the validation score after a step; None: there was nothing to validate on."""
        self._accuracy = score
        if score is not None:
            self._logger.step(step, {"validation/accuracy": score})
            self.say(f"step {step:>4}  validation accuracy {score:.3f}")

    def stopped(self, step: int) -> None:
        """Tell whoever started the run that it was stopped, is complete up to here, and why."""
        (self.root / STOPPED).write_text(f"{step}\n{self._guard or ''}")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the wandb run, and this step's validation score."""
        return {"wandb_id": self._logger.wandb_id, VALIDATION: self._accuracy}
