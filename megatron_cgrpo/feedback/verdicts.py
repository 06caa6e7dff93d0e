"""Verifiers by problem kind: pure functions that run inside killable child processes.

Imports nothing heavy at module level: the worker imports a verifier when it first needs it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_cgrpo.types import Problem, Verdict

Verifier = Callable[[Problem, str], Verdict]


def _math() -> Verifier:
    from megatron_cgrpo.feedback.math_verifier import verify_math

    return verify_math


def _chain() -> Verifier:
    from megatron_cgrpo.worlds.chain import verify_chain

    return verify_chain


VERIFIERS: dict[str, Callable[[], Verifier]] = {"math": _math, "chain": _chain}
