"""What the actor reports of a step: plain numbers, readable without Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step: loss sums over the mini-batch (kernels.policy_loss.SUMS), norms, whether
    it was taken."""

    sums: dict[str, float]
    max_log_ratio: float
    grad_norm: float
    refinement_grad_norm: float | None
    lr: float
    applied: bool


@dataclass(frozen=True)
class ScoreResult:
    """Sums over all loss tokens of a batch (see actor.SCORE_SUMS) and the largest engine gap."""

    sums: dict[str, float]
    max_engine_gap: float
