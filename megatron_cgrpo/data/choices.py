"""Multiple-choice problems: lettered options, shuffled by a seed, the mapping kept."""

from __future__ import annotations

import random
from typing import Any

LETTERS = "ABCDEFGHIJ"


def lettered(
    question: str, options: list[Any], answer: Any, seed: str | None
) -> tuple[str, str, list[int]]:
    """Question text with options, the gold letter, and the order of the original options.

    Args:
        answer: a letter, the option's index, or its text.
        seed: shuffles the options; None keeps their order.

    Raises:
        ValueError: too many options, or an answer that names none of them.
    """
    texts = [str(o).strip() for o in options]
    if not 2 <= len(texts) <= len(LETTERS):
        raise ValueError(f"{len(texts)} options; 2 to {len(LETTERS)} are supported")
    gold = _index(answer, texts)
    if texts.count(texts[gold]) > 1:
        raise ValueError(f"two options have the text of the answer, {texts[gold][:60]!r}")
    order = list(range(len(texts)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    lines = [f"{LETTERS[i]}) {texts[original]}" for i, original in enumerate(order)]
    return "\n".join([question.strip(), "", *lines]), LETTERS[order.index(gold)], order


def _index(answer: Any, texts: list[str]) -> int:
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        if str(answer) in texts and texts.index(str(answer)) != answer:
            raise ValueError(f"the answer {answer} is the text of one option and counts another")
        return answer
    text = str(answer).strip()
    if len(text) == 1 and text in LETTERS[: len(texts)]:
        return LETTERS.index(text)
    if texts.count(text) == 1:
        return texts.index(text)
    raise ValueError(f"the answer {text[:60]!r} is no letter, index or text of an option")
