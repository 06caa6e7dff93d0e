"""Verifiers by problem kind: pure functions that run inside killable child processes.

Imports nothing heavy at module level: the worker imports a verifier when it first needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.types import Problem, Verdict

Verifier = Callable[[Problem, str], Verdict]


def _math() -> Verifier:
    # Seconds of imports, which must not count as a verdict's time.
    import math_verify  # noqa: F401
    import sympy  # noqa: F401

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


def check_kinds(kinds: set[str], own: Mapping[str, str]) -> None:
    """Refuse problems that no verifier can judge, and verifiers that cannot be imported.

    Args:
        own: `feedback.verifiers`, kind → dotted path.

    Raises:
        ConfigError: naming the kinds, or the path and what is wrong with it.
    """
    known = VERIFIERS.keys() | own.keys()
    unknown = kinds - known
    if unknown:
        raise ConfigError(
            f"no verifier for problems of kind {sorted(unknown)}; known: {sorted(known)}"
        )
    for kind in kinds & own.keys():
        resolve(kind, own)


def resolve(kind: str, own: Mapping[str, str]) -> Verifier:
    """The verifier of a kind; one of `own` goes before ours.

    Raises:
        ConfigError: when its module or function is not there.
    """
    if kind not in own:
        return VERIFIERS[kind]()
    module, _, name = own[kind].rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"feedback.verifiers.{kind}={own[kind]} cannot be imported: {e}") from e
    if not callable(found):
        raise ConfigError(f"feedback.verifiers.{kind}={own[kind]} is not a function")
    return found
