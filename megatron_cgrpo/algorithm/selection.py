"""When to critique a group, and which refinements to keep (Critique-GRPO, algorithm 1)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_cgrpo.config.algorithm import Algorithm, BelowTrigger
from megatron_cgrpo.types import Sample


def trigger_fires(trigger: str | BelowTrigger, verdicts: Sequence[bool]) -> bool:
    """Whether the group with these judged initial responses is to be critiqued and refined.

    `all_failed` fires when none is right, `{below: x}` when the share of right ones is below x.
    A group without any judged response never fires: there is nothing to learn from.
    """
    if not verdicts or trigger == "never":
        return False
    if isinstance(trigger, BelowTrigger):
        return sum(verdicts) / len(verdicts) < trigger.below
    return trigger == "always" or not any(verdicts)


def is_answer_copy(refinement: Sample, attempt: Sample, share: float) -> bool:
    """Whether a right refinement states its answer without a derivation.

    It does when fewer words stand before its answer than `share` of those in the attempt. A
    critique that shows the gold answer invites this; there is nothing to learn from it.
    """
    if refinement.verdict.correct is not True:
        return False
    text = refinement.completion.text
    derivation = text[: text.rindex("\\boxed")] if "\\boxed" in text else text
    return len(derivation.split()) < share * len(attempt.completion.text.split())


def select_refinements(
    candidates: Sequence[Sample],
    options: Algorithm,
    seed: str,
    attempts: Sequence[Sample] = (),
) -> list[Sample]:
    """At most k = `options.refinements` of the judged candidates: right ones first, random else.

    Args:
        candidates: refinements of one group; those without a verdict are never kept.
        attempts: the responses that they refine, for `options.drop_answer_copies`.
        seed: fixes the random choice; use run seed, step and problem id.

    Returns:
        the kept ones in the order of the responses that they refine.
    """
    pool = [
        s
        for s in candidates
        if s.verdict.correct is not None
        and not (options.drop_truncated_refinements and s.completion.truncated)
    ]
    if options.drop_answer_copies:
        share = options.answer_copy_share
        pool = [s for s in pool if not is_answer_copy(s, attempts[s.parent], share)]
    rng = random.Random(seed)
    rng.shuffle(pool)
    pool.sort(key=lambda s: not s.verdict.correct)
    return sorted(
        pool[: options.refinements], key=lambda s: s.parent if s.parent is not None else 0
    )
