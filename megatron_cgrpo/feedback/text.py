"""Finding the part of a response that states its answer."""

from __future__ import annotations

import re

# Longer responses are cut to their end: the final answer stands there.
MAX_CHARACTERS = 40_000

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_BOX = "\\boxed{"
_BRACES = re.compile(r"\\boxed\{|[{}]")


def without_thinking(response: str) -> str:
    """The end of a response, without closed thinking blocks."""
    # A block whose start was cut off, or that the prompt's template has opened.
    text = response[-MAX_CHARACTERS:]
    text = _THINK.sub(" ", text)
    return text.rpartition("</think>")[2]


def boxes(text: str) -> list[tuple[int, str]]:
    """(position, content) of every complete \\boxed{…} with balanced braces, in order."""
    found: list[tuple[int, str]] = []
    open_braces: list[int | None] = []  # where a box began, or None for a brace of another kind
    for m in _BRACES.finditer(text):
        if m[0] == "}":
            if open_braces and (start := open_braces.pop()) is not None:
                found.append((start, text[start + len(_BOX) : m.start()].strip()))
        else:
            open_braces.append(m.start() if m[0] == _BOX else None)
    return sorted(found)
