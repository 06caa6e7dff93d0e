"""What a critic says of responses, and its labels in place of the verifier's (`reward: critic`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from megatron_cgrpo.feedback.critics import MODEL_CRITIQUES, Critic
from megatron_cgrpo.rollout.events import LABELS_FROM_RULE, agreement
from megatron_cgrpo.rollout.writers.base import Work
from megatron_cgrpo.types import Critique, Sample, Verdict


async def criticise(
    critic: Critic, work: Work, sample: Sample, siblings: Sequence[Sample]
) -> Critique | None:
    """A critique of one response of a group; whether a critic that judges by itself agrees with
    the verifier is an event."""
    critique = await critic(work.problem, sample, siblings)
    if critique is not None and critique.kind in MODEL_CRITIQUES:
        work.emit(agreement(critique.says_correct, sample.verdict.correct))
    return critique


async def critics_labels(
    critic: Critic, no_label: str, work: Work, samples: list[Sample]
) -> list[Sample]:
    """The samples with the critic's labels for verdicts.

    Args:
        no_label: as `algorithm.no_label`.
    """

    async def one(sample: Sample) -> Sample:
        critique = await criticise(critic, work, sample, samples)
        if critique is None or critique.kind not in MODEL_CRITIQUES:
            # An outage: training goes on with what the verifier says.
            work.emit(LABELS_FROM_RULE)
            return sample
        label, rule = critique.says_correct, sample.verdict
        if label is None and no_label == "rule":
            work.emit(LABELS_FROM_RULE)
            label = rule.correct
        verdict = Verdict(label, rule.extracted, f"critic's label; the rule says {rule.correct}")
        own = critique if sample.role == "initial" else sample.critique
        return replace(sample, verdict=verdict, critique=own)

    return list(await asyncio.gather(*map(one, samples)))
