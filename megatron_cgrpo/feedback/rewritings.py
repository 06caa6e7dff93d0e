"""Ten ways to write a gold answer whose value a verifier must see in all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from megatron_cgrpo.feedback.math_forms import rational
from megatron_cgrpo.types import Problem

# Twelve digits are more than a response writes out.
_LONGEST = 12


def restate(problem: Problem) -> str | None:
    """A response that states the gold answer as it is; None for kinds without a final answer."""
    if problem.kind == "code":
        reference = problem.meta.get("reference")
        return f"```python\n{reference}\n```" if reference else None
    return _box(problem.answer) if problem.kind in _FORMS else None


def rewritings(problem: Problem) -> dict[str, str]:
    """Name → response that states the gold answer in another form of the same value.

    A form that does not apply to this answer (thousands separators in `x^2`) is left out.
    """
    out = {}
    for name, rewrite in _FORMS.get(problem.kind, {}).items():
        response = rewrite(problem.answer.strip())
        if response is not None:
            out[name] = response
    return out


def _box(content: str) -> str:
    return f"Adding up, we are done.\n\nThe result is \\boxed{{{content}}}"


def _undelimited(answer: str) -> str:
    """Without the dollar signs of mathematics; those of money stay."""
    return re.sub(r"(?<!\\)\$", "", answer)


def _replaced(pattern: str, replacement: str) -> Callable[[str], str | None]:
    def rewrite(answer: str) -> str | None:
        changed = re.sub(pattern, replacement, answer)
        return None if changed == answer else _box(changed)

    return rewrite


def _spaced(answer: str) -> str | None:
    changed = re.sub(r"\s*([=+]|,(?!\\!|\d{3}))\s*", r" \1 ", answer)
    return _box(f"\\, {changed} \\;")


def _named(answer: str) -> str | None:
    """Of an answer that is a constant."""
    constant = re.sub(r"\\(?:[dt]?frac|sqrt|pi)(?![a-zA-Z])", "", answer)
    return None if re.search(r"[a-zA-Z=<>,&]", constant) else _box(f"x = {answer}")


def _with_unit(answer: str) -> str | None:
    return _box(answer + " \\text{ cm}") if _plain_number(answer) else None


def _separated(answer: str) -> str | None:
    integer = re.fullmatch(r"\$?(-?\d{4,})\$?", answer)
    return _box(f"{int(integer[1]):,}") if integer else None


def _other_form(answer: str) -> str | None:
    """A decimal as a fraction in lowest terms, a fraction as a decimal where that is exact."""
    value = rational(answer)
    if value is None or value.denominator == 1 or "%" in answer:
        return None
    if "." in answer:
        sign = "-" if value < 0 else ""
        return _box(f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}")
    decimal = _decimal(value)
    return None if decimal is None else _box(decimal)


def _decimal(value: Fraction) -> str | None:
    for digits in range(1, _LONGEST):
        scaled = value * 10**digits
        if scaled.denominator == 1:
            text = f"{abs(scaled.numerator):0{digits + 1}d}"
            return ("-" if value < 0 else "") + f"{text[:-digits]}.{text[-digits:]}"
    return None


def _plain_number(answer: str) -> bool:
    return re.fullmatch(r"-?\d[\d,]*(\.\d+)?", answer) is not None


_CHOICE: dict[str, Callable[[str], str | None]] = {
    "text in the box": lambda a: _box(f"\\text{{{a}}}"),
    "brackets in the box": lambda a: _box(f"({a})"),
    "bold line": lambda a: f"Eliminating the others.\n\n**Answer: {a}**",
    "answer line": lambda a: f"Eliminating the others.\n\nAnswer: {a}",
    "sentence": lambda a: f"So the correct answer is {a}.",
    "sentence with a reason": lambda a: f"The answer is {a} because I computed it twice.",
    "brackets": lambda a: f"The answer is ({a}).",
    "after another": lambda a: f"First I said the answer is {_other(a)}. No: the answer is {a}.",
    "alone": lambda a: f"Going through them one by one.\n{a}",
    "math font": lambda a: f"My choice would be $\\mathbf{{{a}}}$",
}


def _other(letter: str) -> str:
    return "B" if letter == "A" else "A"


_MATH: dict[str, Callable[[str], str | None]] = {
    "dollars in the box": lambda a: _box(f"${_undelimited(a)}$"),
    "dfrac for frac": _replaced(r"\\frac", r"\\dfrac"),
    "spaces": _spaced,
    "final period": lambda a: _box(f"{a}."),
    "x =": _named,
    "unit": _with_unit,
    "thousands separators": _separated,
    "decimal for fraction": _other_form,
    "stated twice": lambda a: f"So \\boxed{{{a}}}. Checking: yes, \\boxed{{{a}}}.",
    "sentence": lambda a: f"Therefore the final answer is ${_undelimited(a)}$.",
}

_FORMS = {"math": _MATH, "choice": _CHOICE}
