"""Disturbed critiques: how much wrong feedback does the method bear?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_cgrpo.config.feedback import Noise
from megatron_cgrpo.feedback.critics import Critic
from megatron_cgrpo.types import Critique, Problem, Sample


class NoisyCritic(Critic):
    """Another critic, a share of whose critiques is disturbed.

    `flip`: the response is spoken of as if its verdict were the opposite, and a label of the
    critic's own is turned around. `swap`: the critique is that of another response of the group.
    Which critiques are disturbed depends on nothing but seed, problem and response.
    """

    def __init__(self, critic: Critic, noise: Noise, seed: int) -> None:
        self._critic, self._noise, self._seed = critic, noise, seed
        self.labels, self.shows_answer = critic.labels, critic.shows_answer
        self._disturbed = 0

    async def __call__(
        self, problem: Problem, sample: Sample, siblings: Sequence[Sample] = ()
    ) -> Critique | None:
        tokens = ",".join(map(str, sample.completion.token_ids))
        rng = random.Random(f"noise/{self._seed}/{problem.id}/{sample.parent}/{tokens}")
        if rng.random() >= self._noise.share:
            return await self._critic(problem, sample, siblings)
        self._disturbed += 1
        if self._noise.kind == "swap":
            others = [s for s in siblings if s is not sample]
            return await self._critic(problem, rng.choice(others) if others else sample, siblings)
        opposite = replace(sample.verdict, correct=not sample.verdict.correct)
        critique = await self._critic(problem, replace(sample, verdict=opposite), siblings)
        if self.labels and critique is not None and critique.says_correct is not None:
            critique = replace(critique, says_correct=not critique.says_correct)
        return critique

    def begin_step(self) -> None:
        self._disturbed = 0
        self._critic.begin_step()

    def metrics(self) -> dict[str, float]:
        return {**self._critic.metrics(), "critic/disturbed": self._disturbed}

    async def close(self) -> None:
        await self._critic.close()
