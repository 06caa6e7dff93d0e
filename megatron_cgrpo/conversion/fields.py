"""Typed fields of a config.json."""

from __future__ import annotations

import math
from typing import Any

from megatron_cgrpo.config.errors import ConfigError

LARGEST = 1 << 40


def size(hf: dict[str, Any], *names: str) -> int:
    """A positive whole number, under the first of these names that is there.

    Raises:
        ConfigError: absent, null, or of another type.
    """
    name = next((n for n in names if n in hf), names[0])
    if name not in hf:
        raise ConfigError(f"config.json lacks {name}")
    value = hf[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LARGEST:
        raise ConfigError(f"config.json: {name} is {value!r:.60}, not a positive whole number")
    return value


def number(hf: dict[str, Any], name: str) -> float:
    """A positive number.

    Raises:
        ConfigError: absent, null, or of another type.
    """
    value = hf.get(name)
    # JSON has no NaN; Python's reader takes it, and whole numbers of any size.
    proper = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not proper or not 0 < value < LARGEST or not math.isfinite(value):
        raise ConfigError(f"config.json: {name} is {value!r:.60}, not a positive number")
    return float(value)


def mapping(hf: dict[str, Any], name: str) -> dict[str, Any]:
    """A mapping; empty where it is absent or null.

    Raises:
        ConfigError: of another type.
    """
    value = hf.get(name)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"config.json: {name} is {value!r:.60}, not a mapping")
    return dict(value or {})
