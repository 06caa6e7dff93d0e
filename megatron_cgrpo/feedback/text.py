"""Finding the part of a response that states its answer."""

from __future__ import annotations

import re

# Longer responses are cut to their end: the final answer stands there.
MAX_CHARACTERS = 40_000

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_BOX = "\\boxed{"


def without_thinking(response: str) -> str:
    """The end of a response, without closed thinking blocks."""
    # A block whose start was cut off, or that the prompt's template has opened.
    text = response[-MAX_CHARACTERS:]
    text = _THINK.sub(" ", text)
    return text.rpartition("</think>")[2]


def boxes(text: str) -> list[tuple[int, str]]:
    """(position, content) of every complete \\boxed{…} with balanced braces, in order."""
    found = []
    at = text.find(_BOX)
    while at >= 0:
        depth, start = 1, at + len(_BOX)
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                found.append((at, text[start:i].strip()))
                break
        at = text.find(_BOX, at + 1)
    return found
