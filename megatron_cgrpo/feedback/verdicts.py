"""Verifiers by problem kind: pure functions that run inside killable child processes.

Imports nothing heavy at module level: the worker imports a verifier when it first needs it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.types import Problem, Verdict

Verifier = Callable[[Problem, str], Verdict]


def _math() -> Verifier:
    from megatron_cgrpo.feedback.math_verifier import verify_math

    return verify_math


def _choice() -> Verifier:
    from megatron_cgrpo.feedback.choice_verifier import verify_choice

    return verify_choice


def _chain() -> Verifier:
    from megatron_cgrpo.worlds.chain import verify_chain

    return verify_chain


VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "math": _math,
    "choice": _choice,
    "chain": _chain,
}


def check_kinds(kinds: set[str]) -> None:
    """Refuse problems that no verifier can judge.

    Raises:
        ConfigError: naming the kinds.
    """
    unknown = kinds - VERIFIERS.keys()
    if unknown:
        raise ConfigError(
            f"no verifier for problems of kind {sorted(unknown)}; known: {sorted(VERIFIERS)}"
        )
