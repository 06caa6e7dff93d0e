"""Programs against tests (HumanEval and MBPP forms), run in the sandbox."""

from __future__ import annotations

import re
import secrets
import textwrap

from megatron_cgrpo.feedback.sandbox import run_program
from megatron_cgrpo.feedback.text import without_thinking
from megatron_cgrpo.types import Problem, Verdict

MAX_REASON = 600

_FENCE = re.compile(r"^[ \t]{0,12}(```|~~~)[ \t]*([\w+-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_STATEMENT = re.compile(r"^[ \t]{0,80}(?:def|return|import|from|class)\b", re.MULTILINE)
_DEFINED = re.compile(r"^[ \t]{0,80}(?:async[ ]+)?(?:def|class)[ ]+(\w+)", re.MULTILINE)
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\(")
_LOCATION = re.compile(r'^[ ]{0,8}File "program", line (\d+)')
# The token comes by standard input and stands in no file: a program that reads its own source does
# not find it. Not run as __main__: a program's own example must not wait for input.
_DRIVER = """
import linecache, sys

def main():
    token = sys.stdin.readline()
    source = {source!r}
    linecache.cache["program"] = (len(source), None, source.splitlines(True), "program")
    exec(compile(source, "program", "exec"), {{"__name__": "program"}})
    print("\\n" + token)

main()
"""


def verify_code(problem: Problem, response: str, timeout_s: float, memory_mib: int) -> Verdict:
    """Right if the program passes all tests of the problem.

    `problem.meta["tests"]` is Python source that raises where the program is wrong;
    `meta["prompt"]`, where there is one, is what a program continues that does not define
    `meta["entry_point"]` itself. The reason of a wrong verdict is what Python said.
    """
    tests = problem.meta.get("tests")
    if not tests:
        return Verdict(None, None, "the problem has no tests")
    program = extract_program(response, wanted_names(problem))
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


def wanted_names(problem: Problem) -> set[str]:
    """Names that the tests expect a program to define."""
    name = problem.meta.get("entry_point")
    return {name} if name else set(_CALLED.findall(problem.meta.get("tests", "")))


def extract_program(response: str, names: set[str]) -> str | None:
    """The last code block outside thinking that defines one of `names`, else all blocks together;
    without blocks the whole response, where it looks like a program."""
    text = without_thinking(response)
    blocks = _blocks(text)
    if not blocks:
        return text if _STATEMENT.search(text) else None
    for block in reversed(blocks):
        if names.intersection(_DEFINED.findall(block)):
            return textwrap.dedent(block)
    return "\n".join(blocks)


def _blocks(text: str) -> list[str]:
    """Contents of fenced blocks of Python, or of no named language; the last may be unfinished."""
    found, opened = [], None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1] == opened[1] and not fence[2]:
            if opened[2].lower() in _PYTHON:
                found.append(text[opened.end() + 1 : fence.start()])
            opened = None
    if opened is not None and opened[2].lower() in _PYTHON:
        found.append(text[opened.end() + 1 :])
    return [b for b in found if b.strip()]


def _completed(program: str, problem: Problem) -> str:
    """With the prompt's imports and helpers before it, or as the continuation of the prompt."""
    prompt, name = problem.meta.get("prompt"), problem.meta.get("entry_point")
    if not prompt or not name:
        return program
    if name in _DEFINED.findall(program):
        return prompt[: prompt.rfind(f"def {name}")] + program
    return prompt + program


def _judge(program: str, tests: str, timeout_s: float, memory_mib: int) -> Verdict:
    # A program that ends the process early has passed nothing: the end must be reached.
    token = secrets.token_hex(8)
    source = f"{program}\n\n{tests}\n"
    outcome = run_program(_DRIVER.format(source=source), timeout_s, memory_mib, f"{token}\n")
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
