"""Gold answers that cannot be judged against, and how well a verifier reads the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.feedback.rewritings import restate, rewritings
from megatron_cgrpo.types import Problem


async def unusable_golds(
    pool: VerifierPool,
    problems: Sequence[Problem],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Problem id → why its gold answer cannot be judged against; usable ones are left out."""

    async def one(problem: Problem) -> tuple[str, str | None]:
        reason = await pool.unusable_gold(problem)
        if reason is not None:
            # A busy machine must not cost a problem.
            reason = await pool.unusable_gold(problem)
        progress()
        return problem.id, reason

    found = await asyncio.gather(*map(one, problems))
    return {name: reason for name, reason in found if reason is not None}


@dataclass
class GoldReport:
    """What `cgrpo data check` found.

    `right` and `tried` count responses by the form in which they state the gold answer ("as it
    is" first); `exceptions` are (problem id, form, reason).
    """

    problems: int
    right: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    exceptions: list[tuple[str, str, str]] = field(default_factory=list)


async def check_golds(
    pool: VerifierPool,
    problems: Sequence[Problem],
    progress: Callable[[], None] = lambda: None,
) -> GoldReport:
    """Whether every gold answer is readable, equals itself, and equals ten rewritings of itself."""
    unusable = await unusable_golds(pool, problems)
    report = GoldReport(len(problems))
    report.exceptions += [(name, "gold", reason) for name, reason in unusable.items()]

    async def one(problem: Problem) -> list[tuple[str, str, str]]:
        failed = []
        for form, response in {"as it is": restate(problem), **rewritings(problem)}.items():
            if response is None:
                continue
            verdict = await pool.grade(problem, response)
            report.tried[form] += 1
            report.right[form] += verdict.correct is True
            if verdict.correct is not True:
                failed.append((problem.id, form, f"{verdict.extracted!r}: {verdict.reason}"))
        progress()
        return failed

    usable = [p for p in problems if p.id not in unusable]
    for failed in await asyncio.gather(*map(one, usable)):
        report.exceptions += failed
    return report
