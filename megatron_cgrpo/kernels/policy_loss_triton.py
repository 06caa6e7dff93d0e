"""Triton kernel of `policy_loss`: loss, every sum for the metrics and the gradient in one pass.

One warp per block of 128 tokens, no barriers; each block writes its own row of partial sums, which
are added in float64: the result is the same bits every time.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from megatron_cgrpo.config.algorithm import Algorithm

BLOCK, WARPS = 128, 1
# loss, the sums in the order of SUMS, the largest |log ratio|
PARTIALS = 14


_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _clamp(x, low, high):
    # NaN stays NaN: a broken log-prob must reach the loss.
    return tl.minimum(tl.maximum(x, low, propagate_nan=_NAN), high, propagate_nan=_NAN)


@triton.jit
def _select(x, mask):
    return tl.sum(tl.where(mask, x, 0.0), 0)


@triton.jit
def _count(mask):
    return tl.sum(mask.to(tl.float32), 0)


@triton.jit
def loss_kernel(
    logprob_ptr,
    old_ptr,
    engine_ptr,
    reference_ptr,
    entropy_ptr,
    advantage_ptr,
    weight_ptr,
    refinement_ptr,
    mask_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    partial_ptr,
    tokens,
    low,
    high,
    dual_clip,
    log_gamma,
    kl_coef,
    entropy_coef,
    cap,
    limit,
    DUAL: tl.constexpr,
    CLIP_REFINEMENTS: tl.constexpr,
    KL: tl.constexpr,
    ENTROPY: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    block = tl.program_id(0)
    o = block * BLOCK + tl.arange(0, BLOCK)
    inside = o < tokens
    counted = tl.load(mask_ptr + o, mask=inside, other=0) != 0
    refined = tl.load(refinement_ptr + o, mask=counted, other=0) != 0
    initial = counted & (refined == 0)
    refined = counted & refined
    logp = tl.load(logprob_ptr + o, mask=counted, other=0.0)
    old = tl.load(old_ptr + o, mask=initial, other=0.0)
    a = tl.load(advantage_ptr + o, mask=counted, other=0.0)
    w = tl.load(weight_ptr + o, mask=counted, other=0.0)

    # initial tokens: r = exp(l − l_old), d(r Â)/dl = r Â where no clip binds
    log_ratio = tl.where(initial, logp - old, 0.0)
    bounded = _clamp(log_ratio, -limit, limit)
    r = tl.exp(bounded)
    free = r * a
    clipped = _clamp(r, low, high) * a
    value = tl.minimum(free, clipped, propagate_nan=_NAN)
    slope = tl.where((clipped < free) | (tl.abs(log_ratio) > limit), 0.0, free)
    if DUAL:
        dual = (a < 0) & (value < dual_clip * a)
        value = tl.where(dual, dual_clip * a, value)
        slope = tl.where(dual, 0.0, slope)
    if CAP:
        engine = tl.load(engine_ptr + o, mask=initial, other=0.0)
        gap = _clamp(old - engine, -limit, limit)
        trust = tl.minimum(tl.exp(gap), cap, propagate_nan=_NAN)
        value = value * trust
        slope = slope * trust

    # refinement tokens: ρ = sigmoid(l − ln γ), dρ/dl = ρ (1 − ρ), both without overflow
    z = logp - log_gamma
    ez = tl.exp(-tl.abs(z))
    rho = tl.where(z >= 0, 1.0, ez) / (1.0 + ez)
    rest = tl.where(z >= 0, ez, 1.0) / (1.0 + ez)
    shaped = rho * a
    shaped_slope = shaped * rest
    rho_clipped = refined & (refined == 0)
    if CLIP_REFINEMENTS:
        bound = _clamp(rho, low, high) * a
        shaped_slope = tl.where(bound < shaped, 0.0, shaped_slope)
        shaped = tl.minimum(shaped, bound, propagate_nan=_NAN)
        rho_clipped = refined & (rho < low) & (a < 0)
    value = tl.where(refined, shaped, value)
    slope = tl.where(refined, shaped_slope, slope)

    gain = value
    reference_kl = tl.zeros([BLOCK], tl.float32)
    if KL:
        d_raw = tl.load(reference_ptr + o, mask=counted, other=0.0) - logp
        d = _clamp(d_raw, -limit, limit)
        ed = tl.exp(d)
        reference_kl = ed - d - 1.0
        gain = gain - kl_coef * reference_kl
        slope = slope - tl.where(tl.abs(d_raw) > limit, 0.0, kl_coef * (1.0 - ed))
    entropy = tl.load(entropy_ptr + o, mask=counted, other=0.0)
    if ENTROPY:
        gain = gain + entropy_coef * entropy
        tl.store(grad_entropy_ptr + o, tl.where(counted, -w * entropy_coef, 0.0), mask=inside)
    tl.store(grad_logprob_ptr + o, tl.where(counted, -w * slope, 0.0), mask=inside)

    p = partial_ptr + block * PARTIALS
    tl.store(p + 0, -_select(w * gain, counted))
    tl.store(p + 1, _count(initial))
    tl.store(p + 2, _count(refined))
    tl.store(p + 3, _select(r, initial))
    tl.store(p + 4, _count(initial & (r < low) & (a < 0)))
    tl.store(p + 5, _count(initial & (r > high) & (a > 0)))
    tl.store(p + 6, _select(rho, refined))
    tl.store(p + 7, _count(rho_clipped))
    tl.store(p + 8, _select(r - 1.0 - bounded, initial))
    tl.store(p + 9, _select(reference_kl, counted))
    tl.store(p + 10, _select(entropy, counted))
    tl.store(p + 11, _select(w * value, initial))
    tl.store(p + 12, _select(w * value, refined))
    # The maximum skips NaN; the sum does not.
    tl.store(p + 13, tl.max(tl.abs(log_ratio), 0) + 0.0 * tl.sum(log_ratio, 0))


class FusedPolicyLoss(torch.autograd.Function):
    """(loss, sums, max_log_ratio) as `policy_loss_reference`; float32."""

    @staticmethod
    def forward(ctx, logprob, entropy, columns, options: Algorithm, limit: float):
        tokens = logprob.numel()
        blocks = max(1, math.ceil(tokens / BLOCK))
        c, o = columns, options
        grad = torch.empty_like(logprob)
        with_entropy = o.entropy_coef > 0
        grad_entropy = torch.empty_like(logprob) if with_entropy else None
        partials = torch.empty(blocks, PARTIALS, dtype=torch.float32, device=logprob.device)
        loss_kernel[(blocks,)](
            logprob,
            c.old_logprob,
            c.engine_logprob,
            logprob if c.reference_logprob is None else c.reference_logprob,
            entropy,
            c.advantage,
            c.weight,
            c.is_refinement.view(torch.uint8),
            c.loss_mask.view(torch.uint8),
            grad,
            grad_entropy if with_entropy else grad,
            partials,
            tokens,
            1 - o.clip_low,
            1 + o.clip_high,
            o.dual_clip or 0.0,
            math.log(o.gamma),
            o.kl_coef,
            o.entropy_coef,
            o.importance_cap or 0.0,
            limit,
            DUAL=o.dual_clip is not None,
            CLIP_REFINEMENTS=o.clip_refinements,
            KL=o.kl_coef > 0,
            ENTROPY=with_entropy,
            CAP=o.importance_cap is not None,
            BLOCK=BLOCK,
            PARTIALS=PARTIALS,
            num_warps=WARPS,
        )
        totals = partials.double().sum(0)
        sums, largest = totals[1:13], partials[:, 13].max()
        ctx.save_for_backward(grad, grad if grad_entropy is None else grad_entropy)
        ctx.with_entropy = with_entropy
        ctx.mark_non_differentiable(sums, largest)
        return totals[0].float(), sums, largest

    @staticmethod
    def backward(ctx, upstream, *_):
        grad, grad_entropy = ctx.saved_tensors
        entropy = grad_entropy * upstream if ctx.with_entropy else None
        return grad * upstream, entropy, None, None, None
