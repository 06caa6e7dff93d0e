"""Mathematical equality of a response's final answer with the gold answer.

math-verify decides; our guards stand before it where it compares by float or truncates
(math-verify 0.9.0 accepts 2 for 2 2/3 and 1/2006! for 1/2004!): plain rational numbers are
compared exactly, and values beyond a float's reach are never handed over.
"""

from __future__ import annotations

import re
from fractions import Fraction

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
    r"(?!(?:sqrt|sin|cos|tan|log|exp|times|percent)\b)[A-Za-z]{3}[A-Za-z .'-]*"
)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")


def verify_math(problem: Problem, response: str) -> Verdict:
    """Verdict on the last answer that the response states; `None` when there is no readable gold.

    Text that math-verify reads as no formula ("east") is compared as text by it.
    """
    gold = problem.answer
    if not gold.strip():
        return Verdict(None, None, "the gold answer is empty")
    answer = extract_answer(response)
    if answer is None:
        return Verdict(False, None, "no answer found")
    exact_gold, exact = rational(gold), rational(answer)
    if exact_gold is not None and exact is not None:
        same = exact_gold == exact
        return Verdict(same, answer, "exact comparison of rational numbers")
    if _too_large(answer) or _too_large(gold):
        same = _plain(answer) == _plain(gold)
        return Verdict(same, answer, "too large to evaluate: compared as text")
    return _library(gold, answer)


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


_PLAIN_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?|-?\.\d+")
_FRACTION = re.compile(r"(-?\d+)\s*/\s*(\d+)")
_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
# math-verify 0.9.0 stops parsing at \mathrm{e} and then compares what stands before it.
_UPRIGHT = re.compile(r"\\(?:mathrm|operatorname)\s*\{\s*([a-zA-Z])\s*\}")
_MIXED = re.compile(r"(-?)(\d+)\s+(\d+)\s*/\s*(\d+)")


def rational(text: str) -> Fraction | None:
    """The value of an integer, decimal, fraction, mixed number or percentage; else None."""
    t = _plain(text)
    scale = Fraction(1)
    for suffix in ("\\%", "%", " percent"):
        if t.endswith(suffix):
            t, scale = t.removesuffix(suffix).strip(), Fraction(1, 100)
            break
    if len(t) > 60:
        return None
    try:
        if _PLAIN_NUMBER.fullmatch(t):
            return Fraction(t.replace(",", "")) * scale
        if m := _FRACTION.fullmatch(t):
            return Fraction(int(m[1]), int(m[2])) * scale
        if m := _LATEX_FRACTION.fullmatch(t):
            return Fraction(int(m[2]), int(m[3])) * (-1 if m[1] else 1) * scale
        if m := _MIXED.fullmatch(t):
            value = int(m[2]) + Fraction(int(m[3]), int(m[4]))
            return (-value if m[1] else value) * scale
    except ZeroDivisionError:
        return None
    return None


def _plain(text: str) -> str:
    """Without dollar signs, outer blanks, thin spaces, a final period, and upright letters."""
    text = _UPRIGHT.sub(r"\1", text)
    t = text.strip().removeprefix("\\(").removesuffix("\\)").replace("$", "").replace("\\!", "")
    return t.replace("\\,", "").strip().rstrip(".").strip()


def _too_large(text: str) -> bool:
    """Power towers, factorials and very long digit strings: evaluating them may not end, and
    comparing them as floats is wrong."""
    towers = len(re.findall(r"\^", text)) >= 3 or bool(re.search(r"\^\s*\{?\s*\d+\s*\^", text))
    return towers or "!" in text.replace("\\!", "") or bool(re.search(r"\d{40}", text))


def _library(gold: str, answer: str) -> Verdict:
    from math_verify import parse, verify

    # No time-outs inside: they use SIGALRM; the pool kills a worker that takes too long.
    wanted = parse(f"${_plain(gold)}$", parsing_timeout=None)
    if not wanted:
        return Verdict(None, answer, f"the gold answer {gold[:80]!r} cannot be parsed")
    got = parse(f"${_plain(answer)}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not got:
        return Verdict(False, answer, "the answer cannot be parsed")
    same = bool(verify(wanted, got, timeout_seconds=None))
    if same and _numerically_apart(wanted, got):
        return Verdict(False, answer, "math-verify accepted two different values")
    return Verdict(same, answer, "math-verify")


def _numerically_apart(wanted: list, got: list) -> bool:
    """Whether all parsed forms of the two are numbers of clearly different value.

    math-verify takes e as a free symbol in some forms and then accepts 1 − 1/e for 1 + 1/e.
    """
    import sympy

    def values(forms: list) -> list[complex]:
        symbols = {sympy.Symbol("e"): sympy.E, sympy.Symbol("pi"): sympy.pi}
        numbers = []
        for form in forms:
            if isinstance(form, sympy.Expr):
                value = form.subs(symbols)
                if value.is_number:
                    numbers.append(complex(value.evalf(30)))
        return numbers

    pairs = [(w, g) for w in values(wanted) for g in values(got)]
    return bool(pairs) and all(abs(w - g) > 1e-6 * max(1.0, abs(w)) for w, g in pairs)
