"""The forms in which answers are written: plain text, exact rational values, lists, intervals.

What can be decided exactly is decided here; a computer-algebra library compares floats, truncates
and evaluates towers of powers.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megatron_cgrpo.feedback.math_units import split_unit

_LONGEST_NUMBER = 60
_LARGEST_EXPONENT = 400

# Layout commands: they change how an answer looks, not what it is. \left( but not \leftarrow.
_LAYOUT = re.compile(
    r"\\[,;:!]|\\(?=\s)|\\q?quad\b|\\displaystyle\b|\\(?:left|right)(?![a-zA-Z])|\\[bB]igg?[lr]?\b|~"
)
# math-verify 0.9.0 stops parsing at \mathrm{e} and then compares what stands before it. One letter
# that is no unit is a variable.
_UPRIGHT = re.compile(r"\\(?:mathrm|operatorname|text)\s*\{\s*([a-zA-Z])\s*\}")
_UNIT_LETTERS = "mghsLJNWVAKCF"
_SUBSTITUTIONS = (
    (re.compile(r"(?<=\d)\\[,;:!]\s*(?=\d{3})"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:ldots|cdots|dotsc|dotsb)(?![a-zA-Z])|…|\.{3}"), r"\\dots"),
    (re.compile(r"\\leq?(?![a-zA-Z])|≤"), r"\\le "),
    (re.compile(r"\\geq?(?![a-zA-Z])|≥"), r"\\ge "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|°"), " degrees"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\varnothing(?![a-zA-Z])|∅|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\\$|\$|\\[()\[\]]"), ""),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"([\^_])\s*\{\s*(\w)\s*\}"), r"\1\2"),
    (_LAYOUT, " "),
)
_BLANKS = re.compile(r"\s+")
# Between two letters or digits a blank means something: 2 2/3.
_IDLE_BLANK = re.compile(r"(?<![a-zA-Z0-9])\s+|\s+(?![a-zA-Z0-9\\])")
_BEFORE_COMMAND = re.compile(r"\s+(?=\\(?!text|mbox|mathrm))")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox|boldsymbol|bf)\s*\{([^{}]*)\}")
_NAME = re.compile(r"([a-zA-Z](?:_\w|_\{\w+\})?(?:\([a-z]\))?)\s*=\s*(?=[^=])")

_PLAIN_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|-?\.\d+")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_BRACED = r"(?:\{\s*(-?[\d.]+)\s*\}|\s*(\d))"
_LATEX_FRACTION = re.compile(rf"(-?)\s*(\d*)\s*\\frac\s*{_BRACED}\s*{_BRACED}")
_FRACTION = re.compile(r"(-?)(?:(\d+)\s+)?\(?(-?[\d.]+)\)?\s*/\s*\(?([\d.]+)\)?")
_SCIENTIFIC = re.compile(
    r"(-?[\d.,]+)\s*(?:\\times|\\cdot|[x×*])\s*10\s*\^\s*\{?\s*(-?\d+)\s*\}?|(-?[\d.]+)[eE]([+-]?\d+)"
    r"|(-?)10\s*\^\s*\{?\s*(-?\d+)\s*\}?"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|percent)$", re.IGNORECASE)
_OPEN, _CLOSE = "([{", ")]}"


def plain(text: str) -> str:
    """Without math delimiters, layout commands, idle blanks and a final period; one spelling of
    fractions, dots, relations, minus signs and degrees."""
    text = _UPRIGHT.sub(lambda m: m[0] if m[1] in _UNIT_LETTERS else m[1], text)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    text = _BLANKS.sub(" ", text).strip()
    if not text.endswith("\\dots"):
        text = text.rstrip(".").rstrip()
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped:
        text = wrapped[1].strip()
    return _BEFORE_COMMAND.sub("", _IDLE_BLANK.sub("", text)).removeprefix("+")


def split_name(text: str) -> tuple[str | None, str]:
    """`x = 5` → (x, 5); a chain of equations is left alone."""
    name = _NAME.match(text)
    if name and "=" not in text[name.end() :]:
        return name[1], text[name.end() :]
    return None, text


def rational(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed number, power of ten or percentage,
    whatever unit follows it; None for anything else."""
    text = plain(text)
    percent = _PERCENT.search(text)
    text = text[: percent.start()] if percent else split_unit(text)[0]
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
    if m := _REPEATING.fullmatch(text):
        sign, whole, fixed, period = m.groups()
        value = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return -value if sign else value
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


def is_percentage(text: str) -> bool:
    """Whether the text ends in a percent sign or word."""
    return _PERCENT.search(plain(text)) is not None


def elements(text: str) -> list[str]:
    """The members of a list that stands without brackets or in the braces of a set: separated by
    semicolons, else by commas, "and" or "or"; ± stands for two. One element for everything else."""
    text = plain(text)
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    if _PLAIN_NUMBER.fullmatch(text):
        return [text]
    text = re.sub(r"\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}", " and ", text)
    text = re.sub(r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ",", text)
    separator = ";" if len(split_at(text, ";")) > 1 else ","
    parts = [p.strip() for p in split_at(text, separator) if p.strip()]
    return [sign for part in parts for sign in _signs(part)] or [text]


def _signs(text: str) -> list[str]:
    if text.count("\\pm") != 1 or "\\mp" in text:
        return [text]
    return [plain(text.replace("\\pm", sign)) for sign in "+-"]


def bracketed(text: str) -> tuple[str, list[str], str] | None:
    """(opening bracket, members, closing bracket) of a tuple, point or interval."""
    text = plain(text)
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    # (0,1)\cup(2,3) is no pair: the first bracket must close at the end.
    depth = 0
    for i, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth == 0 and i < len(text) - 1:
            return None
    members = split_at(text[1:-1], ",")
    return (text[0], members, text[-1]) if len(members) > 1 else None


def united(text: str) -> list[str]:
    """The sets whose union a text is; itself alone for everything else."""
    parts = [p.strip() for p in re.split(r"\\cup(?![a-zA-Z])|∪", text)]
    return parts if len(parts) > 1 and all(parts) else [text]


_RELATIONS = {"<": "()", ">": "()", "\\le": "[]", "\\ge": "[]"}
_ONE_SIDED = re.compile(r"([a-zA-Z])\s*(<|>|\\le|\\ge)\s*([^<>=]+)")
_TWO_SIDED = re.compile(r"([^<>=]+?)\s*(<|\\le)\s*([a-zA-Z])\s*(<|\\le)\s*([^<>=]+)")


def as_interval(text: str) -> str | None:
    """`x \\ge 0` → `[0,\\infty)`, `1<x\\le 2` → `(1,2]`; None for other texts."""
    if m := _TWO_SIDED.fullmatch(text):
        return f"{_RELATIONS[m[2]][0]}{m[1].strip()},{m[5].strip()}{_RELATIONS[m[4]][1]}"
    if m := _ONE_SIDED.fullmatch(text):
        opening, closing = _RELATIONS[m[2]]
        if "\\le" in m[3] or "\\ge" in m[3]:
            return None
        if m[2] in (">", "\\ge"):
            return f"{opening}{m[3].strip()},\\infty)"
        return f"(-\\infty,{m[3].strip()}{closing}"
    return None


def split_at(text: str, separator: str) -> list[str]:
    """Cut at the separators that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


_TOWER = re.compile(r"\d\s*\^\s*\{?\s*\(?\s*\d+\s*\^")
_HUGE_POWER = re.compile(r"\d\s*\^\s*\{?\s*-?\d{5}")
_FACTORIAL_OF_LARGE = re.compile(r"\d{5}\s*!|!\s*!|\([^a-zA-Z()]*\)\s*!")
_LONG_NUMBER = re.compile(r"\d{400}")
_DEEPEST, _MOST_TERMS = 12, 30


def too_large(text: str) -> bool:
    """Power towers, huge powers and factorials, very long digit strings, deep nesting, many
    terms: reading or evaluating them may take very long."""
    patterns = (_TOWER, _HUGE_POWER, _FACTORIAL_OF_LARGE, _LONG_NUMBER)
    shape = text.count("+") + text.count("-") > _MOST_TERMS or _depth(text) > _DEEPEST
    return shape or any(p.search(text) for p in patterns)


def _depth(text: str) -> int:
    """How deep brackets are nested."""
    depth = deepest = 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
        deepest = max(deepest, depth)
    return deepest


_BASED = re.compile(r"\d_\{?\d")
_LETTERS = re.compile(r"[A-Z]{2,}")
_MARKS = re.compile(
    r"[<>:'?]|\\(?:le|ge|ne|neq|approx|sim|mid|equiv|cap|setminus|prime)(?![a-zA-Z])|\^\*|[-+*/^]$"
)


def only_as_text(text: str) -> bool:
    """Numbers with a base and orders of letters: their text is what they are."""
    return _BASED.search(text) is not None or _LETTERS.fullmatch(text) is not None


def marks(text: str) -> list[str]:
    """Relations, primes and dangling operators, which a library may read over."""
    return sorted(_MARKS.findall(text))


_DEFINITION = re.compile(r"[a-zA-Z]\s*(?:'|\^\{-1\})*\([a-zA-Z](?:,[a-zA-Z])*\)\s*=")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|neq?)(?![a-zA-Z])")


def is_equation(text: str) -> bool:
    """One equality sign between two sides, and no definition of a function."""
    left, sign, right = text.partition("=")
    proper = bool(sign and left.strip() and right.strip() and "=" not in right)
    return proper and not _DEFINITION.match(text) and not _RELATION.search(text)
