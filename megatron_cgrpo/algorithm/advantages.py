"""Group-relative advantages with one baseline over initial responses and refinements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_cgrpo.types import Group

# Below this spread the rewards of a group are equal up to rounding; dividing by it would only
# amplify noise.
_EQUAL = 1e-6


def group_advantages(rewards: Sequence[float], normalize_std: bool = False) -> list[float]:
    """Â_i = R_i − mean(R), divided by the (population) standard deviation if asked.

    The mean is over all members given: n initial responses and the kept refinements together.
    All values are 0 when the rewards are equal (also for a group of one).
    """
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    if max(rewards) - min(rewards) < _EQUAL:
        return [0.0] * len(rewards)
    centred = [r - mean for r in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / std for c in centred]


def with_advantages(group: Group, normalize_std: bool = False) -> Group:
    """The group with one advantage per member (initial, then refinements)."""
    rewards = [s.reward for s in group.members]
    return replace(group, advantages=tuple(group_advantages(rewards, normalize_std)))
