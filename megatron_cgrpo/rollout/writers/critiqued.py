"""The paper's way: a critique of every response, and the policy refines each in its light."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import PromptBuilder
from megatron_cgrpo.feedback.chat_models import Generator
from megatron_cgrpo.feedback.critics import Critic
from megatron_cgrpo.rollout.events import (
    NOT_FITTING,
    REFINEMENT_TOKENS,
    SHORTENED,
    WITHOUT_CRITIQUE,
)
from megatron_cgrpo.rollout.writers.base import Attempt, Work, Writer, sample
from megatron_cgrpo.rollout.writers.labels import criticise, critics_labels
from megatron_cgrpo.types import Sample


class Critiqued(Writer):
    """One refinement of every response, from (problem, response, critique).

    Args:
        engines: those that refine.
    """

    def __init__(
        self, config: Config, critic: Critic, engines: Generator, prompts: PromptBuilder
    ) -> None:
        self._algorithm, self._rollout = config.algorithm, config.rollout
        self._critic, self._engines, self._prompts = critic, engines, prompts
        room = engines.context - self._rollout.max_response_tokens
        self._limit = min(self._rollout.max_refinement_prompt_tokens or room, room)

    def attempts(
        self, work: Work, responses: Sequence[Sample]
    ) -> Sequence[Awaitable[Attempt | None]]:
        return [self._attempt(work, responses, i) for i in range(len(responses))]

    async def _attempt(self, work: Work, responses: Sequence[Sample], index: int) -> Attempt | None:
        response = responses[index]
        # Where rewards are the critic's labels, the response has its critique already.
        critique = response.critique or await criticise(self._critic, work, response, responses)
        if critique is None:
            work.emit(WITHOUT_CRITIQUE)
            return None
        try:
            context, shortened = self._prompts.refinement(
                work.problem, response.completion.text, critique.text, self._limit
            )
        except ValueError:
            work.emit(NOT_FITTING)
            return None
        work.emit(SHORTENED, int(shortened))
        seed = work.seed("refinement", index)
        (completion,) = await sample(self._engines, self._rollout, context, 1, seed)
        work.emit(REFINEMENT_TOKENS, len(completion.token_ids))
        return Attempt(completion, critique, index)

    async def labelled(self, work: Work, samples: list[Sample]) -> list[Sample]:
        if self._algorithm.reward == "rule":
            return samples
        return await critics_labels(self._critic, self._algorithm.no_label, work, samples)

    def begin_step(self) -> None:
        self._critic.begin_step()

    def metrics(self) -> dict[str, float]:
        return self._critic.metrics()

    async def close(self) -> None:
        await self._critic.close()
