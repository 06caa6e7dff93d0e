"""Watching for the collapse that training on refinements can bring."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_cgrpo.config.training import Guards

METRICS = {
    "context_shift_kl": "policy/context_shift_kl",
    "entropy": "policy/entropy",
    "refinement_share": "gradient/refinement_share",
}
"""Guard → the metric that it limits."""


class Watch:
    """Compares each step with the limits of `options`."""

    def __init__(self, options: Guards) -> None:
        self._options = options
        self._over = dict.fromkeys(METRICS, 0)

    def check(self, values: Mapping[str, float]) -> tuple[list[str], str | None]:
        """(warnings, why to stop) for the metrics of a step; None: go on."""
        warnings, stop = [], None
        for guard, metric in METRICS.items():
            limit, value = getattr(self._options, guard), values[metric]
            # A NaN is over every limit.
            if limit is None or value <= limit:
                self._over[guard] = 0
                continue
            self._over[guard] += 1
            warnings.append(
                f"{metric} = {value:.3g} is over training.guards.{guard} = {limit:g} "
                f"({self._over[guard]} of {self._options.patience} steps)"
            )
            if self._over[guard] >= self._options.patience:
                stop = warnings[-1]
        return warnings, stop
