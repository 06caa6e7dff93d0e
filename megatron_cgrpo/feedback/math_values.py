"""Values of parsed expressions: what a library's "equal" and "different" are checked against."""

from __future__ import annotations

from collections.abc import Iterable

import sympy
from sympy.core.function import AppliedUndef

# Numbers that are no fractions agree to this relative accuracy or are different.
_TOLERANCE = 1e-6
# Expressions this far apart at a point are different; no need to ask for a proof.
_CLEARLY = 1e-3
_POINTS = ((0.7310585, 0.1931472), (1.3247179, 0.2801443))
"""Value of the first symbol and step to the next."""
_LARGEST = 1e100
_CONSTANTS = {"e": sympy.E, "pi": sympy.pi}


def accepted_wrongly(wanted: tuple, got: tuple) -> bool:
    """Whether all parsed forms of two "equal" answers are numbers of different value.

    math-verify 0.9.0 compares floats, and takes e as a free symbol in some forms: it then accepts
    1 − 1/e for 1 + 1/e.
    """
    pairs = [(w, g) for w in _numbers(wanted) for g in _numbers(got)]
    return bool(pairs) and all(_apart(w, g) for w, g in pairs)


def clearly_different(wanted: tuple, got: tuple) -> bool:
    """Whether all parsed forms differ in value at a point, which takes milliseconds to see.

    math-verify simplifies differences of such formulas, for seconds.
    """
    forms = (sympy.Expr, sympy.Equality)
    pairs = [(w, g) for w in wanted for g in got if isinstance(w, forms) and isinstance(g, forms)]
    return bool(pairs) and all(_differ(w, g) for w, g in pairs)


def _differ(wanted, got) -> bool:
    equations = isinstance(wanted, sympy.Equality), isinstance(got, sympy.Equality)
    if any(equations) and not all(equations):
        return False
    if all(equations):
        wanted, got = wanted.lhs - wanted.rhs, got.lhs - got.rhs
    wanted, got = _named(wanted), _named(got)
    names = sorted({s.name for e in (wanted, got) for s in e.free_symbols} - _CONSTANTS.keys())
    values = [(_at(wanted, names, p), _at(got, names, p)) for p in _POINTS]
    if any(v is None for pair in values for v in pair):
        return False
    if all(equations):
        # The same equation may be multiplied by a constant.
        (a, b), (c, d) = values
        return abs(a * d - b * c) > _CLEARLY * max(abs(a * d), abs(b * c))
    return any(abs(w - g) > _CLEARLY * max(abs(w), abs(g)) for w, g in values)


def _named(expression):
    """Unknown functions and derivatives as symbols of that name."""
    unknown = expression.atoms(AppliedUndef, sympy.Derivative)
    return expression.xreplace({u: sympy.Symbol(str(u)) for u in unknown})


def _at(expression, names: list[str], point: tuple[float, float]) -> complex | None:
    """The value with the named symbols at a point; None where it has none."""
    start, step = point
    chosen = {name: start + step * i for i, name in enumerate(names)} | _CONSTANTS
    try:
        value = expression.subs({s: chosen[s.name] for s in expression.free_symbols}).evalf(15)
        number = complex(value) if value.is_number and value.is_finite else None
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    if number is None or not max(abs(number.real), abs(number.imag)) < _LARGEST:
        return None
    return number


def _numbers(forms: Iterable) -> list:
    out = []
    for form in forms:
        if isinstance(form, sympy.Expr):
            constants = {s: _CONSTANTS[s.name] for s in form.free_symbols if s.name in _CONSTANTS}
            value = form.subs(constants).doit()
            if value.is_number and value.is_finite:
                out.append(value)
    return out


def _apart(wanted, got) -> bool:
    if wanted.is_Rational and got.is_Rational:
        return wanted != got
    gap = abs((wanted - got).evalf(30))
    return bool(gap > _TOLERANCE * max(abs(wanted.evalf(30)), abs(got.evalf(30))))
