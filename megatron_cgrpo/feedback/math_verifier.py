"""Mathematical equality of a response's final answer with the gold answer.

What `math_forms` can decide exactly is decided there: equal texts, rational numbers, lists by
their members. The rest goes to math-verify, whose "equal" is checked once more where it compares
by float or truncates (release 0.9.0 accepts 2 for 2 2/3 and 1/2006! for 1/2004!).
"""

from __future__ import annotations

import functools
import re

from megatron_cgrpo.feedback.math_forms import (
    bracketed,
    elements,
    is_percentage,
    plain,
    rational,
    too_large,
    unit,
    without_name,
)
from megatron_cgrpo.feedback.text import boxes, without_thinking
from megatron_cgrpo.types import Problem, Verdict

MAX_ANSWER = 400

_MARKED = re.compile(r"\banswer\b[\s*_]*(?:is|[:=])[\s*_:]*([^\n]+)", re.IGNORECASE)
# Where a stated answer ends: at a sentence's end or at a reason.
_ANSWER_END = re.compile(r"\.(?:\s|$)|[,;]?\s+(?:because|since|as|so)\b|\*\*")
_FORMULA = re.compile(r"[\d\\$+*/^=!]")
# "72 clips" is 72, but "2 pi" and "3 x" are not 2 and 3.
_WORDS_AFTER_NUMBER = re.compile(
    r"\$?(-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)\$?\s+"
    r"(?!(?:sqrt|sin|cos|tan|log|exp|times|percent|and|or)\b)[A-Za-z]{3}[A-Za-z .'-]*"
)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")


def verify_math(problem: Problem, response: str) -> Verdict:
    """Verdict on the last answer that the response states; `None` when there is no readable gold.

    A percent sign may be left out on one side when the question asks for a percentage. Text that
    math-verify reads as no formula ("east") is compared as text by it.
    """
    gold = problem.answer
    if not gold.strip():
        return Verdict(None, None, "the gold answer is empty")
    answer = extract_answer(response)
    if answer is None:
        return Verdict(False, None, "no answer found")
    asked_for_percent = re.search(r"percent|%", problem.question, re.IGNORECASE) is not None
    same, reason = _same(gold, answer, asked_for_percent)
    return Verdict(same, answer, reason)


def unreadable_gold(answer: str) -> str | None:
    """Why a gold answer cannot be judged against; None for a readable one."""
    if not answer.strip():
        return "it is empty"
    if len(answer) > MAX_ANSWER:
        return f"it is longer than {MAX_ANSWER} characters"
    if answer.replace("\\{", "").count("{") != answer.replace("\\}", "").count("}"):
        return "its braces do not match"
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
    if boxed:
        return boxed[-1][1][:MAX_ANSWER]
    for stated in reversed(_MARKED.findall(text)):
        candidate = _ANSWER_END.split(stated, maxsplit=1)[0].strip(" *_")
        if not (_FORMULA.search(candidate) or re.fullmatch(r"[a-zA-Z]{1,2}|pi", candidate)):
            continue  # words only: no answer was stated here
        number = _WORDS_AFTER_NUMBER.fullmatch(candidate)
        return (number[1] if number else candidate)[:MAX_ANSWER]
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _same(gold: str, answer: str, percent: bool = False) -> tuple[bool | None, str]:
    """Whether two answers have the same value, and how that was found."""
    left, right = plain(gold), plain(answer)
    if left == right or without_name(left) == without_name(right):
        return True, "the same text"
    exact = _same_number(gold, answer, percent)
    if exact is not None:
        return exact, "exact comparison of rational numbers"
    for compare in (_same_list, _same_brackets):
        verdict = compare(left, right, percent)
        if verdict is not None:
            return verdict
    if too_large(left) or too_large(right):
        return False, "too large to evaluate: compared as text"
    if "\\dots" in left + right:
        return False, "open lists are compared as text"
    if "=" not in left:
        right = without_name(right)
    return _library(left, right)


def _same_number(gold: str, answer: str, percent: bool) -> bool | None:
    wanted, got = rational(gold), rational(answer)
    if wanted is None or got is None:
        return None
    units = {unit(gold), unit(answer)} - {None}
    if len(units) > 1:
        return False
    if percent and is_percentage(gold) != is_percentage(answer):
        scale = 100 if is_percentage(gold) else 1
        shown = got * 100 if is_percentage(answer) else got
        return wanted == got or wanted * scale == shown
    return wanted == got


def _same_list(gold: str, answer: str, percent: bool) -> tuple[bool | None, str] | None:
    """Lists without brackets, in any order; None when neither is one."""
    wanted, got = elements(gold), elements(answer)
    if len(wanted) == len(got) == 1:
        return None
    reason = "lists compared by their members"
    if len(wanted) != len(got):
        # (3, 4) | 3, 4: the same members without brackets
        inner = next((b for b in (bracketed(gold), bracketed(answer)) if b), None)
        if inner is None or 1 not in (len(wanted), len(got)):
            return False, reason
        other = got if len(wanted) == 1 else wanted
        return _in_order(inner[1], other, percent), reason
    rest = list(got)
    for member in wanted:
        hit = next((g for g in rest if _same(member, g, percent)[0] is True), None)
        if hit is None:
            return False, reason
        rest.remove(hit)
    return True, reason


def _same_brackets(gold: str, answer: str, percent: bool) -> tuple[bool | None, str] | None:
    """Points and intervals, in order and with the same brackets; None when one is neither."""
    wanted, got = bracketed(gold), bracketed(answer)
    if wanted is None or got is None:
        return None
    same_kind = (wanted[0], wanted[2]) == (got[0], got[2])
    return same_kind and _in_order(wanted[1], got[1], percent), "compared member by member"


def _in_order(wanted: list[str], got: list[str], percent: bool) -> bool:
    return len(wanted) == len(got) and all(
        _same(w, g, percent)[0] is True for w, g in zip(wanted, got)
    )


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> tuple:
    from math_verify import parse

    # No time-outs inside: they use SIGALRM; the pool kills a worker that takes too long.
    return tuple(parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None))


def _library(gold: str, answer: str) -> tuple[bool | None, str]:
    from math_verify import verify

    from megatron_cgrpo.feedback.math_values import accepted_wrongly, clearly_different

    wanted, got = _parse(gold), _parse(answer)
    if not wanted:
        return None, f"the gold answer {gold[:80]!r} cannot be parsed"
    if not got:
        return False, "the answer cannot be parsed"
    if clearly_different(wanted, got):
        return False, "different in value at a point"
    same = bool(verify(list(wanted), list(got), timeout_seconds=None))
    if same and accepted_wrongly(wanted, got):
        return False, "math-verify accepted two different values"
    return same, "math-verify"
