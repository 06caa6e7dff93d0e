"""Programs in the sandbox: verdicts, messages, and what they cannot do."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import psutil
import pytest

from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.config.schema import Fields
from megatron_cgrpo.data.problems import read_problems
from megatron_cgrpo.feedback import sandbox
from megatron_cgrpo.feedback.code_verifier import extract_program, unusable_tests, verify_code
from megatron_cgrpo.feedback.sandbox import not_isolated, run_program
from tests.unit.test_feedback import grade_with

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x: int) -> int:\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(f):\n    assert f(2) == 4\n    assert f(-3) == -6\n",
    "entry_point": "double",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to square a number.",
    "code": "def square(x):\n    return x * x",
    "test_list": ["assert square(2) == 4", "assert square(-3) == 9"],
    "test_setup_code": "",
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, (HUMANEVAL, MBPP))))
    return read_problems(path, Fields(), "code").problems


def judge(problem, response, timeout_s=3.0):
    return verify_code(problem, response, timeout_s, 512)


def test_the_forms_of_humaneval_and_mbpp(problems):
    humaneval, mbpp = problems
    assert humaneval.id == "HumanEval/0" and mbpp.id == "11"
    assert "Twice x." in humaneval.question and "assert square(2) == 4" in mbpp.question
    for problem in problems:
        assert unusable_tests(problem, 3.0, 512) is None
        assert judge(problem, f"```python\n{problem.answer}\n```").correct is True
    # As a completion of the prompt, and as a whole program after another try.
    assert judge(humaneval, "    return x + x\n").correct is True
    two = "```python\ndef square(x): return 0\n```\nNo:\n```\ndef square(x): return x**2\n```"
    assert judge(mbpp, two).correct is True
    assert judge(mbpp, f"<think>{two}</think>I do not know.").correct is False


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def square(x): return x + x", "AssertionError at `assert square(-3) == 9`"),
        (
            "def square(x):\n    return x / 0",
            "ZeroDivisionError: division by zero at `return x / 0`",
        ),
        ("def square(x: return x", "SyntaxError"),
        ("def cube(x): return x", "NameError: name 'square' is not defined"),
        ("import os\nos._exit(0)", "ended the process before the tests were done"),
        ("import sys\nsys.exit()", "ended the process before the tests were done"),
        ("square = abs\nraise SystemExit(3)", "exit code 3"),
        ("def square(x):\n    while True: pass", "longer than 1 s"),
        ("def square(x): return 'x' * 10**10", "MemoryError"),
    ],
)
def test_the_reason_is_what_python_said(problems, program, said):
    verdict = judge(problems[1], f"```python\n{program}\n```", timeout_s=1.0)
    assert verdict.correct is False and said in verdict.reason, verdict.reason


def test_no_program_is_wrong_and_bad_tests_are_named(problems):
    assert judge(problems[1], "The square of x is x times x.").reason == "no program found"
    assert extract_program("x = 3", set()) is None

    def broken(**meta):
        return unusable_tests(replace(problems[1], meta={**problems[1].meta, **meta}), 3.0, 512)

    assert "no tests" in broken(tests="")
    assert "do not compile" in broken(tests="assert (")
    assert "reference solution fails: AssertionError" in broken(tests="assert square(2) == 5")


ESCAPES = """
import os, socket, sys
wrote = []
for path in ({outside!r}, "/dev/shm/cgrpo-escape", "/tmp/cgrpo-escape"):
    try:
        open(path, "w").close()
        wrote.append(path)
    except OSError:
        pass
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=1)
    wrote.append("network")
except OSError:
    pass
try:
    os.kill({pid}, 0)
    wrote.append("process")
except OSError:
    pass
open("mine", "w").close()
print(wrote, "SECRET" in os.environ, os.path.exists("/proc/{pid}/environ"))
"""


def test_a_program_cannot_get_out(tmp_path, monkeypatch):
    if not_isolated():
        pytest.skip(f"no user namespaces here: programs can reach {not_isolated()}")
    import socket

    monkeypatch.setenv("SECRET", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = ESCAPES.format(
            outside=str(tmp_path / "x"), port=server.getsockname()[1], pid=os.getpid()
        )
        outcome = run_program(source, 5.0, 512)
    assert outcome.stdout.strip() == "[] False False", outcome
    assert not list(tmp_path.iterdir())


def test_what_a_program_starts_dies_with_it():
    """A daemon in a session of its own, and a fork bomb."""
    mark = f"cgrpo-test-{os.getpid()}"
    daemon = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}],"
        " start_new_session=True)\n"
    )
    assert run_program(daemon, 5.0, 512).code == 0
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    start = time.perf_counter()
    assert run_program(bomb + f"# {mark}", 1.0, 512).code is None
    assert time.perf_counter() - start < 20
    if not not_isolated():
        left = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
        assert not left


def test_endless_output_and_files_are_cut():
    outcome = run_program("while True: print('x' * 1000)", 5.0, 512)
    assert outcome.code != 0 and len(outcome.stdout) <= 4000
    outcome = run_program("open('big', 'wb').write(bytes(1 << 28))", 5.0, 512)
    assert outcome.code != 0


TOKEN_THIEF = """
import glob, os, re, sys
text = "".join(open(f).read() for f in glob.glob("*"))
text += " ".join(sys.argv) + str(os.environ)
for token in re.findall(r"[0-9a-f]{16}", text):
    print(token)
os._exit(0)
"""


def test_the_mark_of_success_stands_in_no_file(problems):
    assert judge(problems[1], f"```python\n{TOKEN_THIEF}```").correct is False


@pytest.mark.parametrize(
    ("number", "response"),
    [
        (1, "```python\ndef square(x): return x * x\n```\nIt prints\n```text\n4\n```\nDone."),
        (1, "```python\ndef square(x): return x * x\n```\nExample\n```python\nsquare(2)\n```"),
        (1, "  ```py\n  def square(x):\n      return x * x\n  ```"),
        (1, "~~~python\ndef square(x): return x * x\n~~~"),
        (1, "```python\ndef square(x): return x * x\nif __name__ == '__main__':\n    input()\n```"),
        (1, "```python\nimport math\n```\nand\n```python\nsquare = lambda x: math.pow(x, 2)\n```"),
        (2, "```python\ndef total(xs: List[int]) -> int:\n    return helper(sum(xs))\n```"),
    ],
)
def test_common_forms_of_responses(problems, number, response):
    with_helper = replace(
        problems[0],
        meta={
            "prompt": "from typing import List\n\ndef helper(x):\n    return x\n\n"
            "def total(xs: List[int]) -> int:\n    ...\n",
            "entry_point": "total",
            "tests": "assert total([1, 2]) == 3",
        },
    )
    verdict = judge([*problems, with_helper][number], response)
    assert verdict.correct is True, verdict


def test_without_namespaces_limits_and_kills_still_hold(monkeypatch, problems):
    monkeypatch.setattr(sandbox, "_namespaces", [False])
    assert judge(problems[1], "```python\ndef square(x): return x * x\n```").correct is True
    mark = f"cgrpo-plain-{os.getpid()}"
    program = f"import os, time\nos.setsid()\n# {mark}\nwhile True: time.sleep(0.1)"
    assert run_program(program, 1.0, 512).code is None
    home = [p.info["environ"] or {} for p in psutil.process_iter(["environ"])]
    assert not any(e.get("HOME", "").startswith("/tmp/cgrpo-") for e in home)


def test_more_memory_than_the_worker_may_have(problems):
    jobs = [(problems[1], "```python\ndef square(x): return x * x\n```")]
    options = Feedback(memory_mib=256, code_memory_mib=100_000)
    assert grade_with(options, jobs)[0][0].correct is True


def test_in_the_pool(problems):
    jobs = [(problems[1], "```python\ndef square(x): return x * x\n```")]
    jobs += [(problems[1], "```python\nwhile True: pass\n```"), jobs[0]]
    verdicts, killed = grade_with(Feedback(timeout_s=4.0, code_timeout_s=1.0), jobs)
    # The program is killed, not the verifier.
    assert [v.correct for v in verdicts] == [True, False, True] and killed == 0
