"""Equations of curves: the same when one is a constant multiple of the other."""

from __future__ import annotations

from typing import Any

import sympy

from megatron_cgrpo.feedback.math_values import too_much_work, values_at

_ALIKE = 1e-9


def same_curve(wanted: Any, got: Any) -> bool | None:
    """Whether two expressions, each zero on a curve, are multiples of each other by a constant that
    is not zero; None where that cannot be told."""
    if wanted.free_symbols != got.free_symbols or not wanted.free_symbols:
        return False if wanted.free_symbols and got.free_symbols else None
    if too_much_work(wanted) or too_much_work(got):
        return None
    # Multiplied by their denominators: y = 1/x is xy = 1.
    wanted, got = (sympy.fraction(sympy.together(e))[0] for e in (wanted, got))
    try:
        first, second = (
            sympy.Poly(e, *sorted(wanted.free_symbols, key=str)) for e in (wanted, got)
        )
    except sympy.PolynomialError:
        return _same_at_points(wanted, got)
    if first.is_zero or second.is_zero or first.monoms() != second.monoms():
        return False
    ratio = first.coeffs()[0] / second.coeffs()[0]
    gaps = (sympy.nsimplify(a - ratio * b) for a, b in zip(first.coeffs(), second.coeffs()))
    return all(sympy.simplify(gap) == 0 for gap in gaps)


def _same_at_points(wanted: Any, got: Any) -> bool | None:
    pairs = values_at(wanted, got)
    if pairs is None:
        return None
    (a, b), *rest = pairs
    return abs(b) > 0 and all(abs(a * d - b * c) <= _ALIKE * abs(a * d) for c, d in rest)
