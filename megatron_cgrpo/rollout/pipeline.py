"""One problem's way through a step: generate → verify → critique → refine → verify → select.

Every problem moves on as soon as its own responses are in: there is no barrier between the
waves, so critiques and refinements of one problem hide behind the generation of others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_cgrpo.algorithm.advantages import with_advantages
from megatron_cgrpo.algorithm.selection import select_refinements, trigger_fires
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import PromptBuilder
from megatron_cgrpo.feedback.critics import Critic
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.types import Completion, Critique, Group, Problem, Sample


def derived_seed(*parts: object) -> int:
    """A 31-bit seed that depends on nothing but its parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass
class RolloutCounts:
    """What happened on the way, for the metrics of a step."""

    generated_tokens: int = 0
    refinement_tokens: int = 0
    shortened_responses: int = 0
    refinements_not_fitting: int = 0
    unjudged: int = 0
    refine_seconds: list[float] = field(default_factory=list)


class RolloutPipeline:
    """Turns problems into judged, refined groups with advantages."""

    def __init__(
        self,
        config: Config,
        fleet: EngineFleet,
        pool: VerifierPool,
        critic: Critic | None,
        prompts: PromptBuilder,
    ) -> None:
        self._config, self._fleet, self._pool = config, fleet, pool
        self._critic, self._prompts = critic, prompts
        r = config.rollout
        room = fleet.context - r.max_response_tokens
        self._refine_limit = min(r.max_refinement_prompt_tokens or room, room)

    async def step(
        self,
        step: int,
        problems: Sequence[tuple[Problem, tuple[int, ...]]],
        on_group: Callable[[], None] = lambda: None,
    ) -> tuple[list[Group], RolloutCounts]:
        """The groups of one step, in the order of `problems` ((problem, prompt ids) pairs)."""
        counts = RolloutCounts()

        async def one(problem: Problem, prompt_ids: tuple[int, ...]) -> Group:
            group = await self._group(step, problem, prompt_ids, counts)
            on_group()
            return group

        # A task group ends the other problems' requests when one fails.
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(p, ids)) for p, ids in problems]
        return [t.result() for t in running], counts

    async def _group(
        self, step: int, problem: Problem, prompt_ids: tuple[int, ...], counts: RolloutCounts
    ) -> Group:
        a = self._config.algorithm
        seed = derived_seed(self._config.run.seed, step, problem.id, "initial")
        completions = await self._generate(prompt_ids, a.responses, seed)
        counts.generated_tokens += sum(len(c.token_ids) for c in completions)
        initial = await self._judge(problem, "initial", completions)
        judged = [s for s in initial if s.verdict.correct is not None]
        refined: list[Sample] = []
        if trigger_fires(a.trigger, [bool(s.verdict.correct) for s in judged]):
            refined = await self._refine_all(step, problem, prompt_ids, judged, counts)
        seen = [s for s in refined if s.verdict.correct is not None]
        kept = select_refinements(seen, a, f"{self._config.run.seed}/{step}/{problem.id}")
        dropped = len(initial) - len(judged) + len(refined) - len(seen)
        counts.unjudged += dropped
        group = Group(
            problem,
            prompt_ids,
            tuple(judged),
            tuple(s.rebase(prompt_ids) for s in kept),
            attempted=len(refined),
            rescued=any(s.verdict.correct for s in kept),
            dropped=dropped,
        )
        return with_advantages(group, a.normalize_std)

    async def _refine_all(
        self,
        step: int,
        problem: Problem,
        prompt_ids: tuple[int, ...],
        responses: list[Sample],
        counts: RolloutCounts,
    ) -> list[Sample]:
        """A critique and a refinement of every response; samples that did not fit are left out."""
        start = asyncio.get_running_loop().time()
        tasks = (
            self._refine(step, problem, prompt_ids, i, s, counts) for i, s in enumerate(responses)
        )
        refined = [s for s in await asyncio.gather(*tasks) if s is not None]
        counts.refine_seconds.append(asyncio.get_running_loop().time() - start)
        return refined

    async def _refine(
        self,
        step: int,
        problem: Problem,
        prompt_ids: tuple[int, ...],
        index: int,
        response: Sample,
        counts: RolloutCounts,
    ) -> Sample | None:
        critique: Critique | None = None
        context = prompt_ids
        if self._critic is not None:
            critique = await self._critic(problem, response)
            try:
                context, shortened = self._prompts.refinement(
                    problem, response.completion.text, critique.text, self._refine_limit
                )
            except ValueError:
                counts.refinements_not_fitting += 1
                return None
            counts.shortened_responses += shortened
        seed = derived_seed(self._config.run.seed, step, problem.id, "refinement", index)
        (completion,) = await self._generate(context, 1, seed)
        counts.refinement_tokens += len(completion.token_ids)
        (sample,) = await self._judge(problem, "refinement", [completion], critique, index)
        return sample

    async def _generate(self, prompt_ids: tuple[int, ...], n: int, seed: int) -> list[Completion]:
        r = self._config.rollout
        return await self._fleet.generate(
            prompt_ids,
            n=n,
            temperature=r.temperature,
            seed=seed,
            max_tokens=r.max_response_tokens,
        )

    async def _judge(
        self,
        problem: Problem,
        role: str,
        completions: list[Completion],
        critique: Critique | None = None,
        parent: int | None = None,
    ) -> list[Sample]:
        verdicts = await asyncio.gather(*(self._pool.grade(problem, c.text) for c in completions))
        return [
            Sample(problem.id, role, c, v, critique, parent) for c, v in zip(completions, verdicts)
        ]

    async def validate(
        self, problems: Sequence[tuple[Problem, tuple[int, ...]]], on_group=lambda: None
    ) -> float:
        """avg@samples: the mean share of right responses; unjudged ones count as wrong."""
        v = self._config.validation

        async def one(problem: Problem, prompt_ids: tuple[int, ...]) -> float:
            seed = derived_seed(self._config.run.seed, "validation", problem.id)
            completions = await self._fleet.generate(
                prompt_ids,
                n=v.samples,
                temperature=v.temperature,
                seed=seed,
                max_tokens=self._config.rollout.max_response_tokens,
            )
            samples = await self._judge(problem, "initial", completions)
            on_group()
            return sum(s.verdict.correct is True for s in samples) / len(samples)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(p, ids)) for p, ids in problems]
        return sum(t.result() for t in running) / len(running)
