"""What stands behind a number: a unit, which may be left out, or words that change its value."""

from __future__ import annotations

import re

_WRAPPED = re.compile(
    r"\s*\\(?:text|mbox|mathrm|textrm|textbf|rm)\s*\{\s*([^{}]*[a-zA-Z%][^{}]*?)\s*\}\s*(?:\^(\d))?$"
)
_BARE = re.compile(r"\s+([a-zA-Z]{1,20}(?:[ /][a-zA-Z]{1,20}){0,5})(?:\^(\d))?$")
_NUMBER_FIRST = re.compile(r"[-+]?\s*(?:\\frac|\.?\d)")
_MONEY = re.compile(r"\\?\$\s*\d")
CHANGES_VALUE = {
    *("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "pi", "choose", "mod", "over", "times"),
    *("and", "or", "plus", "minus", "squared", "cubed", "factorial", "half", "halves", "thirds"),
    *("quarters", "dozen", "hundred", "thousand", "million", "billion", "trillion", "percent"),
    *("more", "less", "least", "most"),
}
"""Words behind a number that make it another one."""
_NAMES = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimeters",
        "cm": "cm centimeter centimeters",
        "m": "m meter meters",
        "km": "km kilometer kilometers",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "mi": "mi mile miles",
        "mg": "mg milligram milligrams",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "s": "s sec second seconds",
        "min": "min minute minutes",
        "h": "h hr hour hours",
        "cents": "cent cents",
        "dollars": "dollar dollars",
        "degrees": "degree degrees",
        "mph": "mph",
        "kph": "kph",
        "Hz": "hz hertz",
    }.items()
    for name in names.split()
}
_SHORT_WORD = 4


def split_unit(text: str) -> tuple[str, str | None]:
    """(number, its unit) of a text that begins with a number, else (text, None).

    A unit is anything in \\text{…} of two letters or more, a known name, or words of four letters
    and more: "2 xy" is a product.
    """
    found = _WRAPPED.search(text) or _BARE.search(text)
    if found is None or not _NUMBER_FIRST.match(text):
        return text, None
    words = re.split(r"[ /.]+", found[1].lower().strip(" ."))
    if CHANGES_VALUE.intersection(words):
        return text, None
    wrapped = text[found.start() :].lstrip().startswith("\\")
    shortest = 2 if wrapped else _SHORT_WORD
    if not all(w in _NAMES or len(w) >= shortest for w in words):
        return text, None
    names = re.split(r"([ /.]+)", found[1].lower().strip(" ."))
    unit = "".join(_NAMES.get(n, n.removesuffix("s")) for n in names)
    return text[: found.start()].rstrip(), unit + (found[2] or "")


def is_money(text: str) -> bool:
    """Whether an answer as it was written begins with a dollar sign (not that of a formula)."""
    return _MONEY.match(text.strip()) is not None and not text.strip().endswith("$")


def changed_by_words(text: str) -> str | None:
    """The words behind a number that make it another one ("3 million"), if there are any."""
    found = _WRAPPED.search(text) or _BARE.search(text)
    if found is None or not _NUMBER_FIRST.match(text):
        return None
    words = found[1].lower().split()
    return " ".join(words) if CHANGES_VALUE.intersection(words) else None
