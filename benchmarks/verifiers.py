"""Verdicts per second of one verifier process on responses of about 2,000 tokens.

    python -m benchmarks.verifiers [PROBLEMS.jsonl …]
    python -m benchmarks.verifiers --degenerate

Each problem's gold answer ends two long responses, one stating it in another form and one stating
a wrong answer. Measured in one run: our verifier in the pool (what training waits for), the same
function in this process, and math-verify alone in this process (no guards, no killable child).

`--degenerate` measures milliseconds a verdict, and killed processes, on responses that a collapsing
policy writes: 14 kinds, 100 each.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_cgrpo.config.schema import Feedback, Fields
from megatron_cgrpo.data.problems import read_problems
from megatron_cgrpo.feedback.math_verifier import verify_math
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.feedback.rewritings import restate, rewritings
from megatron_cgrpo.types import Problem

SENTENCE = "Let us write $a_{n} = \\frac{3}{4} a_{n-1} + 2$ and follow the terms one by one. "
CHARACTERS = 8000
"""About 2,000 tokens."""
RESPONSES = 1000
ANSWERS = [
    *("18", "1,018", r"\frac{63}{400}", "0.25", r"28\%", "x^2+2x+1", r"2\sqrt{3}", "(3, 4]"),
    *(r"\left( 3, \frac{\pi}{2} \right)", "p - q", "1, 2, 3", r"\frac{e^{-1}}{s+1}", "y=2x+3"),
]


def problems_of(paths: list[str]) -> list[Problem]:
    if not paths:
        user = ({"role": "user", "content": "q"},)
        return [Problem(str(i), user, a) for i, a in enumerate(ANSWERS)]
    return [p for path in paths for p in read_problems(path, Fields(), "math").problems]


def jobs_of(problems: list[Problem]) -> list[tuple[Problem, str]]:
    thinking = SENTENCE * (CHARACTERS // len(SENTENCE))
    jobs = []
    while len(jobs) < RESPONSES:
        for i, problem in enumerate(problems):
            forms = list(rewritings(problem).values())
            jobs.append((problem, thinking + forms[(i + len(jobs)) % len(forms)]))
            wrong = problems[(i + 7) % len(problems)]
            jobs.append((problem, thinking + restate(wrong)))
    return jobs[:RESPONSES]


async def in_pool(jobs: list[tuple[Problem, str]]) -> float:
    pool = VerifierPool(Feedback(workers=1), {"math"})
    try:
        await asyncio.gather(*(pool.grade(*job) for job in jobs[:20]))
        start = time.perf_counter()
        await asyncio.gather(*(pool.grade(*job) for job in jobs))
        return len(jobs) / (time.perf_counter() - start)
    finally:
        await pool.close()


def here(jobs: list[tuple[Problem, str]]) -> float:
    start = time.perf_counter()
    for problem, response in jobs:
        verify_math(problem, response)
    return len(jobs) / (time.perf_counter() - start)


def library(jobs: list[tuple[Problem, str]]) -> float:
    from math_verify import parse, verify

    start = time.perf_counter()
    for problem, response in jobs:
        gold = parse(f"${problem.answer}$", parsing_timeout=None)
        verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)
    return len(jobs) / (time.perf_counter() - start)


DEGENERATE = {
    "repeated characters": lambda i: "9" * (20_000 + i),
    "open brackets": lambda i: "(" * (100 + i),
    "power towers": lambda i: f"{i + 2}^{{9^{{9^{{9}}}}}}",
    "products of high powers": lambda i: rf"(1+x)^{{{3000 + i}}}(2+y)^{{{9000 + i}}}",
    "nested powers": lambda i: rf"(((x+{i})^{{99}}+y)^{{99}}+z)^{{99}}",
    "long sums": lambda i: rf"\sum_{{k=1}}^{{10^9}} k^{{k+{i}}}",
    "long products": lambda i: rf"\prod_{{k=1}}^{{{10**7 + i}}} (k+x)",
    "large factorials": lambda i: f"({10**9 + i})!",
    "nested logarithms": lambda i: r"\log" * 80 + str(i + 2),
    "nested roots": lambda i: r"\sqrt{1+" * 25 + str(i) + "}" * 25,
    "nested fractions": lambda i: r"\frac{1}{1+" * 25 + str(i + 1) + "}" * 25,
    "many terms": lambda i: "+".join(f"{n + i}x^{{{n}}}" for n in range(2, 40)),
    "large exponents": lambda i: rf"x^{{{10**8 + i}}}+1",
    "integrals": lambda i: rf"\int_0^{{{i + 1}}} e^{{-x^{{50}}}} dx",
}


async def degenerate(count: int = 100) -> None:
    """Milliseconds a verdict and killed processes, by kind."""
    table = Table(title=f"degenerate responses, {count} of each kind, one verifier process")
    for column in ("kind", "ms a verdict", "killed"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    pool, total = VerifierPool(Feedback(workers=1), {"math"}), 0.0
    golds = [r"\frac{63}{400}", "5", "(x+1)^{50}"]
    user = ({"role": "user", "content": "q"},)
    try:
        await pool.grade(Problem("p", user, "x+1"), r"\boxed{1+x}")
        for kind, make in DEGENERATE.items():
            before, start = pool.killed, time.perf_counter()
            for i in range(count):
                problem = Problem("p", user, golds[i % len(golds)])
                await pool.grade(problem, f"\\boxed{{{make(i)}}}")
            seconds = time.perf_counter() - start
            total += seconds
            table.add_row(kind, f"{1000 * seconds / count:.1f}", str(pool.killed - before))
        mean = 1000 * total / count / len(DEGENERATE)
        table.add_row("all", f"{mean:.1f}", str(pool.killed), end_section=True)
    finally:
        await pool.close()
    Console(width=110).print(table)


def main(paths: list[str]) -> None:
    if paths == ["--degenerate"]:
        asyncio.run(degenerate())
        return
    logging.disable(logging.WARNING)
    table = Table(
        title=f"verdicts per second on one core, {RESPONSES} responses of 8,000 characters"
    )
    for column in ("answers", "pool", "in process", "math-verify alone", "pool / library"):
        table.add_column(column, justify="left" if column == "answers" else "right")
    for group in [[p] for p in paths] or [[]]:
        jobs = jobs_of(problems_of(group))
        pool, mine, theirs = asyncio.run(in_pool(jobs)), here(jobs), library(jobs)
        name = Path(group[0]).stem if group else "built in"
        rates = (f"{r:,.0f}" for r in (pool, mine, theirs))
        table.add_row(name, *rates, f"{pool / theirs:.1f}×")
    Console(width=110).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
