"""Values of parsed expressions: what a library's "equal" and "different" are checked against."""

from __future__ import annotations

from collections.abc import Iterable

import sympy
from sympy.core.function import AppliedUndef

# Numbers that are no fractions agree to this relative accuracy or are different.
_TOLERANCE = 1e-6
# Expressions this far apart at a point are different; no need to ask for a proof.
_CLEARLY = 1e-3
_POINTS = ((0.7310585, 0.1931472), (1.3247179, 0.2801443), (0.5132511, 0.3316625))
"""Value of the first symbol and step to the next."""
_LARGEST = 1e100
_LARGEST_EXPONENT = 5000
_LARGEST_TOLD = 1e8
_CONSTANTS = {"e": sympy.E, "pi": sympy.pi, "i": sympy.I}
_DIGITS = 40
_SAME = sympy.Float("1e-30", _DIGITS)
# What is not expanded or evaluated, but compared as it stands.
_LARGEST_POWER, _LONGEST_RANGE, _MOST_TERMS = 60, 1000, 400


def accepted_wrongly(wanted: tuple, got: tuple) -> bool:
    """Whether all parsed forms of two "equal" answers are numbers of different value.

    math-verify 0.9.0 compares floats, and takes e as a free symbol in some forms: it then accepts
    1 − 1/e for 1 + 1/e.
    """
    pairs = [(w, g) for w in _numbers(wanted) for g in _numbers(got)]
    return bool(pairs) and all(_apart(w, g) for w, g in pairs)


def too_much_work(*expressions) -> bool:
    """Whether expanding or evaluating an expression may take long: measured on its tree, nothing is
    evaluated. High powers of sums, long ranges of sums and products, towers, and large trees."""
    count = 0
    for expression in expressions:
        if not isinstance(expression, sympy.Basic):
            continue
        for node in sympy.preorder_traversal(expression):
            count += 1
            if count > _MOST_TERMS or _laborious(node):
                return True
    return False


def _laborious(node) -> bool:
    if isinstance(node, sympy.Pow):
        exponent = node.exp
        large = exponent.is_number and not abs(exponent.evalf(5)) <= _LARGEST_POWER
        return bool(large and node.base.has(sympy.Add) and node.base.free_symbols) or (
            exponent.is_number and not abs(exponent.evalf(5)) <= _LARGEST_EXPONENT
        )
    if isinstance(node, (sympy.Sum, sympy.Product)):
        return any(_is_long(first, last) for _, first, last in node.limits)
    if isinstance(node, sympy.factorial):
        size = node.args[0]
        return bool(size.is_number and not size.evalf(5) <= _LONGEST_RANGE)
    return isinstance(node, (sympy.Integral, sympy.Limit))


def _is_long(first, last) -> bool:
    length = last - first
    return bool(length.is_number and length.is_finite and length > _LONGEST_RANGE)


def same_number(wanted: tuple, got: tuple) -> bool | None:
    """Whether two closed forms are the same number, to thirty decimals; None where a form is no
    number, or a large one, or holds a decimal."""
    pairs = [(w, g) for w in _closed(wanted) for g in _closed(got)]
    # Thirty digits say nothing of larger numbers.
    if not pairs or any(max(abs(w), abs(g)) > _LARGEST_TOLD for w, g in pairs):
        return None
    return any(abs(w - g) <= _SAME for w, g in pairs)


def _closed(forms: Iterable) -> list:
    out = []
    for form in forms:
        if _has_matrix(form) or form.atoms(sympy.Float) or too_much_work(form):
            continue
        symbols = form.free_symbols
        if all(s.name in _CONSTANTS for s in symbols):
            value = form.subs({s: _CONSTANTS[s.name] for s in symbols}).evalf(_DIGITS)
            if value.is_number and value.is_finite:
                out.append(value)
    return out


def _has_matrix(form) -> bool:
    """Or no expression at all. sympy evaluates products of matrices without end."""
    matrices = (sympy.MatrixBase, sympy.MatrixExpr)
    return not isinstance(form, sympy.Expr) or isinstance(form, matrices) or form.has(*matrices)


def values_at(wanted, got) -> list[tuple[complex, complex]] | None:
    """Values of two expressions at the same points; None where one has none."""
    names = sorted({s.name for e in (wanted, got) for s in e.free_symbols} - _CONSTANTS.keys())
    pairs = [(_at(wanted, names, p), _at(got, names, p)) for p in _POINTS]
    return None if any(v is None for pair in pairs for v in pair) else pairs


def clearly_different(wanted: tuple, got: tuple) -> bool:
    """Whether all parsed forms differ in value at a point, which takes milliseconds to see.

    math-verify simplifies differences of such formulas, for seconds.
    """
    forms = (sympy.Expr, sympy.Equality)
    wanted, got = ([f for f in side if isinstance(f, forms)] for side in (wanted, got))
    if any(f.has(sympy.MatrixBase, sympy.MatrixExpr) for f in (*wanted, *got)):
        return False
    pairs = [(w, g) for w in wanted for g in got]
    return bool(pairs) and all(_differ(w, g) for w, g in pairs)


def _differ(wanted, got) -> bool:
    equations = isinstance(wanted, sympy.Equality), isinstance(got, sympy.Equality)
    if any(equations) and not all(equations):
        return False
    if all(equations):
        wanted, got = wanted.lhs - wanted.rhs, got.lhs - got.rhs
    wanted, got = _named(wanted), _named(got)
    values = values_at(wanted, got)
    if values is None:
        return False
    if all(equations):
        # The same equation may be multiplied by a constant.
        (a, b), (c, d) = values[:2]
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
        if not _has_matrix(form):
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
