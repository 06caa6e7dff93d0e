"""What feedback needs to know of a world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_cgrpo.types import Problem, Verdict


@dataclass(frozen=True)
class World:
    """How the responses to a world's problems are judged and criticised.

    `verify(problem, response)` is the verdict; `critique(problem, response, kind)` what its checker
    says, for each of the kinds in `critiques` (as `algorithm.critique` names them). `says(right)`
    is all that it says of a response of which nothing but the verdict is known.
    """

    verify: Callable[[Problem, str], Verdict]
    critique: Callable[[Problem, str, str], str]
    critiques: tuple[str, ...]
    says: Callable[[bool], str]
