"""Programs against tests (HumanEval and MBPP forms), run in the sandbox."""

from __future__ import annotations

import re
import secrets

from megatron_cgrpo.feedback.sandbox import run_program
from megatron_cgrpo.feedback.text import without_thinking
from megatron_cgrpo.types import Problem, Verdict

MAX_REASON = 600

_FENCE = re.compile(r"```[ \t]*(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STATEMENT = re.compile(r"^\s*(?:def|return|import|from|class)\b", re.MULTILINE)
_LOCATION = re.compile(r'^\s*File ".*", line (\d+), in .*$')


def verify_code(problem: Problem, response: str, timeout_s: float, memory_mib: int) -> Verdict:
    """Right if the program passes all tests of the problem.

    `problem.meta["tests"]` is Python source that raises where the program is wrong;
    `meta["prompt"]`, where there is one, is what a program continues that does not define
    `meta["entry_point"]` itself. The reason of a wrong verdict is what Python said.
    """
    tests = problem.meta.get("tests")
    if not tests:
        return Verdict(None, None, "the problem has no tests")
    program = extract_program(response)
    if program is None:
        return Verdict(False, None, "no program found")
    return _judge(_completed(program, problem), tests, timeout_s, memory_mib)


def unusable_tests(problem: Problem, timeout_s: float, memory_mib: int) -> str | None:
    """Why a problem's tests cannot judge: they are missing, do not compile, or refuse the
    problem's own reference solution. None for good ones."""
    tests, reference = problem.meta.get("tests"), problem.meta.get("reference")
    if not tests:
        return "it has no tests"
    try:
        compile(tests, "tests", "exec")
    except (SyntaxError, ValueError) as e:
        return f"its tests do not compile: {e}"
    if not reference:
        return None
    verdict = _judge(reference, tests, timeout_s, memory_mib)
    return None if verdict.correct else f"its own reference solution fails: {verdict.reason}"


def extract_program(response: str) -> str | None:
    """The last fenced block outside thinking, else the whole response where it is a program."""
    text = without_thinking(response)
    blocks = [b for b in _FENCE.findall(text) if b.strip()]
    if blocks:
        return blocks[-1]
    return text if _STATEMENT.search(text) else None


def _completed(program: str, problem: Problem) -> str:
    prompt, name = problem.meta.get("prompt"), problem.meta.get("entry_point")
    defined = name and re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(name)}\b", program, re.M)
    if not prompt or defined:
        return program
    return prompt + program


def _judge(program: str, tests: str, timeout_s: float, memory_mib: int) -> Verdict:
    # A program that ends the process early has passed nothing: the last line must be reached.
    token = secrets.token_hex(8)
    source = f"{program}\n\n{tests}\nprint('\\n{token}')\n"
    outcome = run_program(source, timeout_s, memory_mib)
    if outcome.code is None:
        return Verdict(False, program, f"it ran longer than {timeout_s:g} s")
    if outcome.code == 0 and outcome.stdout.rstrip().endswith(token):
        return Verdict(True, program, "all tests passed")
    if outcome.code == 0:
        return Verdict(False, program, "it ended the process before the tests were done")
    return Verdict(False, program, _message(outcome.stderr, outcome.code, source))


def _message(stderr: str, code: int, source: str) -> str:
    """The end of what Python said, with the line that failed."""
    lines = [line for line in stderr.rstrip().splitlines() if line.strip()]
    if not lines:
        return f"it ended with exit code {code}"
    places = [int(m[1]) for m in map(_LOCATION.match, lines) if m]
    error = lines[-1].strip()
    if not places:
        return error[:MAX_REASON]
    written = source.splitlines()
    at = written[places[-1] - 1].strip() if places[-1] <= len(written) else ""
    first = written[places[0] - 1].strip() if places[0] <= len(written) else ""
    where = f" at `{at}`" if at else ""
    called = f", called by `{first}`" if first and first != at else ""
    return f"{error}{where}{called}"[:MAX_REASON]
