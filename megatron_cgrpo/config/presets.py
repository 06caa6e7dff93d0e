"""Methods are presets of one configuration, not code paths.

A preset only fills `algorithm.*` keys that the user left out; every one of them can be set.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024: standardised rewards, each response averaged over its own length.
    "grpo": {"trigger": "never", "normalize_std": True, "length_norm": "sequence"},
    # Liu et al. 2025: no standard deviation, no length normalisation.
    "dr_grpo": {"trigger": "never", "normalize_std": False, "length_norm": "none"},
    # arXiv 2506.03106: critiques and refinements for groups that failed altogether.
    "critique_grpo": {
        "trigger": "all_failed",
        "critique": "indicative",
        "normalize_std": False,
        "length_norm": "none",
    },
    # Control arm: the same sampling budget, but the second attempts see no critique.
    "resample": {
        "trigger": "all_failed",
        "critique": "none",
        "normalize_std": False,
        "length_norm": "none",
    },
}


def with_preset(algorithm: dict[str, Any]) -> dict[str, Any]:
    """`algorithm` with the defaults of its method under the keys that it sets itself."""
    preset = METHODS.get(algorithm.get("method", "critique_grpo"), {})
    return {**preset, **algorithm}
