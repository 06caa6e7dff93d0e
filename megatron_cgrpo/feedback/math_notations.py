"""Notations of one value that are decided exactly: complex numbers, ratios, angles, matrices."""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd, lcm

from megatron_cgrpo.feedback.math_forms import bracketed, plain, rational, split_at
from megatron_cgrpo.feedback.math_units import split_unit

_UNIT = re.compile(r"(?:\*|\\cdot|\\times)?\s*[ij]$")
_OVER = re.compile(r"(-?)\\frac\s*\{\s*(\d*)\s*i\s*\}\s*\{\s*(\d+)\s*\}")
_SPLIT_PARTS = re.compile(r"(?<=[\w})])\s*(?=[-+])")


def as_complex(text: str, units: str = "i") -> tuple[Fraction, Fraction] | None:
    """(real, imaginary) of a + bi with rational parts and b ≠ 0; None for other texts.

    Args:
        units: letters that may stand for the imaginary unit.
    """
    text = _OVER.sub(lambda m: f"{m[1]}\\frac{{{m[2] or 1}}}{{{m[3]}}}i", text.strip())
    parts = [p for p in _SPLIT_PARTS.split(text) if p]
    if not 1 <= len(parts) <= 2 or not any(p[-1] in units for p in parts):
        return None
    real, imaginary = Fraction(0), None
    for part in parts:
        if part[-1] in units and imaginary is None:
            factor = _UNIT.sub("", part).strip()
            imaginary = rational(factor + "1" if factor in ("", "+", "-") else factor)
            if imaginary is None:
                return None
        elif (value := rational(part)) is not None and part[-1] not in units:
            real += value
        else:
            return None
    return (real, imaginary) if imaginary else None


_RATIO = re.compile(r"\s*(?::|\bto\b)\s*")
_CLOCK = re.compile(r"\d{1,2}:[0-5]\d(?::[0-5]\d)?(?:\s*[ap]\.?m\.?)?", re.IGNORECASE)


def as_ratio(text: str) -> tuple[int, ...] | None:
    """The whole numbers in lowest terms of `3:4`, `3 to 4` or `1:2:3`; None for other texts, and
    for the time of a clock (`3:45`)."""
    if _CLOCK.fullmatch(text):
        return None
    parts = [rational(p) for p in _RATIO.split(text)]
    if len(parts) < 2 or any(p is None or p <= 0 for p in parts):
        return None
    scale = lcm(*(p.denominator for p in parts))
    whole = [int(p * scale) for p in parts]
    common = gcd(*whole)
    return tuple(n // common for n in whole)


def same_ratio(gold: str, answer: str) -> bool | None:
    """Whether two texts are the same ratio; None where neither is one. A fraction is a ratio of
    two; a whole number is none."""
    wanted, got = as_ratio(gold), as_ratio(answer)
    if wanted is None and got is None:
        return None
    if _CLOCK.fullmatch(gold) or _CLOCK.fullmatch(answer):
        return False
    if wanted is not None and got is not None:
        return wanted == got
    ratio, other = (wanted, answer) if wanted is not None else (got, gold)
    value = rational(other) if "/" in other or "\\frac" in other else None
    if value is None or len(ratio) != 2:
        return None
    return Fraction(*ratio) == value


_PI_MULTIPLE = re.compile(
    r"(-?)\s*(?:\\frac\s*\{\s*(-?[\d.]*)\s*\\pi\s*\}\s*\{\s*(\d+)\s*\}|\\frac\s*\\pi\s*\{?\s*(\d+)\s*\}?"
    r"|(.*?)\s*(?:\*|\\cdot)?\s*\\pi(?:\s*/\s*(\d+))?)"
)


def as_multiple_of_pi(text: str) -> Fraction | None:
    """`\\frac{2\\pi}{3}` → 2/3; None for what is no rational multiple of π."""
    found = _PI_MULTIPLE.fullmatch(text)
    if found is None:
        return None
    sign, top, bottom, alone, factor, divisor = found.groups()
    factor = top or factor or "1"
    value = rational(factor + "1" if factor == "-" else factor)
    if value is None:
        return None
    return value / int(bottom or alone or divisor or 1) * (-1 if sign else 1)


def same_angle(gold: str, answer: str) -> bool | None:
    """Degrees against a multiple of π; None unless it is one against the other."""
    (left, first), (right, second) = split_unit(gold), split_unit(answer)
    if (first == "degrees") == (second == "degrees"):
        return None
    degrees, radians = (left, answer) if first == "degrees" else (right, gold)
    turn = as_multiple_of_pi(re.sub(r"\s*(?:\\text\s*\{)?\s*rad(?:ians?)?\s*\}?$", "", radians))
    size = rational(degrees)
    return None if turn is None or size is None else size == turn * 180


_MATRIX = re.compile(
    r"\\begin\s*\{(?:[pbB]?matrix|smallmatrix|array)\}(?:\s*\{[clr|]+\})?(.*?)"
    r"\\end\s*\{(?:[pbB]?matrix|smallmatrix|array)\}",
    re.DOTALL,
)
_AROUND = re.compile(r"\\(?:left|right)\s*|[\s()\[\]$]|\\[\[\]()]")


def as_matrix(text: str) -> list[list[str]] | None:
    """Rows of entries of a matrix in any brackets; None for other texts. (A determinant is no
    matrix.)"""
    found = _MATRIX.search(text)
    if found is None or _AROUND.sub("", text[: found.start()] + text[found.end() :]):
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[1]) if row.strip()]
    cells = [[plain(cell) for cell in row.split("&")] for row in rows]
    return cells if cells and len({len(row) for row in cells}) == 1 else None


def as_vector(text: str) -> list[str] | None:
    """The entries of a matrix with one row or column, of a tuple in round or of one in pointed
    brackets; None for other texts."""
    matrix = as_matrix(text)
    if matrix is not None:
        if len(matrix[0]) == 1:
            return [row[0] for row in matrix]
        return matrix[0] if len(matrix) == 1 else None
    flat = plain(text)
    pointed = re.fullmatch(r"(?:\\langle|<|⟨)(.*)(?:\\rangle|>|⟩)", flat)
    if pointed:
        return [m.strip() for m in split_at(pointed[1], ",")]
    inside = bracketed(flat)
    return inside[1] if inside is not None and inside[0] + inside[2] == "()" else None
