"""The Critique-GRPO policy loss over token columns.

Maximised per token, times `weight` (which holds every normaliser), summed:

* initial tokens, r = π/π_old:      min(r Â, clip(r, 1−ε_low, 1+ε_high) Â)        (paper, eq. 1, 3)
* refinement tokens, ρ = π/(π+γ):   min(ρ Â, clip(ρ, 1−ε_low, 1+ε_high) Â)        (paper, eq. 4)

π is always conditioned on the problem alone. With l = log π:

    ρ = sigmoid(l − ln γ),   dρ/dl = ρ (1 − ρ) = γ π/(π + γ)²,   dr/dl = r

Since ρ < 1 the clip never binds for Â > 0; for Â < 0 it zeroes the gradient where ρ < 1 − ε_low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from megatron_cgrpo.config.algorithm import Algorithm
from megatron_cgrpo.kernels import backend

# exp(±20) is finite in float32 and its square too; no trusted update has such a ratio.
MAX_LOG_RATIO = 20.0

SUMS = (
    "initial_tokens",
    "refinement_tokens",
    "ratio",
    "clipped_low",
    "clipped_high",
    "rho",
    "rho_clipped",
    "approx_kl",
    "reference_kl",
    "entropy",
    "objective_initial",
    "objective_refinement",
)


@dataclass(frozen=True)
class LossColumns:
    """Inputs of the loss, all [tokens]; see `Batch`. `reference_logprob` only with kl_coef > 0."""

    old_logprob: torch.Tensor
    engine_logprob: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    is_refinement: torch.Tensor
    loss_mask: torch.Tensor
    reference_logprob: torch.Tensor | None = None

    def cut(self, rows: slice | torch.Tensor) -> LossColumns:
        """The same columns for some of the tokens."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return LossColumns(**{k: None if v is None else v[rows] for k, v in values.items()})


def policy_loss(
    logprob: torch.Tensor, entropy: torch.Tensor, columns: LossColumns, options: Algorithm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `policy_loss_reference`; one fused kernel where Triton runs (float32)."""
    if logprob.dtype == torch.float32 and backend.use_triton(logprob):
        from megatron_cgrpo.kernels.policy_loss_triton import FusedPolicyLoss

        return FusedPolicyLoss.apply(logprob, entropy, columns, options, MAX_LOG_RATIO)
    return policy_loss_reference(logprob, entropy, columns, options)


def policy_loss_reference(
    logprob: torch.Tensor, entropy: torch.Tensor, columns: LossColumns, options: Algorithm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss to minimise, sums for the metrics, and the largest |log ratio| of initial tokens.

    Args:
        logprob: [tokens] float32, log π_θ of each token, differentiable.
        entropy: [tokens] float32; differentiable when `entropy_coef` > 0.
        columns: the other columns.
        options: clipping, γ, and the optional terms.

    Returns:
        (loss, sums, max_log_ratio): a scalar; float64 [len(SUMS)] in the order of SUMS, detached;
        a scalar, detached.
    """
    c, low, high = columns, 1 - options.clip_low, 1 + options.clip_high
    mask, refined = c.loss_mask, c.is_refinement & c.loss_mask
    initial = mask & ~c.is_refinement
    advantage = c.advantage

    log_ratio = torch.where(initial, logprob - c.old_logprob, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if options.dual_clip is not None:
        bounded = torch.maximum(plain, options.dual_clip * advantage)
        plain = torch.where(advantage < 0, bounded, plain)
    if options.importance_cap is not None:
        gap = (c.old_logprob - c.engine_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        plain = plain * gap.exp().clamp(max=options.importance_cap)

    rho = torch.sigmoid(logprob - math.log(options.gamma))
    shaped = rho * advantage
    if options.clip_refinements:
        shaped = torch.minimum(shaped, rho.clamp(low, high) * advantage)

    objective = torch.where(c.is_refinement, shaped, plain)
    weight = torch.where(mask, c.weight, 0.0)
    gain = objective
    reference_kl = torch.zeros_like(logprob)
    if options.kl_coef > 0:
        d = (c.reference_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        reference_kl = d.exp() - d - 1
        gain = gain - options.kl_coef * reference_kl
    if options.entropy_coef > 0:
        gain = gain + options.entropy_coef * entropy
    loss = -torch.where(mask, weight * gain, 0.0).sum()

    with torch.no_grad():
        sums = [
            initial,
            refined,
            ratio * initial,
            initial & (ratio < low) & (advantage < 0),
            initial & (ratio > high) & (advantage > 0),
            rho * refined,
            refined & (rho < low) & (advantage < 0) & options.clip_refinements,
            # k3 of KL(π_old ‖ π): the tokens were sampled from π_old.
            (ratio - 1 - ratio.log()) * initial,
            reference_kl * mask,
            entropy * mask,
            weight * objective * initial,
            weight * objective * refined,
        ]
        stacked = torch.stack([s.double().sum() for s in sums])
        largest = log_ratio.abs().max() if len(log_ratio) else logprob.new_zeros(())
    return loss, stacked, largest
