"""Finding the part of a response that states its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Longer responses are cut to their end: the final answer stands there.
MAX_CHARACTERS = 40_000

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_BOX = "\\boxed{"


def without_thinking(response: str) -> str:
    """The end of a response, without thinking blocks: closed ones, and one that was cut off."""
    start = response.rfind("<think>")
    if start > response.rfind("</think>"):
        response = response[:start]
    # A block whose start was cut off, or that the prompt's template has opened.
    text = response[-MAX_CHARACTERS:]
    text = _THINK.sub(" ", text)
    return text.rpartition("</think>")[2]


def is_cut_off(text: str, boxes: Sequence[tuple[int, str]]) -> bool:
    """Whether the last box was never closed: what stands in it may be the beginning of an answer.

    Args:
        boxes: the complete ones, with their positions.
    """
    return text.rfind(_BOX) > (boxes[-1][0] if boxes else -1)
