"""The forms in which answers are written: plain text, exact rational values, lists.

What can be decided exactly is decided here; a computer-algebra library compares floats, truncates
and evaluates towers of powers.
"""

from __future__ import annotations

import re
from fractions import Fraction

_LONGEST_NUMBER = 60
_LARGEST_EXPONENT = 400

# Layout commands: they change how an answer looks, not what it is. \left( but not \leftarrow.
_LAYOUT = re.compile(
    r"\\[,;:!]|\\(?=\s)|\\q?quad\b|\\displaystyle\b|\\(?:left|right)(?![a-zA-Z])|\\[bB]igg?[lr]?\b|~"
)
# math-verify 0.9.0 stops parsing at \mathrm{e} and then compares what stands before it.
_UPRIGHT = re.compile(r"\\(?:mathrm|operatorname)\s*\{\s*([a-zA-Z])\s*\}")
_SUBSTITUTIONS = (
    (_UPRIGHT, r"\1"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:ldots|cdots|dotsc|dotsb)(?![a-zA-Z])|…|\.{3}"), r"\\dots"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|°"), " degrees"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\\$|\$|\\[()\[\]]"), ""),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"([\^_])\s*\{\s*(\w)\s*\}"), r"\1\2"),
    (_LAYOUT, " "),
)
_BLANKS = re.compile(r"\s+")
# Between two letters or digits a blank means something: 2 2/3.
_IDLE_BLANK = re.compile(r"(?<![a-zA-Z0-9])\s+|\s+(?![a-zA-Z0-9])")
_NAME = re.compile(r"[a-zA-Z](?:_\w|_\{\w+\}|\([a-z]\))?\s*=\s*(?=[^=])")

_PLAIN_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|-?\.\d+")
_BRACED = r"(?:\{\s*(-?[\d.]+)\s*\}|\s*(\d))"
_LATEX_FRACTION = re.compile(rf"(-?)\s*(\d*)\s*\\frac\s*{_BRACED}\s*{_BRACED}")
_FRACTION = re.compile(r"(-?)(?:(\d+)\s+)?\(?(-?[\d.]+)\)?\s*/\s*\(?([\d.]+)\)?")
_SCIENTIFIC = re.compile(
    r"(-?[\d.,]+)\s*(?:\\times|\\cdot|[x×*])\s*10\s*\^\s*\{?\s*(-?\d+)\s*\}?|(-?[\d.]+)[eE]([+-]?\d+)"
    r"|(-?)10\s*\^\s*\{?\s*(-?\d+)\s*\}?"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|percent)$", re.IGNORECASE)
_UNIT = re.compile(
    r"\s*\\?(?:text|mbox|mathrm|textrm|rm)\s*\{\s*([^{}]*[a-zA-Z][^{}]*)\}\s*(?:\^\d)?$"
    r"|\s+([a-zA-Z]{2,}(?:[ /][a-zA-Z]+)*)(?:\^\d)?$"
)
_UNIT_NAMES = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimeters",
        "cm": "cm centimeter centimeters",
        "m": "m meter meters",
        "km": "km kilometer kilometers",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "s": "s sec second seconds",
        "min": "min minute minutes",
        "h": "h hr hour hours",
        "cents": "cent cents",
        "dollars": "dollar dollars",
    }.items()
    for name in names.split()
}
# Words behind a number that change its value.
_NO_UNITS = {
    *("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "pi", "choose", "mod", "over", "times"),
    *("and", "or", "plus", "minus", "squared", "cubed", "factorial", "half", "thirds", "quarters"),
    *("dozen", "hundred", "thousand", "million", "billion", "trillion", "percent"),
}
_OPEN, _CLOSE = "([{", ")]}"


def plain(text: str) -> str:
    """Without math delimiters, layout commands, idle blanks and a final period; one spelling of
    fractions, dots, minus signs and degrees."""
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    text = _BLANKS.sub(" ", text).strip()
    if not text.endswith("\\dots"):
        text = text.rstrip(".").rstrip()
    return _IDLE_BLANK.sub("", text)


def without_name(text: str) -> str:
    """`x = 5` → `5`; a chain of equations is left alone."""
    name = _NAME.match(text)
    return text[name.end() :] if name and "=" not in text[name.end() :] else text


def rational(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed number, power of ten or percentage,
    whatever unit follows it; None for anything else."""
    text = without_name(plain(text))
    percent = _PERCENT.search(text)
    if percent:
        text = text[: percent.start()]
    else:
        text, _ = _unit_apart(text)
    if len(text) > _LONGEST_NUMBER:
        return None
    try:
        value = _value(text.strip())
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if value is not None and percent else value


def _value(text: str) -> Fraction | None:
    if _PLAIN_NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if m := _LATEX_FRACTION.fullmatch(text):
        sign, whole, *parts = m.groups()
        top, bottom = (Fraction(a or b) for a, b in zip(parts[::2], parts[1::2]))
        if whole and top < 0:
            return None
        return (Fraction(whole or 0) + top / bottom) * (-1 if sign else 1)
    if m := _FRACTION.fullmatch(text):
        sign, whole, top, bottom = m.groups()
        if whole and top.startswith("-"):
            return None
        return (Fraction(whole or 0) + Fraction(top) / Fraction(bottom)) * (-1 if sign else 1)
    if m := _SCIENTIFIC.fullmatch(text):
        factor, exponent = (m[1] or m[3], m[2] or m[4]) if m[1] or m[3] else (f"{m[5]}1", m[6])
        if abs(int(exponent)) <= _LARGEST_EXPONENT:
            return Fraction(factor.replace(",", "")) * Fraction(10) ** int(exponent)
    return None


def _unit_apart(text: str) -> tuple[str, str | None]:
    """(number, its unit) where a number comes first, else (text, None)."""
    unit = _UNIT.search(text)
    if unit is None or not re.match(r"-?\s*(?:\\frac|\.?\d)", text):
        return text, None
    name = (unit[1] or unit[2]).strip().lower()
    if _NO_UNITS.intersection(name.split()):
        return text, None
    return text[: unit.start()].rstrip(), name


def unit(text: str) -> str | None:
    """The unit behind a number, if it is one of a few that are told apart."""
    return _UNIT_NAMES.get(_unit_apart(without_name(plain(text)))[1] or "")


def is_percentage(text: str) -> bool:
    """Whether the text ends in a percent sign or word."""
    return _PERCENT.search(plain(text)) is not None


def elements(text: str) -> list[str]:
    """The members of a list that stands without brackets or in the braces of a set: separated by
    commas, semicolons, "and" or "or". One element for everything else."""
    text = plain(text)
    if re.fullmatch(r"\\?\{.*\\?\}", text) and text.startswith("\\{"):
        text = text[2:-2]
    if _PLAIN_NUMBER.fullmatch(text):
        return [text]
    text = re.sub(r"\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}", " and ", text)
    text = re.sub(r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ",", text)
    parts = [p.strip() for p in split_at_commas(text)]
    return [p for p in parts if p] or [text]


def bracketed(text: str) -> tuple[str, list[str], str] | None:
    """(opening bracket, members, closing bracket) of a tuple, point or interval."""
    text = plain(text)
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    members = split_at_commas(text[1:-1])
    balanced = members is not None and text[1:-1].count("(") == text[1:-1].count(")")
    return (text[0], members, text[-1]) if balanced and len(members) > 1 else None


def split_at_commas(text: str) -> list[str]:
    """Cut at the commas and semicolons that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char in ",;" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


_TOWER = re.compile(r"\d\s*\^\s*\{?\s*\(?\s*\d+\s*\^")
_HUGE_POWER = re.compile(r"\d\s*\^\s*\{?\s*-?\d{5}")
_FACTORIAL_OF_LARGE = re.compile(r"\d{5}\s*!|!\s*!|\([^a-zA-Z()]*\)\s*!")


def too_large(text: str) -> bool:
    """Power towers, huge powers and factorials, very long digit strings: evaluating them may not
    end."""
    patterns = (_TOWER, _HUGE_POWER, _FACTORIAL_OF_LARGE, re.compile(r"\d{400}"))
    return any(p.search(text) for p in patterns)
