"""One problem's way through a step: generate → verify → critique → refine → verify → select.

Every problem moves on as soon as its own responses are in: there is no barrier between the
waves, so critiques and refinements of one problem hide behind the generation of others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_cgrpo.algorithm.advantages import with_advantages
from megatron_cgrpo.algorithm.selection import is_answer_copy, select_refinements, trigger_fires
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import PromptBuilder
from megatron_cgrpo.feedback.critics import MODEL_CRITIQUES, Critic
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.types import Completion, Critique, Group, Problem, Sample, Verdict


def derived_seed(*parts: object) -> int:
    """A 31-bit seed that depends on nothing but its parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass
class RolloutCounts:
    """What happened on the way, for the metrics of a step.

    `agreement` counts critiques by (what the critic says, what the verifier says), each True,
    False or None; of critics that judge by themselves.
    """

    generated_tokens: int = 0
    refinement_tokens: int = 0
    shortened_responses: int = 0
    refinements_not_fitting: int = 0
    without_critique: int = 0
    unjudged: int = 0
    labels_from_rule: int = 0
    right_refinements: int = 0
    answer_copies: int = 0
    refine_seconds: list[float] = field(default_factory=list)
    agreement: Counter[tuple[bool | None, bool | None]] = field(default_factory=Counter)


class RolloutPipeline:
    """Turns problems into judged, refined groups with advantages.

    Args:
        critic: None: second attempts are sampled from the problem's own prompt.
        refiner: engines that write the refinements; None: those of the policy.
    """

    def __init__(
        self,
        config: Config,
        fleet: EngineFleet,
        pool: VerifierPool,
        critic: Critic | None,
        prompts: PromptBuilder,
        refiner: EngineFleet | None = None,
    ) -> None:
        self._config, self._fleet, self._pool = config, fleet, pool
        self._critic, self._prompts = critic, prompts
        self._refiner = refiner or fleet
        r = config.rollout
        room = self._refiner.context - r.max_response_tokens
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
        initial = await self.respond(step, problem, prompt_ids, counts)
        judged = [s for s in initial if s.verdict.correct is not None]
        refined: list[Sample] = []
        if trigger_fires(a.trigger, [bool(s.verdict.correct) for s in judged]):
            refined = await self.refine(step, problem, prompt_ids, judged, counts)
        seen = [s for s in refined if s.verdict.correct is not None]
        key = f"{self._config.run.seed}/{step}/{problem.id}"
        kept = select_refinements(seen, a, key, judged)
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

    async def respond(
        self, step: int, problem: Problem, prompt_ids: tuple[int, ...], counts: RolloutCounts
    ) -> list[Sample]:
        """The n initial responses to a problem, judged."""
        a = self._config.algorithm
        seed = derived_seed(self._config.run.seed, step, problem.id, "initial")
        completions = await self._generate(self._fleet, prompt_ids, a.responses, seed)
        counts.generated_tokens += sum(len(c.token_ids) for c in completions)
        initial = await self._judge(problem, "initial", completions)
        if a.reward == "critic":
            initial = await self._labelled_all(problem, initial, counts)
        return initial

    async def refine(
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
            self._refine(step, problem, prompt_ids, i, responses, counts)
            for i in range(len(responses))
        )
        refined = [s for s in await asyncio.gather(*tasks) if s is not None]
        if self._config.algorithm.reward == "critic":
            refined = await self._labelled_all(problem, refined, counts)
        self._count_copies(responses, refined, counts)
        counts.refine_seconds.append(asyncio.get_running_loop().time() - start)
        return refined

    async def _refine(
        self,
        step: int,
        problem: Problem,
        prompt_ids: tuple[int, ...],
        index: int,
        responses: list[Sample],
        counts: RolloutCounts,
    ) -> Sample | None:
        response, critique, context = responses[index], None, prompt_ids
        if self._critic is not None:
            critique = response.critique or await self._critique(
                problem, response, responses, counts
            )
            if critique is None:
                counts.without_critique += 1
                return None
            try:
                context, shortened = self._prompts.refinement(
                    problem, response.completion.text, critique.text, self._refine_limit
                )
            except ValueError:
                counts.refinements_not_fitting += 1
                return None
            counts.shortened_responses += shortened
        seed = derived_seed(self._config.run.seed, step, problem.id, "refinement", index)
        (completion,) = await self._generate(self._refiner, context, 1, seed)
        counts.refinement_tokens += len(completion.token_ids)
        (sample,) = await self._judge(problem, "refinement", [completion], critique, index)
        return sample

    async def _critique(
        self, problem: Problem, sample: Sample, siblings: list[Sample], counts: RolloutCounts
    ) -> Critique | None:
        critique = await self._critic(problem, sample, siblings)
        if critique is not None and critique.kind in MODEL_CRITIQUES:
            counts.agreement[critique.says_correct, sample.verdict.correct] += 1
        return critique

    async def _labelled_all(
        self, problem: Problem, samples: list[Sample], counts: RolloutCounts
    ) -> list[Sample]:
        """The samples with the critic's labels for verdicts (`reward: critic`)."""

        async def one(sample: Sample) -> Sample:
            critique = await self._critique(problem, sample, samples, counts)
            if critique is None or critique.kind not in MODEL_CRITIQUES:
                # An outage: training goes on with what the verifier says.
                counts.labels_from_rule += 1
                return sample
            label, rule = critique.says_correct, sample.verdict
            if label is None and self._config.algorithm.no_label == "rule":
                counts.labels_from_rule += 1
                label = rule.correct
            verdict = Verdict(
                label, rule.extracted, f"critic's label; the rule says {rule.correct}"
            )
            own = critique if sample.role == "initial" else sample.critique
            return replace(sample, verdict=verdict, critique=own)

        return list(await asyncio.gather(*map(one, samples)))

    def _count_copies(
        self, responses: list[Sample], refined: list[Sample], counts: RolloutCounts
    ) -> None:
        share = self._config.algorithm.answer_copy_share
        for sample in refined:
            if sample.critique is None or not sample.critique.shows_answer:
                continue
            counts.right_refinements += sample.verdict.correct is True
            counts.answer_copies += is_answer_copy(sample, responses[sample.parent], share)

    async def _generate(
        self, fleet: EngineFleet, prompt_ids: tuple[int, ...], n: int, seed: int
    ) -> list[Completion]:
        r = self._config.rollout
        return await fleet.generate(
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
