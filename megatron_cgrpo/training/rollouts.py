"""The rollouts of a run, on rank 0: problems in, judged and refined groups out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_cgrpo.algorithm.batch import Batch, build_batch
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import PromptBuilder, load_tokenizer, refine_template
from megatron_cgrpo.data.sampler import ProblemSampler
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.feedback.sandbox import not_isolated
from megatron_cgrpo.rollout.fleet import POLICY, EngineFleet
from megatron_cgrpo.rollout.pipeline import Prompted, RolloutPipeline
from megatron_cgrpo.rollout.server import EngineError
from megatron_cgrpo.rollout.writers import Writer, writer_for
from megatron_cgrpo.training.directory import Progress
from megatron_cgrpo.training.exchange import StopSignal
from megatron_cgrpo.training.metrics import lineages, rollout_metrics
from megatron_cgrpo.training.preflight import check_count
from megatron_cgrpo.training.problem_sets import read_sets, without_unusable_golds
from megatron_cgrpo.training.record import Record


@contextlib.contextmanager
def open_rollouts(
    config: Config,
    root: Path,
    fleets: Mapping[str, EngineFleet],
    progress: Progress,
    record: Record,
) -> Iterator[Rollouts]:
    """Data, prompts, verifiers and the writer of second attempts; no server need be up yet.

    Args:
        fleets: by name; the policy's, and those that the writer asks.

    Raises:
        ConfigError, DataError: for unusable data, prompts or settings.
    """
    template = refine_template(config.feedback.refine_prompt)
    prompts = PromptBuilder(load_tokenizer(config), config.data, template)
    sets = read_sets(config)
    for note in sets.notes:
        record.warn(note)
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        pool = VerifierPool(config.feedback, sets.kinds)
        stack.callback(lambda: runner.run(pool.close()))
        if "code" in sets.kinds and (reachable := not_isolated()):
            record.warn(f"programs under test can reach: {reachable}")
        kinds = sets.kinds
        if config.data.check_golds:
            sets = without_unusable_golds(sets, config, pool, runner.run, record, progress.resumed)
        limit = config.rollout.max_prompt_tokens
        problems, held_out, dropped = sets.prompted(prompts, limit)
        if dropped:
            record.say(f"dropped {dropped} problems with prompts over {limit} tokens")
        check_count(config, len(problems))
        writer = writer_for(config, kinds, fleets, prompts, root, record.warn)
        stack.callback(lambda: runner.run(writer.close()))
        for fleet in fleets.values():
            stack.callback(lambda fleet=fleet: runner.run(fleet.close()))
        pipeline = RolloutPipeline(config, fleets[POLICY], pool, writer)
        rollouts = Rollouts(config, runner, pool, writer, pipeline, problems, held_out, record)
        if progress.resumed:
            rollouts.sampler.load_state_dict(progress.saved["sampler"])
        yield rollouts


class Rollouts:
    """Samples the groups of a step, in the order of the data, and the validation score.

    `metrics` are those of the last step.

    Args:
        runner: of the asyncio loop that fleets, verifiers and writer live on.
    """

    def __init__(
        self,
        config: Config,
        runner: asyncio.Runner,
        pool: VerifierPool,
        writer: Writer,
        pipeline: RolloutPipeline,
        problems: list[Prompted],
        held_out: list[Prompted],
        record: Record,
    ) -> None:
        self._config, self._runner, self._record = config, runner, record
        self._pool, self._writer, self._pipeline = pool, writer, pipeline
        self._problems, self._held_out = problems, held_out
        self.sampler = ProblemSampler(len(problems), config.run.seed, config.data.shuffle)
        self.metrics: dict[str, float] = {}

    def batch(self, step: int, stop: StopSignal) -> Batch | None:
        """The batch of this step. None when whoever asked for a stop ended the engines too
        (Slurm's SIGTERM goes to all processes of a job): its problems are then still to be done.

        Raises:
            EngineError: when the servers cannot be kept alive.
        """
        config, place = self._config, self.sampler.state_dict()
        indices = self.sampler.next_batch(config.training.problems_per_step)
        problems = [self._problems[i] for i in indices]
        self._writer.begin_step()
        try:
            with self._record.progress(f"rollout {step}", len(problems)) as advance:
                groups = self._runner.run(self._pipeline.step(step, problems, advance))
        except EngineError as e:
            if not stop.asked:
                raise
            self.sampler.load_state_dict(place)
            self._record.warn(f"stopping: {e}")
            return None
        self._record.samples(lineages(step, groups, config.training.log_samples))
        self.metrics = {
            **rollout_metrics(groups),
            "verifier/killed": self._pool.killed,
            **self._writer.metrics(),
        }
        t = config.training
        return build_batch(
            groups, config.algorithm, t.mini_batches, config.rollout.max_response_tokens
        )

    def validate(self) -> float | None:
        """avg@samples on the validation problems; None without any."""
        if not self._held_out:
            return None
        with self._record.progress("validation", len(self._held_out)) as advance:
            return self._runner.run(self._pipeline.validate(self._held_out, advance))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the place in the data."""
        return {"sampler": self.sampler.state_dict()}
