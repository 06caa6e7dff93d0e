"""Multiple choice (GPQA, MMLU-Pro: A–J): the last letter that the response states as its answer."""

from __future__ import annotations

import re

from megatron_cgrpo.data.boxes import boxes
from megatron_cgrpo.feedback.text import is_cut_off, without_thinking
from megatron_cgrpo.types import Problem, Verdict

LETTERS = "ABCDEFGHIJ"

# What may stand between "answer is" and the letter, and around a letter that stands alone. Bounded:
# endless blanks must not take endless time.
_DECORATION = (
    r"[\s*_(\[{\"'`:$]{0,12}(?:\\(?:text|mathrm|mathbf|textbf)\s{0,3}\{\s{0,3})?[\s(*]{0,6}"
)
# As the answers of multilingual evaluations begin: German, French, Spanish, Portuguese, Italian,
# Russian, Korean, Chinese, Japanese, Hindi, Bengali, Arabic, Indonesian, Vietnamese, Polish,
# Swahili, Yoruba, Turkish.
_MARKERS = (
    "answer|choice|option|antwort|réponse|reponse|respuesta|resposta|risposta|ответ|정답|답변|답|"
    "答案|答え|回答|解答|उत्तर|উত্তর|الإجابة|الاجابة|الجواب|الإجابه|jawaban|đáp án|odpowiedź|jibu|"
    "ìdáhùn|cevap"
)
_IS = (
    "is|would be|must be|ist|est|es|é|è|are|:|：|=|は|が|是|为|為|은|는|है|হল|হলো|هي|هو|adalah|là|"
    "option|خيار"
)
_BLANK = r"[\s*_]{0,6}"
_STATED = re.compile(
    rf"(?<![A-Za-zÀ-ÿ])(?i:{_MARKERS}){_BLANK}(?:(?:correcta|correta|corretta|correcte)\s+)?(?:(?i:{_IS})(?![a-z]){_BLANK}){{0,3}}(?:(?:la|le|el|die|der|das)\s+)?"
    + _DECORATION
    + r"([A-Ja-j])(?![A-Za-z0-9'’À-ÿ])"
)
_SENTENCE_GOES_ON = re.compile(r"\s+(?!(?:because|since|as|so|and|with|or)\b)[a-z]")
# A lower-case letter is a choice where nothing follows that would make it a word of a sentence.
_ENDS = re.compile(r"[\s*_)\].}\"'`,;:!]*(?:$|\n)|\)|\s+(?:because|since)\b")
_OTHER_LETTER = re.compile(
    r"[\s*_)]{0,6}(?:or|oder|ou|o|или|或|または|/|,|&|and|und|et|y)\s{0,3}[(*]{0,3}[A-Ja-j]\b"
)
_ALONE = re.compile(r"^[ \t*_(\[]{0,12}([A-J])[ \t*_)\].:]{0,12}$", re.MULTILINE)
_IN_BOX = re.compile(_DECORATION + r"([A-J])(?:[\s)\]}.:*$](?!\s*[=<>+]).*)?", re.DOTALL)
_OPTION_LINE = re.compile(
    r"^[ \t*_(]{0,6}([A-J])[ \t]{0,2}[).:][ \t*_]{0,6}(\S.*?)[ \t*_.]{0,6}$", re.MULTILINE
)


def verify_choice(problem: Problem, response: str) -> Verdict:
    """Right if the last stated letter is the gold one; a response that states none is wrong.

    The gold answer is a letter. Nothing is guessed from letters inside sentences.
    """
    unreadable = unreadable_letter(problem.answer)
    if unreadable:
        return Verdict(None, None, f"the gold answer cannot be used: {unreadable}")
    gold = _letter(problem.answer)
    letter = extract_choice(response, problem.question)
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


def extract_choice(response: str, question: str = "") -> str | None:
    """The letter stated last: in a box, by "the answer is X" in one of many languages, on a line of
    its own, or as the last line that repeats an option of the question, letter and text."""
    text = without_thinking(response)
    boxed = boxes(text)
    if is_cut_off(text, boxed):
        return None
    found: list[tuple[int, str]] = []
    for at, content in boxed:
        inside = _IN_BOX.fullmatch(content.strip())
        if inside and not _OTHER_LETTER.match(content.strip(), inside.end(1)):
            found.append((at, inside[1]))
    for m in _STATED.finditer(text):
        if not _is_no_choice(text, m):
            found.append((m.start(), m[1].upper()))
    found += [(m.start(), m[1]) for m in _ALONE.finditer(text)]
    options = {m[1]: m[2] for m in _OPTION_LINE.finditer(question)}
    last = text.rstrip().rpartition("\n")[2]
    repeated = _OPTION_LINE.fullmatch(last) if options else None
    if repeated and repeated[2] in options.values():
        # The text of one option under another's letter is no choice.
        return repeated[1] if options.get(repeated[1]) == repeated[2] else None
    return max(found)[1] if found else None


def _is_no_choice(text: str, stated: re.Match[str]) -> bool:
    """Articles, pronouns, alternatives: "the answer is a good one", "is I think", "is A or B"."""
    letter, end = stated[1], stated.end(1)
    if _OTHER_LETTER.match(text, end):
        return True
    if letter in "AI" and _SENTENCE_GOES_ON.match(text, end):
        return True
    return letter.islower() and not _ENDS.match(text, end)
