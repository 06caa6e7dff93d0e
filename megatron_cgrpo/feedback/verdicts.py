"""Verifiers by problem kind: pure functions that run inside killable child processes.

Imports nothing heavy at module level: the worker imports a verifier when it first needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.types import Problem, Verdict
from megatron_cgrpo.worlds import WORLDS


@dataclass(frozen=True)
class Verifier:
    """How problems of one kind are judged.

    `gold` says why a problem's gold answer cannot be judged against, or None for a usable one;
    where there is no such check, golds are taken as they are.
    """

    verify: Callable[[Problem, str], Verdict]
    gold: Callable[[Problem], str | None] = lambda problem: None


def _math(options: Feedback) -> Verifier:
    # Seconds of imports, which must not count as a verdict's time.
    import math_verify  # noqa: F401
    import sympy  # noqa: F401

    from megatron_cgrpo.feedback.math_verifier import unreadable_gold, verify_math

    return Verifier(verify_math, lambda problem: unreadable_gold(problem.answer))


def _choice(options: Feedback) -> Verifier:
    from megatron_cgrpo.feedback.choice_verifier import unreadable_letter, verify_choice

    return Verifier(verify_choice, lambda problem: unreadable_letter(problem.answer))


def _code(options: Feedback) -> Verifier:
    from megatron_cgrpo.feedback.code_verifier import unusable_tests, verify_code

    # The verifier must outlive the program to say what became of it.
    timeout_s = min(options.code_timeout_s, 0.8 * options.timeout_s)
    limits = {"timeout_s": timeout_s, "memory_mib": options.code_memory_mib}
    return Verifier(partial(verify_code, **limits), partial(unusable_tests, **limits))


VERIFIERS: dict[str, Callable[[Feedback], Verifier]] = {
    "math": _math,
    "choice": _choice,
    "code": _code,
    **{kind: lambda options, world=world: Verifier(world.verify) for kind, world in WORLDS.items()},
}


def check_kinds(kinds: set[str], options: Feedback) -> None:
    """Refuse problems that no verifier can judge, and verifiers that cannot be imported.

    Raises:
        ConfigError: naming the kinds, or the path and what is wrong with it.
    """
    known = VERIFIERS.keys() | options.verifiers.keys()
    unknown = kinds - known
    if unknown:
        raise ConfigError(
            f"no verifier for problems of kind {sorted(unknown)}; known: {sorted(known)}"
        )
    for kind in kinds & options.verifiers.keys():
        resolve(kind, options)


def resolve(kind: str, options: Feedback) -> Verifier:
    """The verifier of a kind; one of `feedback.verifiers` goes before ours.

    Raises:
        ConfigError: when its module or function is not there.
    """
    own = options.verifiers
    if kind not in own:
        return VERIFIERS[kind](options)
    module, _, name = own[kind].rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"feedback.verifiers.{kind}={own[kind]} cannot be imported: {e}") from e
    if not callable(found):
        raise ConfigError(f"feedback.verifiers.{kind}={own[kind]} is not a function")
    return Verifier(found)
