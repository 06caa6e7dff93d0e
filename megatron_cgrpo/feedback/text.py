"""Finding the part of a response that states its answer."""

from __future__ import annotations

import re

# Longer responses are cut to their end: the final answer stands there.
MAX_CHARACTERS = 40_000

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


def without_thinking(response: str) -> str:
    """The end of a response, without closed thinking blocks."""
    # A block whose start was cut off, or that the prompt's template has opened.
    text = response[-MAX_CHARACTERS:]
    text = _THINK.sub(" ", text)
    return text.rpartition("</think>")[2]
