"""Prompt files: text with {names} that are filled in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_cgrpo.config.errors import ConfigError

OMISSION = "\n[...]\n"


def fill(template: str, **values: str) -> str:
    """Replace {name} literally: neither template nor values are format strings (LaTeX braces)."""
    out, rest = [], template
    while rest:
        hits = [(i, n) for n in values if (i := rest.find("{" + n + "}")) >= 0]
        if not hits:
            break
        at, name = min(hits)
        out += [rest[:at], values[name]]
        rest = rest[at + len(name) + 2 :]
    return "".join(out) + rest


def without_middle(text: str, fits: Callable[[str], bool]) -> str | None:
    """The text, its middle left out as far as needed to fit; None when nothing of it fits."""
    if fits(text):
        return text
    if not fits(OMISSION):
        return None
    # As many characters as fit; token counts are monotone enough for bisection.
    low, high = 0, len(text) // 2
    while low < high:
        keep = (low + high + 1) // 2
        if fits(text[:keep] + OMISSION + text[-keep:]):
            low = keep
        else:
            high = keep - 1
    return text[:low] + OMISSION + (text[-low:] if low else "")


def read_template(path: str | Path, names: tuple[str, ...]) -> str:
    """The text of a prompt file.

    Raises:
        ConfigError: unreadable, or without one of the names.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip("\n")
    except OSError as e:
        raise ConfigError(f"cannot read the prompt file {path}: {e.strerror}") from e
    for name in names:
        if "{" + name + "}" not in text:
            raise ConfigError(f"the prompt file {path} lacks {{{name}}}")
    return text
