"""The control arm: a second attempt at every problem, without a critique."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from megatron_cgrpo.config.schema import Rollout
from megatron_cgrpo.feedback.chat_models import Generator
from megatron_cgrpo.rollout.events import REFINEMENT_TOKENS
from megatron_cgrpo.rollout.writers.base import Attempt, Work, Writer, sample
from megatron_cgrpo.types import Sample


class Resample(Writer):
    """As many attempts as there are responses, from the problem's own prompt."""

    def __init__(self, options: Rollout, engines: Generator) -> None:
        self._options, self._engines = options, engines

    def attempts(self, work: Work, responses: Sequence[Sample]) -> Sequence[Awaitable[Attempt]]:
        return [self._attempt(work, i) for i in range(len(responses))]

    async def _attempt(self, work: Work, index: int) -> Attempt:
        seed = work.seed("refinement", index)
        (completion,) = await sample(self._engines, self._options, work.prompt_ids, 1, seed)
        work.emit(REFINEMENT_TOKENS, len(completion.token_ids))
        return Attempt(completion, parent=index)
