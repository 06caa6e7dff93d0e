"""Rank 0's side of a step: problems in, judged and refined groups out."""

from __future__ import annotations

import asyncio
import json

from rich.progress import Progress

from megatron_cgrpo.config.checks import context_of
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.problems import load_problems
from megatron_cgrpo.data.prompts import (
    PromptBuilder,
    load_tokenizer,
    refine_template,
    within_limit,
)
from megatron_cgrpo.data.sampler import ProblemSampler
from megatron_cgrpo.feedback.golds import unusable_golds
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.feedback.sandbox import not_isolated
from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.rollout.nodes import Meeting
from megatron_cgrpo.rollout.pipeline import RolloutCounts, RolloutPipeline
from megatron_cgrpo.training.feedback import FeedbackStaff
from megatron_cgrpo.training.logger import RunLogger
from megatron_cgrpo.training.preflight import check_count
from megatron_cgrpo.types import Group, Problem

EXCLUDED = "excluded.jsonl"
"""File of a run with the problems that cannot be judged."""
NAMED = 20


class Controller:
    """Owns data, fleet, verifiers and the asyncio loop they live on.

    Data and prompts are read at construction, the servers are only started there: `wait_ready`
    waits for them, so that the model is built meanwhile.

    Raises:
        ConfigError, DataError: for unusable data, prompts or settings, before any server starts.
    """

    def __init__(
        self,
        config: Config,
        logger: RunLogger,
        resumed: bool = False,
        meeting: Meeting | None = None,
    ) -> None:
        self.config, self._logger = config, logger
        tokenizer = load_tokenizer(config)
        d, v, r = config.data, config.validation, config.rollout
        prompts = PromptBuilder(tokenizer, d, refine_template(config.feedback.refine_prompt))
        problems = load_problems(d.path, d.fields, d.kind, d.limit, d.shuffle_options)
        held_out = []
        if v.path is not None:
            held_out = load_problems(v.path, d.fields, d.kind, v.limit, d.shuffle_options)
        kinds = {p.kind for p in problems + held_out}
        self._pool = VerifierPool(config.feedback, kinds)
        self._runner = asyncio.Runner()
        if "code" in kinds and (reachable := not_isolated()):
            logger.warn(f"programs under test can reach: {reachable}")
        if d.check_golds:
            problems, held_out = self._check_golds(problems, held_out, resumed)
        self._problems, dropped = within_limit(problems, prompts, r.max_prompt_tokens)
        self._validation = []
        if held_out:
            self._validation, more = within_limit(held_out, prompts, r.max_prompt_tokens)
            dropped += more
        if dropped:
            logger.say(f"dropped {dropped} problems with prompts over {r.max_prompt_tokens} tokens")
        check_count(config, len(self._problems))
        self.sampler = ProblemSampler(len(self._problems), config.run.seed, d.shuffle)
        self.fleet = EngineFleet(config, context_of(config), logger.root, meeting=meeting)
        self._staff = FeedbackStaff(config, kinds, self.fleet, prompts, logger.root, logger.warn)
        self._pipeline = RolloutPipeline(
            config, self.fleet, self._pool, self._staff.critic, prompts, self._staff.refiner
        )
        self._fleets = [self.fleet, *self._staff.fleets]
        for fleet in self._fleets:
            fleet.start()

    def _usable(self, problems: list[Problem], path: str | None) -> list[Problem]:
        """Those whose gold answers can be judged against; the others are named.

        Raises:
            ConfigError: when none is left.
        """
        if not problems:
            return []
        with self._progress("gold answers", len(problems)) as advance:
            unusable = self._run(unusable_golds(self._pool, problems, advance))
        with open(self._logger.root / EXCLUDED, "a", encoding="utf-8") as f:
            for name, why in unusable.items():
                f.write(json.dumps({"file": path, "id": name, "reason": why}) + "\n")
        if unusable:
            names = ", ".join(list(unusable)[:NAMED]) + (" …" if len(unusable) > NAMED else "")
            self._logger.warn(
                f"excluded {len(unusable)} problems of {path}: their gold answers cannot be judged "
                f"against ({EXCLUDED}): {names}"
            )
        if len(unusable) == len(problems):
            raise ConfigError(
                f"no gold answer of {path} can be read by its verifier (first reason: "
                f"{next(iter(unusable.values()))}); is data.kind right?"
            )
        return [p for p in problems if p.id not in unusable]

    def _check_golds(
        self, problems: list[Problem], held_out: list[Problem], resumed: bool
    ) -> tuple[list[Problem], list[Problem]]:
        """Both without the problems that cannot be judged. A run that continues leaves out what it
        left out before: its place in the data counts the others."""
        d, v = self.config.data, self.config.validation
        written = self._logger.root / EXCLUDED
        if resumed and written.exists():
            rows = [json.loads(line) for line in written.read_text().splitlines()]
            out = {(r["file"], r["id"]) for r in rows}
            return (
                [p for p in problems if (d.path, p.id) not in out],
                [p for p in held_out if (v.path, p.id) not in out],
            )
        written.unlink(missing_ok=True)
        return self._usable(problems, d.path), self._usable(held_out, v.path)

    def wait_ready(self) -> None:
        """Block until the servers answer."""
        for fleet in self._fleets:
            fleet.wait_ready()
            self._runner.run(fleet.open())

    def rollout(self, step: int) -> tuple[list[Group], RolloutCounts]:
        """The groups of this step.

        Raises:
            EngineError: when the servers cannot be kept alive.
        """
        if self._staff.critic is not None:
            self._staff.critic.begin_step()
        indices = self.sampler.next_batch(self.config.training.problems_per_step)
        problems = [self._problems[i] for i in indices]
        with self._progress(f"rollout {step}", len(problems)) as advance:
            return self._run(self._pipeline.step(step, problems, advance))

    def validate(self) -> float | None:
        """avg@samples on the validation problems; None without any."""
        if not self._validation:
            return None
        with self._progress("validation", len(self._validation)) as advance:
            return self._run(self._pipeline.validate(self._validation, advance))

    def _run(self, coroutine):
        try:
            return self._runner.run(coroutine)
        except BaseExceptionGroup as group:
            # One failed request ends all others of the step: the first error tells why.
            raise _first(group) from group

    def _progress(self, title: str, total: int):
        return _Bar(self._logger, title, total)

    def critic_metrics(self) -> dict[str, float]:
        """What the critic counted in this step."""
        return self._staff.critic.metrics() if self._staff.critic is not None else {}

    @property
    def killed_verifiers(self) -> int:
        return self._pool.killed

    def close(self) -> None:
        """End verifiers and servers."""
        try:
            self._runner.run(self._pool.close())
            self._runner.run(self._staff.close())
            for fleet in self._fleets:
                self._runner.run(fleet.close())
            self._runner.close()
        finally:
            for fleet in self._fleets:
                fleet.stop()


def _first(group: BaseExceptionGroup) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class _Bar:
    """A progress bar while responses come in, only on a terminal."""

    def __init__(self, logger: RunLogger, title: str, total: int) -> None:
        self._progress = Progress(
            console=logger.console, transient=True, disable=not logger.console.is_terminal
        )
        self._title, self._total = title, total

    def __enter__(self):
        self._progress.start()
        task = self._progress.add_task(self._title, total=self._total)
        return lambda: self._progress.advance(task)

    def __exit__(self, *exc) -> None:
        self._progress.stop()
