"""Mathematical equality of a response's final answer with the gold answer.

What `math_forms` can decide exactly is decided there: equal texts, rational numbers, lists by
their members. The rest goes to math-verify, whose "equal" is checked once more where it compares
by float or truncates (release 0.9.0 accepts 2 for 2 2/3 and 1/2006! for 1/2004!).
"""

from __future__ import annotations

import functools
import re

from megatron_cgrpo.data.boxes import boxes
from megatron_cgrpo.feedback.math_forms import (
    as_interval,
    bracketed,
    elements,
    is_equation,
    is_percentage,
    marks,
    only_as_text,
    plain,
    rational,
    split_name,
    too_large,
    united,
)
from megatron_cgrpo.feedback.math_notations import (
    as_complex,
    as_matrix,
    as_ratio,
    as_vector,
    same_angle,
    same_ratio,
)
from megatron_cgrpo.feedback.math_sets import as_set, variable_of, written_as_set
from megatron_cgrpo.feedback.math_units import CHANGES_VALUE, changed_by_words, is_money, split_unit
from megatron_cgrpo.feedback.text import is_cut_off, without_thinking
from megatron_cgrpo.types import Problem, Verdict

MAX_ANSWER = 400

_MARKED = re.compile(r"\banswer\b[\s*_]*(?:is|[:=])[\s*_:]*([^\n]+)", re.IGNORECASE)
# Where a stated answer ends: at a sentence's end or at a reason.
_ANSWER_END = re.compile(r"\.(?:\s|$)|[,;]?\s+(?:because|since|as|so)\b|\*\*")
_FORMULA = re.compile(r"[\d\\$+*/^=!]")
# "72 clips" is 72, but "2 pi" and "3 x" are not 2 and 3.
_WORDS_AFTER_NUMBER = re.compile(
    r"\$?(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)\$?\s+"
    r"([A-Za-z]{3}[A-Za-z .'-]*)"
)
_ASKED_WORDS = re.compile(r"percent|%|\bbase\b")
_ASKED = {"percent": "percent", "%": "percent", "base": "base"}
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")


def verify_math(problem: Problem, response: str) -> Verdict:
    """Verdict on the last answer that the response states; `None` when there is no readable gold.

    A percent sign, or the base of a number, may be left out on one side when the question speaks of
    it. Words ("east") are compared as text.
    """
    gold = problem.answer
    if not gold.strip():
        return Verdict(None, None, "the gold answer is empty")
    answer = extract_answer(response)
    if answer is None:
        return Verdict(False, None, "no answer found")
    asked = frozenset(_ASKED[w] for w in _ASKED_WORDS.findall(problem.question.lower()))
    same, reason = _same(gold, answer, asked)
    return Verdict(same, answer, reason)


def unreadable_gold(answer: str) -> str | None:
    """Why a gold answer cannot be judged against; None for a readable one."""
    if not answer.strip():
        return "it is empty"
    if len(answer) > MAX_ANSWER:
        return f"it is longer than {MAX_ANSWER} characters"
    if answer.replace("\\{", "").count("{") != answer.replace("\\}", "").count("}"):
        return "its braces do not match"
    if as_matrix(answer) or as_ratio(plain(answer)) or as_set(answer, _parse) is not None:
        return None
    members = [m for e in elements(answer) for m in (bracketed(e) or ("", [e], ""))[1]]
    for member in (plain(m) for m in members):
        known = rational(member) is not None or member == "\\dots" or too_large(member)
        if not known and not _parse(member):
            return f"{member[:80]!r} cannot be parsed"
    return None


def extract_answer(response: str) -> str | None:
    """The last \\boxed{…} outside a closed thinking block, else the last "answer is …" or
    "Answer: …" that holds a number or a formula, else the last number."""
    text = without_thinking(response)
    boxed = boxes(text)
    if is_cut_off(text, boxed):
        return None
    if boxed:
        return boxed[-1][1][:MAX_ANSWER]
    for stated in reversed(_MARKED.findall(text)):
        candidate = _ANSWER_END.split(stated[:MAX_ANSWER], maxsplit=1)[0].strip(" *_")
        if not (_FORMULA.search(candidate) or re.fullmatch(r"[a-zA-Z]{1,2}|pi", candidate)):
            continue  # words only: no answer was stated here
        number = _WORDS_AFTER_NUMBER.fullmatch(candidate)
        if number and not CHANGES_VALUE.intersection(number[2].lower().split()):
            return number[1]
        return candidate
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _same(gold: str, answer: str, asked: frozenset[str] = frozenset()) -> tuple[bool | None, str]:
    """Whether two answers have the same value, and how that was found."""
    left, right = plain(gold), plain(answer)
    if left == right or _same_words(left, right):
        return True, "the same text"
    if (verdict := _same_notation(gold, answer)) is not None:
        return verdict
    units = {_unit(gold), _unit(answer)} - {None}
    if len(units) > 1:
        return False, "different units"
    (name, left), (other, right) = split_name(left), split_name(right)
    if name and other and name != other and len(name) == len(other) == 1:
        return False, f"a value of {other} instead of {name}"
    if left == right:
        return True, "the same text"
    for compare in (_same_complex, _same_number, _same_list, _same_set, _same_brackets):
        verdict = compare(left, right, asked)
        if verdict is not None:
            return verdict
    if not name:
        left, right = (as_interval(t) or t for t in (left, right))
    return _by_library(left, right, asked)


def _same_notation(gold: str, answer: str) -> tuple[bool | None, str] | None:
    """What another notation than numbers, lists and formulas decides; None for the rest."""
    vectors = as_vector(gold), as_vector(answer)
    matrices = as_matrix(gold), as_matrix(answer)
    if all(matrices):
        flat = [[cell for row in m for cell in row] for m in matrices]
        same_size = len(matrices[0]) == len(matrices[1]) and len(flat[0]) == len(flat[1])
        return same_size and _in_order(*flat, frozenset()), "matrices entry by entry"
    if any(matrices) and all(vectors):
        return _in_order(*vectors, frozenset()), "vectors entry by entry"
    left, right = plain(gold), plain(answer)
    for compare, reason in ((same_angle, "angles"), (same_ratio, "ratios")):
        if (same := compare(left, right)) is not None:
            return same, reason
    if written_as_set(gold) or written_as_set(answer):
        sets = as_set(gold, _parse), as_set(answer, _parse)
        names = {variable_of(gold), variable_of(answer)} - {None}
        if len(names) > 1:
            return False, "sets of values of other variables"
        if None not in sets:
            return sets[0] == sets[1] or (sets[0] ^ sets[1]).is_empty is True, "sets of reals"
    return _same_equation(left, right)


def _same_equation(left: str, right: str) -> tuple[bool | None, str] | None:
    """Equations of curves; None for other texts, and where both are solved for one variable."""
    if not (is_equation(left) and is_equation(right)) or too_large(left) or too_large(right):
        return None
    names = split_name(left)[0], split_name(right)[0]
    if (names[0] and names[0] == names[1]) or len(elements(left)) + len(elements(right)) > 2:
        return None
    sides = [[_expression(side) for side in text.split("=")] for text in (left, right)]
    if any(side is None for text in sides for side in text):
        return None
    from megatron_cgrpo.feedback.math_curves import same_curve

    same = same_curve(*(text[0] - text[1] for text in sides))
    return None if same is None else (same, "equations up to a constant factor")


def _expression(text: str):
    """The sympy expression of a text; None where it is none."""
    import sympy

    return next((form for form in _parse(text) if isinstance(form, sympy.Expr)), None)


def _same_complex(gold: str, answer: str, asked: frozenset[str]) -> tuple[bool | None, str] | None:
    wanted = as_complex(gold)
    if wanted is None:
        return None
    got = as_complex(answer, "ij")
    if got is None and rational(answer) is None:
        return None
    return wanted == got, "complex numbers by their parts"


def _unit(text: str) -> str | None:
    return "dollars" if is_money(text) else split_unit(split_name(plain(text))[1])[1]


def _same_words(gold: str, answer: str) -> bool:
    return len(gold) > 1 and gold.casefold() == answer.casefold() and gold.isalpha()


def _by_library(gold: str, answer: str, asked: frozenset[str]) -> tuple[bool | None, str]:
    """What is no number, list or interval: formulas, if nothing tells them apart before."""
    if (brackets := _same_brackets(gold, answer, asked)) is not None:
        return brackets
    if too_large(gold) or too_large(answer):
        return False, "too large to evaluate: compared as text"
    if "\\dots" in gold + answer:
        return False, "open lists are compared as text"
    if only_as_text(gold) or only_as_text(answer):
        without_base = re.sub(r"_\{?\d+\}?$", "", gold) == answer
        return without_base and "base" in asked, "compared as text"
    if changed_by_words(gold) != changed_by_words(answer):
        return False, "words behind the number change it"
    exact = rational(gold)
    if "=" in answer and exact is not None:
        # 2+4=6: every side must have the value.
        sides = [_same(gold, side, asked)[0] for side in answer.split("=")]
        return all(side is True for side in sides), "a chain of equations"
    if marks(gold) != marks(answer):
        return False, "a relation or sign that the gold answer does not have"
    if exact is None and "." in answer and rational(answer) is not None:
        return False, "a decimal number for a value that is none"
    return _library(gold, answer)


def _same_number(gold: str, answer: str, asked: frozenset[str]) -> tuple[bool | None, str] | None:
    wanted, got = rational(gold), rational(answer)
    if wanted is None or got is None:
        return None
    reason = "exact comparison of rational numbers"
    # A gold answer with a percent sign says that the question asks for one.
    percent = "percent" in asked or is_percentage(gold)
    if percent and is_percentage(gold) != is_percentage(answer):
        scale = 100 if is_percentage(gold) else 1
        shown = got * 100 if is_percentage(answer) else got
        return wanted == got or wanted * scale == shown, reason
    return wanted == got, reason


def _same_list(gold: str, answer: str, asked: frozenset[str]) -> tuple[bool | None, str] | None:
    """Lists without brackets, in any order; None when neither is one."""
    wanted, got = elements(gold), elements(answer)
    if len(wanted) == len(got) == 1:
        return None
    reason = "lists compared by their members"
    names = _names(wanted)
    if len(set(names)) > 1 and None not in names:
        return _same_named(wanted, got, asked), reason
    if len(wanted) != len(got):
        # (3, 4) | 3, 4: the same members without brackets
        point, bare = (gold, got) if len(wanted) == 1 else (answer, wanted)
        inside = bracketed(point)
        if inside is None or inside[0] + inside[2] != "()" or "\\{" in gold + answer:
            return False, reason
        # a=2, b=7 | (2, 7): in the order in which they are named
        values = [split_name(m)[1] for m in bare] if len(set(_names(bare))) == len(bare) else bare
        return _in_order(inside[1], values, asked), reason
    return _any_order(wanted, got, asked), reason


def _names(members: list[str]) -> list[str | None]:
    return [split_name(m)[0] for m in members]


def _same_named(wanted: list[str], got: list[str], asked: frozenset[str]) -> bool:
    """x=5, y=3: by their names, or without names in the same order."""
    inside = bracketed(got[0]) if len(got) == 1 else None
    if inside is not None and inside[0] + inside[2] == "()":
        got = inside[1]
    mine, theirs = dict(map(split_name, wanted)), dict(map(split_name, got))
    if None in theirs:
        return len(wanted) == len(got) and _in_order(
            [split_name(w)[1] for w in wanted], [split_name(g)[1] for g in got], asked
        )
    return mine.keys() == theirs.keys() and all(
        _same(value, theirs[name], asked)[0] is True for name, value in mine.items()
    )


def _same_set(gold: str, answer: str, asked: frozenset[str]) -> tuple[bool | None, str] | None:
    """Unions, in any order; None when neither is one."""
    wanted, got = united(gold), united(answer)
    if len(wanted) == len(got) == 1:
        return None
    return len(wanted) == len(got) and _any_order(wanted, got, asked), "unions by their members"


def _same_brackets(gold: str, answer: str, asked: frozenset[str]) -> tuple[bool | None, str] | None:
    """Points and intervals, in order and with the same brackets; None when one is neither."""
    wanted, got = bracketed(gold), bracketed(answer)
    if wanted is None or got is None:
        return None
    same_kind = (wanted[0], wanted[2]) == (got[0], got[2])
    return same_kind and _in_order(wanted[1], got[1], asked), "compared member by member"


def _in_order(wanted: list[str], got: list[str], asked: frozenset[str]) -> bool:
    return len(wanted) == len(got) and all(
        _same(w, g, asked)[0] is True for w, g in zip(wanted, got)
    )


def _any_order(wanted: list[str], got: list[str], asked: frozenset[str]) -> bool:
    rest = list(got)
    for member in wanted:
        hit = next((g for g in rest if _same(member, g, asked)[0] is True), None)
        if hit is None:
            return False
        rest.remove(hit)
    return not rest


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> tuple:
    from math_verify import parse

    # No time-outs inside: they use SIGALRM; the pool kills a worker that takes too long.
    return tuple(parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None))


def _library(gold: str, answer: str) -> tuple[bool | None, str]:
    from math_verify import verify

    from megatron_cgrpo.feedback.math_values import (
        accepted_wrongly,
        clearly_different,
        same_number,
        too_much_work,
    )

    wanted, got = _parse(gold), _parse(answer)
    if not wanted:
        return None, f"the gold answer {gold[:80]!r} cannot be parsed"
    if not got:
        return False, "the answer cannot be parsed"
    if ":" in gold + answer:
        # A library divides; a time is no quotient.
        return False, "ratios and times are compared as text"
    if too_much_work(*wanted, *got):
        return any(w == g for w in wanted for g in got), "too large to expand: as it stands"
    if (known := same_number(wanted, got)) is not None:
        return known, "the same number to thirty digits" if known else "different numbers"
    if clearly_different(wanted, got):
        return False, "different in value at a point"
    same = bool(verify(list(wanted), list(got), timeout_seconds=None))
    if same and accepted_wrongly(wanted, got):
        return False, "math-verify accepted two different values"
    return same, "math-verify"
