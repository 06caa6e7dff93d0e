"""Prompt files: text with {names} that are filled in."""

from __future__ import annotations

from pathlib import Path

from megatron_cgrpo.config.errors import ConfigError


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
