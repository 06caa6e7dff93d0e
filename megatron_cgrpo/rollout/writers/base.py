"""What a writer of second attempts is asked, and what it gives."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from megatron_cgrpo.algorithm.seeds import derived_seed
from megatron_cgrpo.config.schema import Rollout
from megatron_cgrpo.feedback.chat_models import Generator
from megatron_cgrpo.rollout.events import Emit
from megatron_cgrpo.types import Completion, Critique, Problem, Sample


@dataclass(frozen=True)
class Work:
    """One problem in one step.

    `key` is what the seeds of its requests are derived from; `emit` is told what happens.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    key: tuple[object, ...]
    emit: Emit

    def seed(self, *parts: object) -> int:
        """The seed of one request."""
        return derived_seed(*self.key, *parts)


@dataclass(frozen=True)
class Attempt:
    """A second attempt, not yet judged. `parent`: index of the response that it refines."""

    completion: Completion
    critique: Critique | None = None
    parent: int | None = None


class Writer:
    """Who writes second attempts, from which prompt, with which engines, and whose label counts.

    This one writes none: the writer of runs without refinements.
    """

    def attempts(
        self, work: Work, responses: Sequence[Sample]
    ) -> Sequence[Awaitable[Attempt | None]]:
        """The second attempts at a problem with these judged responses, each to be awaited; None
        for one that could not be made (why is an event)."""
        return ()

    async def labelled(self, work: Work, samples: list[Sample]) -> list[Sample]:
        """The samples with the verdicts that count as rewards; the verifier's, unless a writer
        knows better."""
        return samples

    def begin_step(self) -> None:
        """A new step: budgets and counts start at zero."""

    def metrics(self) -> dict[str, float]:
        """Counts of the step that are not of single groups."""
        return {}

    async def close(self) -> None:
        """Leave connections and files; the engines are not its own."""


async def sample(
    engines: Generator, options: Rollout, prompt_ids: tuple[int, ...], n: int, seed: int
) -> list[Completion]:
    """n responses as rollouts are sampled."""
    return await engines.generate(
        prompt_ids,
        n=n,
        temperature=options.temperature,
        seed=seed,
        max_tokens=options.max_response_tokens,
    )
