"""`cgrpo grade` and `cgrpo data check`: the verifiers of training on files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.feedback.golds import GoldReport, check_golds
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.types import Problem, Verdict

REQUIRED = ("id", "kind", "answer", "response")


def grade_file(source: Path, target: Path, options: Feedback) -> dict[str, int]:
    """Grade lines of {"id", "kind", "answer", "response"}; returns the counts of the summary.

    `target` gets lines of {"id", "correct", "extracted", "reason"} in the order of the source; it
    is replaced only when all are graded.

    Raises:
        ValueError: a line that does not parse or lacks a field (its number is named).
        ConfigError: a kind without a verifier.
    """
    rows = [_row(line, n, source) for n, line in enumerate(source.open(encoding="utf-8"), 1)]
    rows = [r for r in rows if r is not None]
    verdicts, killed = asyncio.run(_grade(rows, options))
    partial = target.with_name(f".{target.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        for row, v in zip(rows, verdicts):
            graded = {"id": row["id"], "correct": v.correct}
            graded |= {"extracted": v.extracted, "reason": v.reason}
            out.write(json.dumps(graded) + "\n")
    partial.replace(target)
    counts = [v.correct for v in verdicts]
    return {
        "right": counts.count(True),
        "wrong": counts.count(False),
        "not judged": counts.count(None),
        "verifiers killed": killed,
    }


def _row(line: str, number: int, source: Path) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{source}, line {number} is not valid JSON: {e.msg}") from e
    missing = [k for k in REQUIRED if k not in row]
    if missing:
        raise ValueError(f"{source}, line {number} lacks {', '.join(missing)}")
    return row


async def _grade(rows: list[dict[str, Any]], options: Feedback) -> tuple[list[Verdict], int]:
    pool = VerifierPool(options, {r["kind"] for r in rows})
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("grading", total=len(rows))

            async def one(row: dict[str, Any]) -> Verdict:
                question = ({"role": "user", "content": str(row.get("question", ""))},)
                meta = row.get("meta") or {}
                problem = Problem(str(row["id"]), question, str(row["answer"]), row["kind"], meta)
                verdict = await pool.grade(problem, str(row["response"]))
                progress.advance(task)
                return verdict

            return list(await asyncio.gather(*map(one, rows))), pool.killed
    finally:
        await pool.close()


def check_problems(problems: Sequence[Problem], options: Feedback) -> int:
    """Print how many gold answers the verifier reads, finds equal to themselves, and to ten
    rewritings of the same value; exceptions by id.

    Returns:
        0 without an exception, else 1.

    Raises:
        ConfigError: a kind without a verifier.
    """
    report = asyncio.run(_check(problems, options))
    table = Table(title=f"{report.problems} gold answers")
    for column in ("stated", "right", "tried"):
        table.add_column(column, justify="left" if column == "stated" else "right")
    for form, tried in report.tried.items():
        table.add_row(form, str(report.right[form]), str(tried))
    console = Console(soft_wrap=True)
    console.print(table)
    for name, form, reason in report.exceptions:
        console.print(f"{name}: {form}: {reason}", markup=False, highlight=False)
    found = len({name for name, _, _ in report.exceptions})
    console.print(f"{found} problems with exceptions" if found else "no exceptions")
    return 1 if found else 0


async def _check(problems: Sequence[Problem], options: Feedback) -> GoldReport:
    pool = VerifierPool(options, {p.kind for p in problems})
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("checking", total=len(problems))
            return await check_golds(pool, problems, lambda: progress.advance(task))
    finally:
        await pool.close()
