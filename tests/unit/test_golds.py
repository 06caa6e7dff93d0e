"""Gold answers are checked before anything is scored against them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from megatron_cgrpo.cli import main
from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.config.schema import Fields
from megatron_cgrpo.data.problems import read_problems
from megatron_cgrpo.feedback.golds import unusable_golds
from megatron_cgrpo.feedback.pool import VerifierPool

BENCHMARKS = Path(__file__).parents[3] / "shared" / "benchmarks"


def write(path: Path, answers: list[str], kind: str = "math") -> Path:
    rows = [
        {"id": f"p{i}", "problem": "q", "answer": a, "kind": kind} for i, a in enumerate(answers)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_unusable_golds_are_named(tmp_path):
    math = write(tmp_path / "math.jsonl", ["5", "\\frac{1}{", "", "x^2+1"])
    choice = write(tmp_path / "choice.jsonl", ["A", "Z"], "choice")

    async def check(path):
        problems = read_problems(path, Fields(), "math").problems
        pool = VerifierPool(Feedback(), {p.kind for p in problems})
        try:
            return await unusable_golds(pool, problems)
        finally:
            await pool.close()

    found = asyncio.run(check(math))
    assert found.keys() == {"p1", "p2"} and "braces" in found["p1"] and "empty" in found["p2"]
    assert asyncio.run(check(choice)).keys() == {"p1"}


def test_data_check_lists_exceptions_by_id(tmp_path, capsys):
    path = write(tmp_path / "x.jsonl", ["5", "\\frac{1}{", "1234", "0.25"])
    assert main(["data", "check", str(path), "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "p1: gold: its braces do not match" in out and "1 problems with exceptions" in out
    assert "thousands separators" in out and "decimal for fraction" in out
    letters = write(tmp_path / "y.jsonl", list("ABCDEFGHIJ"), "choice")
    assert main(["data", "check", str(letters), "--workers", "1"]) == 0
    assert "no exceptions" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["math500", "aime24", "amc23", "minerva_math", "olympiadbench", "gsm8k", "svamp"]
)
def test_every_gold_of_the_benchmarks_equals_its_rewritings(name, capsys):
    path = BENCHMARKS / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    assert main(["data", "check", str(path), "--workers", "1"]) == 0, capsys.readouterr().out
