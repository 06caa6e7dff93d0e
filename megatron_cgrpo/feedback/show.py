"""`cgrpo data show`: what was understood of problem files."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.config.schema import Data
from megatron_cgrpo.data.problems import NAMED, Reading
from megatron_cgrpo.data.prompts import PromptBuilder, tokenizer_in
from megatron_cgrpo.feedback.golds import unusable_golds
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.types import Problem

RENDERED = 3
"""Prompts that are shown whole."""


def show_problems(
    reading: Reading, source: str, data: Data, options: Feedback, tokenizer: Path | None
) -> None:
    """Print layouts, kinds, counts, golds that cannot be judged against, what is repeated, the
    lengths of prompts, and some prompts.

    Args:
        data: how prompts are made.
        tokenizer: directory of one; without it prompts are shown as messages and not measured.

    Raises:
        ConfigError: no such tokenizer, or a kind without a verifier.
    """
    console, problems = Console(soft_wrap=True), reading.problems
    builder = None if tokenizer is None else PromptBuilder(tokenizer_in(tokenizer), data, "")
    kinds = Counter(p.kind for p in problems)
    unusable = asyncio.run(_unusable(problems, options))
    rows = {
        "problems": f"{len(problems)} of {reading.layouts.total()} records",
        "layout": ", ".join(f"{layout} ({n})" for layout, n in reading.layouts.most_common()),
        "kinds": ", ".join(f"{kind} ({n})" for kind, n in kinds.most_common()),
        "golds": f"{len(problems) - len(unusable)} can be judged against",
        "prompts": "give --tokenizer to measure them" if builder is None else "",
    }
    if builder is not None:
        rows["prompts"] = _lengths([len(builder.problem(p)) for p in problems])
    for name, value in rows.items():
        console.print(f"{name:<10}{value}", markup=False, highlight=False)
    for note in reading.notes(source):
        console.print(note, markup=False, highlight=False)
    for name, why in list(unusable.items())[:NAMED]:
        console.print(f"no gold: {name}: {why}", markup=False, highlight=False)
    if len(unusable) > NAMED:
        console.print(f"… and {len(unusable) - NAMED} more (cgrpo data check)")
    for p in problems[:RENDERED]:
        console.rule(f"{p.id} ({p.kind})")
        console.print(_prompt(p, builder), markup=False, highlight=False)
        console.print(f"gold: {p.answer}", markup=False, highlight=False)


async def _unusable(problems: Sequence[Problem], options: Feedback) -> dict[str, str]:
    pool = VerifierPool(options, {p.kind for p in problems})
    try:
        return await unusable_golds(pool, problems)
    finally:
        await pool.close()


def _lengths(lengths: list[int]) -> str:
    ordered = sorted(lengths)
    late = ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    return (
        f"{statistics.median(ordered):.0f} tokens (median), {late} (95 %), {ordered[-1]} (longest)"
    )


def _prompt(problem: Problem, builder: PromptBuilder | None) -> str:
    if builder is None:
        return "\n".join(f"{m['role']}: {m['content']}" for m in problem.messages)
    return builder.text(problem)
