"""Multiple choice (GPQA, MMLU-Pro: A–J): the last letter that the response states as its answer."""

from __future__ import annotations

import re

from megatron_cgrpo.data.boxes import boxes
from megatron_cgrpo.feedback.text import without_thinking
from megatron_cgrpo.types import Problem, Verdict

LETTERS = "ABCDEFGHIJ"

# What may stand between "answer is" and the letter, and around a letter that stands alone. Bounded:
# endless blanks must not take endless time.
_DECORATION = (
    r"[\s*_(\[{\"'`:$]{0,12}(?:\\(?:text|mathrm|mathbf|textbf)\s{0,3}\{\s{0,3})?[\s(*]{0,6}"
)
_STATED = re.compile(
    r"(?i:\b(?:answer|choice|option)\b)\s{0,6}(?:(?i:is|would be|must be)\b)?\s{0,6}[:=]?\s{0,6}"
    r"(?i:option\s{0,6})?" + _DECORATION + r"([A-J])(?![A-Za-z0-9'’])"
)
_PRONOUN_GOES_ON = re.compile(r"\s+(?!(?:because|since|as|so|and|with)\b)[a-z]")
_ALONE = re.compile(r"^[ \t*_(\[]{0,12}([A-J])[ \t*_)\].:]{0,12}$", re.MULTILINE)
_IN_BOX = re.compile(_DECORATION + r"([A-J])(?:[\s)\]}.:*$].*)?", re.DOTALL)


def verify_choice(problem: Problem, response: str) -> Verdict:
    """Right if the last stated letter is the gold one; a response that states none is wrong.

    The gold answer is a letter. Nothing is guessed from letters inside sentences.
    """
    unreadable = unreadable_letter(problem.answer)
    if unreadable:
        return Verdict(None, None, f"the gold answer cannot be used: {unreadable}")
    gold = _letter(problem.answer)
    letter = extract_choice(response)
    if letter is None:
        return Verdict(False, None, "no choice is stated")
    return Verdict(letter == gold, letter, "the last stated choice")


def _letter(answer: str) -> str:
    return answer.strip().strip("().").upper()


def unreadable_letter(answer: str) -> str | None:
    """Why a gold answer is no option's letter; None for one that is."""
    letter = _letter(answer)
    if len(letter) == 1 and letter in LETTERS:
        return None
    return f"{answer[:40]!r} is not a letter A–J"


def extract_choice(response: str) -> str | None:
    """The letter stated last: in a box, by "the answer is X", or on a line of its own."""
    text = without_thinking(response)
    found: list[tuple[int, str]] = []
    for at, content in boxes(text):
        inside = _IN_BOX.fullmatch(content.strip())
        if inside:
            found.append((at, inside[1]))
    for m in _STATED.finditer(text):
        # "the answer is I think …": a pronoun, not the ninth option.
        if m[1] == "I" and _PRONOUN_GOES_ON.match(text, m.end()):
            continue
        found.append((m.start(), m[1]))
    found += [(m.start(), m[1]) for m in _ALONE.finditer(text)]
    return max(found)[1] if found else None
