"""Rank 0's side of a step: problems in, judged and refined groups out."""

from __future__ import annotations

import asyncio

from rich.progress import Progress

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.problems import load_problems
from megatron_cgrpo.data.prompts import (
    PromptBuilder,
    load_tokenizer,
    refine_template,
    within_limit,
)
from megatron_cgrpo.data.sampler import ProblemSampler
from megatron_cgrpo.feedback.critics import make_critic
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.rollout.pipeline import RolloutCounts, RolloutPipeline
from megatron_cgrpo.training.logger import RunLogger
from megatron_cgrpo.training.preflight import check_count
from megatron_cgrpo.types import Group


class Controller:
    """Owns data, fleet, verifiers and the asyncio loop they live on.

    Data and prompts are read at construction, the servers are only started there: `wait_ready`
    waits for them, so that the model is built meanwhile.

    Raises:
        ConfigError, DataError: for unusable data, prompts or settings, before any server starts.
    """

    def __init__(self, config: Config, context: int, logger: RunLogger) -> None:
        self.config, self._logger = config, logger
        tokenizer = load_tokenizer(config)
        d, v, r = config.data, config.validation, config.rollout
        prompts = PromptBuilder(tokenizer, d, refine_template(config.feedback.refine_prompt))
        problems = load_problems(d.path, d.fields, d.kind, d.limit, d.shuffle_options)
        self._problems, dropped = within_limit(problems, prompts, r.max_prompt_tokens)
        self._validation = []
        if v.path is not None:
            held_out = load_problems(v.path, d.fields, d.kind, v.limit, d.shuffle_options)
            self._validation, more = within_limit(held_out, prompts, r.max_prompt_tokens)
            dropped += more
        if dropped:
            logger.say(f"dropped {dropped} problems with prompts over {r.max_prompt_tokens} tokens")
        check_count(config, len(self._problems))
        self.sampler = ProblemSampler(len(self._problems), config.run.seed, d.shuffle)
        kinds = {p.kind for p, _ in self._problems + self._validation}
        critic = None
        if config.algorithm.refines:
            critic = make_critic(config.algorithm.critique, kinds)
        self._pool = VerifierPool(config.feedback, kinds)
        self.fleet = EngineFleet(config, context, logger.root)
        self._pipeline = RolloutPipeline(config, self.fleet, self._pool, critic, prompts)
        self._runner = asyncio.Runner()
        self.fleet.start()

    def wait_ready(self) -> None:
        """Block until the servers answer."""
        self.fleet.wait_ready()
        self._runner.run(self.fleet.open())

    def rollout(self, step: int) -> tuple[list[Group], RolloutCounts]:
        """The groups of this step.

        Raises:
            EngineError: when the servers cannot be kept alive.
        """
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

    @property
    def killed_verifiers(self) -> int:
        return self._pool.killed

    def close(self) -> None:
        """End verifiers and servers."""
        try:
            self._runner.run(self._pool.close())
            self._runner.run(self.fleet.close())
            self._runner.close()
        finally:
            self.fleet.stop()


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
