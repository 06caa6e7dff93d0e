"""One problem's way through a step: generate → verify → second attempts → verify → select.

Every problem moves on as soon as its own responses are in: there is no barrier between the
waves, so critiques and refinements of one problem hide behind the generation of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from megatron_cgrpo.algorithm.advantages import with_advantages
from megatron_cgrpo.algorithm.seeds import derived_seed
from megatron_cgrpo.algorithm.selection import is_answer_copy, select_refinements, trigger_fires
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.feedback.chat_models import Generator
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.rollout import events
from megatron_cgrpo.rollout.events import Collector
from megatron_cgrpo.rollout.writers.base import Attempt, Work, Writer, sample
from megatron_cgrpo.types import Completion, Group, Problem, Role, Sample

T = TypeVar("T")
Prompted = tuple[Problem, tuple[int, ...]]
"""A problem and the token ids of its own prompt."""


class RolloutPipeline:
    """Turns problems into judged, refined groups with advantages.

    Args:
        engines: those of the policy.
        writer: of the second attempts.
    """

    def __init__(
        self, config: Config, engines: Generator, pool: VerifierPool, writer: Writer
    ) -> None:
        self._config, self._engines = config, engines
        self._pool, self._writer = pool, writer

    async def step(
        self, step: int, problems: Sequence[Prompted], on_group: Callable[[], None] = lambda: None
    ) -> list[Group]:
        """The groups of one step, in the order of `problems`."""
        return await _all(problems, lambda problem, ids: self.group(step, problem, ids), on_group)

    async def group(self, step: int, problem: Problem, prompt_ids: tuple[int, ...]) -> Group:
        """The whole way of one problem (paper, algorithm 1)."""
        a, collector = self._config.algorithm, Collector()
        key = (self._config.run.seed, step, problem.id)
        work = Work(problem, prompt_ids, key, collector)
        initial = await self.respond(work)
        judged = [s for s in initial if s.verdict.correct is not None]
        refined: list[Sample] = []
        if trigger_fires(a.trigger, [bool(s.verdict.correct) for s in judged]):
            refined = await self.refine(work, judged)
        seen = [s for s in refined if s.verdict.correct is not None]
        kept = select_refinements(seen, a, "/".join(map(str, key)), judged)
        dropped = len(initial) - len(judged) + len(refined) - len(seen)
        work.emit(events.UNJUDGED, dropped)
        group = Group(
            problem,
            prompt_ids,
            tuple(judged),
            tuple(s.rebase(prompt_ids) for s in kept),
            attempted=len(refined),
            rescued=any(s.verdict.correct for s in kept),
            dropped=dropped,
            events=dict(collector.sums),
        )
        return with_advantages(group, a.normalize_std)

    async def respond(self, work: Work) -> list[Sample]:
        """The n initial responses to a problem, with the verdicts that count as rewards."""
        n, seed = self._config.algorithm.responses, work.seed("initial")
        completions = await sample(self._engines, self._config.rollout, work.prompt_ids, n, seed)
        work.emit(events.INITIAL_TOKENS, sum(len(c.token_ids) for c in completions))
        initial = await self._judge(work.problem, "initial", completions)
        return await self._writer.labelled(work, initial)

    async def refine(self, work: Work, responses: list[Sample]) -> list[Sample]:
        """The writer's second attempts, judged likewise."""
        start = asyncio.get_running_loop().time()

        async def one(pending: Awaitable[Attempt | None]) -> Sample | None:
            attempt = await pending
            return None if attempt is None else await self._judge_attempt(work.problem, attempt)

        made = await asyncio.gather(*map(one, self._writer.attempts(work, responses)))
        refined = await self._writer.labelled(work, [s for s in made if s is not None])
        self._count_copies(work, responses, refined)
        work.emit(events.REFINED_GROUPS)
        work.emit(events.REFINE_SECONDS, asyncio.get_running_loop().time() - start)
        return refined

    def _count_copies(self, work: Work, responses: list[Sample], refined: list[Sample]) -> None:
        share = self._config.algorithm.answer_copy_share
        for s in refined:
            if s.critique is not None and s.critique.shows_answer:
                work.emit(events.RIGHT_WITH_ANSWER, s.verdict.correct is True)
                copied = is_answer_copy(s, responses[s.parent], share)
                work.emit(events.ANSWER_COPIES, copied)

    async def _judge(
        self, problem: Problem, role: Role, completions: list[Completion]
    ) -> list[Sample]:
        verdicts = await asyncio.gather(*(self._pool.grade(problem, c.text) for c in completions))
        return [Sample(problem.id, role, c, v) for c, v in zip(completions, verdicts)]

    async def _judge_attempt(self, problem: Problem, attempt: Attempt) -> Sample:
        verdict = await self._pool.grade(problem, attempt.completion.text)
        return Sample(
            problem.id,
            "refinement",
            attempt.completion,
            verdict,
            attempt.critique,
            attempt.parent,
        )

    async def validate(
        self, problems: Sequence[Prompted], on_group: Callable[[], None] = lambda: None
    ) -> float:
        """avg@samples: the mean share of right responses; unjudged ones count as wrong."""
        v = self._config.validation

        async def one(problem: Problem, prompt_ids: tuple[int, ...]) -> float:
            completions = await self._engines.generate(
                prompt_ids,
                n=v.samples,
                temperature=v.temperature,
                seed=derived_seed(self._config.run.seed, "validation", problem.id),
                max_tokens=self._config.rollout.max_response_tokens,
            )
            samples = await self._judge(problem, "initial", completions)
            return sum(s.verdict.correct is True for s in samples) / len(samples)

        shares = await _all(problems, one, on_group)
        return sum(shares) / len(shares)


async def _all(
    problems: Sequence[Prompted],
    make: Callable[[Problem, tuple[int, ...]], Awaitable[T]],
    on_done: Callable[[], None],
) -> list[T]:
    """What `make` gives for each problem, in their order; when one fails, the others' requests end
    and its error is raised."""

    async def one(problem: Problem, prompt_ids: tuple[int, ...]) -> T:
        made = await make(problem, prompt_ids)
        on_done()
        return made

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(p, ids)) for p, ids in problems]
    except BaseExceptionGroup as group:
        # The first error tells why; the others followed from it.
        raise first_error(group) from group
    return [t.result() for t in running]


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The first error in a group of errors."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
