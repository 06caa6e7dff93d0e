"""Programming problems in the forms of HumanEval and MBPP."""

from __future__ import annotations

from typing import Any

# Tests that MBPP's authors show to the model.
SHOWN_TESTS = 3


def program_problem(row: dict[str, Any], where: str) -> tuple[str, str, dict[str, str]]:
    """(question, reference solution, meta of the code verifier) of one record.

    HumanEval: `prompt`, `test` (defines `check`), `entry_point`, `canonical_solution`.
    MBPP: `text` or `prompt`, `test_list`, `code`, and `test_setup_code` or `test_imports`.

    Raises:
        ValueError: when the record has neither form.
    """
    for name in ("prompt", "test", "entry_point", "canonical_solution", "text", "code"):
        if row.get(name) is not None and not isinstance(row[name], str):
            raise ValueError(f"{where}: {name} is not text")
    for name in ("test_list", "test_imports", "challenge_test_list"):
        tests = row.get(name) or []
        if not isinstance(tests, list) or not all(isinstance(t, str) for t in tests):
            raise ValueError(f"{where}: {name} is not a list of texts")
    if all(row.get(k) for k in ("prompt", "test", "entry_point")):
        return _humaneval(row)
    if (row.get("text") or row.get("prompt")) and row.get("test_list"):
        return _mbpp(row)
    raise ValueError(
        f"{where} is no programming problem: it needs prompt, test and entry_point (HumanEval) or "
        f"text and test_list (MBPP); its fields are {sorted(row)}"
    )


def _humaneval(row: dict[str, Any]) -> tuple[str, str, dict[str, str]]:
    prompt, name = row["prompt"], row["entry_point"]
    question = (
        "Complete this Python program. Write the whole program in one code block.\n\n"
        f"```python\n{prompt.rstrip()}\n```"
    )
    solution = row.get("canonical_solution")
    reference = prompt + solution if solution else ""
    tests = f"{row['test']}\n\ncheck({name})\n"
    meta = {"tests": tests, "prompt": prompt, "entry_point": name, "reference": reference}
    return question, reference, meta


def _mbpp(row: dict[str, Any]) -> tuple[str, str, dict[str, str]]:
    shown = "\n".join(row["test_list"][:SHOWN_TESTS])
    question = (
        f"{(row.get('text') or row['prompt']).strip()} Write a Python program in one code block. "
        f"It must pass these tests:\n\n```python\n{shown}\n```"
    )
    setup = str(row.get("test_setup_code") or "") or "\n".join(row.get("test_imports") or [])
    hidden = [*row["test_list"], *(row.get("challenge_test_list") or [])]
    tests = "\n".join([setup, *hidden])
    reference = row.get("code") or ""
    return question, reference, {"tests": tests, "reference": reference}
