"""Sets of real numbers: intervals, unions, differences and inequalities are ways to write one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megatron_cgrpo.feedback.math_forms import as_interval, bracketed, plain, rational, split_at

_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z])|ℝ|all real numbers|\\Re")
_MEMBER = re.compile(r"^[a-zA-Z]\s*(?:\\in(?![a-zA-Z])|∈)\s*")
_BUILDER = re.compile(
    r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|\||:)\s*(.*)\\\}"
)
_OR = re.compile(r"\\cup(?![a-zA-Z])|∪|\\lor(?![a-zA-Z])|(?<![a-zA-Z\\])or(?![a-zA-Z])")
_AND = re.compile(r"\\cap(?![a-zA-Z])|∩|\\land(?![a-zA-Z])|(?<![a-zA-Z\\])and(?![a-zA-Z])")
_MINUS = re.compile(r"\\setminus(?![a-zA-Z])|\\backslash(?![a-zA-Z])|∖")
_UNEQUAL = re.compile(r"[a-zA-Z]\s*(?:\\neq?(?![a-zA-Z])|≠)\s*(.+)")
_WORDS = re.compile(r"\\(?:text|mbox)\s*\{\s*,?\s*(and|or)\s*\}")
_INFINITY = re.compile(r"([-+]?)\s*(?:\\infty|∞)")
_LONGEST = 200
Parse = Callable[[str], tuple]


def written_as_set(text: str) -> bool:
    """Whether a text can be nothing but a set of reals (`(1,2)` may be a point)."""
    flat = _WORDS.sub(r" \1 ", plain(text))
    if _REALS.search(flat) or _MINUS.search(flat) or _INFINITY.search(flat):
        return True
    parts = [p.strip() for half in _OR.split(flat) for p in _AND.split(half)]
    if len(parts) > 1:
        return all(bracketed(p) or _is_inequality(p) for p in parts)
    inside = bracketed(flat)
    half_open = inside is not None and inside[0] + inside[2] in ("(]", "[)")
    return half_open or _is_inequality(flat) or _BUILDER.fullmatch(flat) is not None


def _is_inequality(text: str) -> bool:
    return as_interval(text) is not None or _UNEQUAL.fullmatch(text) is not None


def variable_of(text: str) -> str | None:
    """The variable that inequalities are about; None where there is none, or several."""
    bare = re.sub(r"\\[a-zA-Z]+", " ", _WORDS.sub(" ", plain(text)))
    bare = re.sub(r"(?<![a-zA-Z])(?:or|and)(?![a-zA-Z])", " ", bare)
    letters = set(re.findall(r"[a-zA-Z]", bare)) - {"e", "R"}
    return letters.pop() if len(letters) == 1 else None


def as_set(text: str, parse: Parse) -> Any:
    """A sympy set of reals; None for texts that are none.

    Args:
        parse: forms of a number as sympy expressions.
    """
    text = _WORDS.sub(r" \1 ", plain(text))
    return _set(text, parse) if len(text) <= _LONGEST else None


def _set(text: str, parse: Parse) -> Any:
    import sympy

    text = _MEMBER.sub("", text.strip())
    if builder := _BUILDER.fullmatch(text):
        return _set(builder[2], parse)
    for pattern, join in ((_OR, sympy.Union), (_AND, sympy.Intersection)):
        parts = pattern.split(text)
        if len(parts) > 1:
            sets = [_set(p, parse) for p in parts]
            return None if any(s is None for s in sets) else join(*sets)
    parts = _MINUS.split(text)
    if len(parts) == 2:
        whole, without = (_set(p, parse) for p in parts)
        return None if whole is None or without is None else sympy.Complement(whole, without)
    return _atom(text, parse)


def _atom(text: str, parse: Parse) -> Any:
    import sympy

    if text == "\\emptyset":
        return sympy.S.EmptySet
    if _REALS.fullmatch(text):
        return sympy.S.Reals
    if unequal := _UNEQUAL.fullmatch(text):
        points = [_number(p, parse) for p in split_at(unequal[1], ",")]
        return None if None in points else sympy.Complement(sympy.S.Reals, sympy.FiniteSet(*points))
    if text.startswith("\\{") and text.endswith("\\}"):
        points = [_number(p, parse) for p in split_at(text[2:-2], ",")]
        return None if None in points else sympy.FiniteSet(*points)
    inside = bracketed(as_interval(text) or text)
    if inside is None or len(inside[1]) != 2:
        return None
    ends = [_number(m, parse) for m in inside[1]]
    if None in ends or not ends[0] <= ends[1]:
        return None
    # [1,\infty] is no set of reals.
    if any(abs(e) is sympy.oo and b in "[]" for e, b in zip(ends, (inside[0], inside[2]))):
        return None
    return sympy.Interval(*ends, inside[0] == "(", inside[2] == ")")


def _number(text: str, parse: Parse) -> Any:
    """A real number, exact; None for what is none."""
    import sympy

    if infinite := _INFINITY.fullmatch(text.strip()):
        return -sympy.oo if infinite[1] == "-" else sympy.oo
    exact = rational(text)
    if exact is not None:
        return sympy.Rational(exact.numerator, exact.denominator)
    forms = [f for f in parse(plain(text)) if isinstance(f, sympy.Expr)]
    number = forms[0] if forms else None
    return number if number is not None and number.is_real and number.is_number else None
