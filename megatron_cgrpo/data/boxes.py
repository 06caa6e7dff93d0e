"""Answers in \\boxed{…}."""

from __future__ import annotations

import re

_BOX = "\\boxed{"
_BRACES = re.compile(r"\\boxed\{|[{}]")


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
