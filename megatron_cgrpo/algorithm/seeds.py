"""Seeds of single requests."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: object) -> int:
    """A 31-bit seed that depends on nothing but its parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
