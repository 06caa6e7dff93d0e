"""Disturbed critiques: how much wrong feedback does the method bear?"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from megatron_cgrpo.config.feedback import Noise
from megatron_cgrpo.feedback.critics import MODEL_CRITIQUES, Critic
from megatron_cgrpo.types import Critique, Problem, Sample

_CONCLUSION = re.compile(r"(Conclusion:[ *_]{0,6})(correct|wrong)", re.IGNORECASE)
_OPPOSITE = {"correct": "wrong", "wrong": "correct"}


class NoisyCritic(Critic):
    """Another critic, a share of whose critiques is disturbed.

    `flip`: the response is spoken of as if its verdict were the opposite; a model's conclusion is
    turned around. `swap`: the critique is that of another response of the group.
    Which critiques are disturbed depends on nothing but seed, problem and response.
    """

    def __init__(self, critic: Critic, noise: Noise, seed: int) -> None:
        self._critic, self._noise, self._seed = critic, noise, seed
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
        if critique is None or critique.kind not in MODEL_CRITIQUES:
            return critique
        said = critique.says_correct
        text = _CONCLUSION.sub(lambda m: m[1] + _OPPOSITE[m[2].lower()], critique.text)
        return replace(critique, text=text, says_correct=None if said is None else not said)

    def begin_step(self) -> None:
        self._disturbed = 0
        self._critic.begin_step()

    def metrics(self) -> dict[str, float]:
        return {**self._critic.metrics(), "critic/disturbed": self._disturbed}

    async def close(self) -> None:
        await self._critic.close()
