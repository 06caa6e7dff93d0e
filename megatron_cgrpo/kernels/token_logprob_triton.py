"""Triton kernels of `token_logprob`: one streaming read forward, one read and one write backward.

Forward: one program per row. Maximum and sums run per lane, so the loop has no reduction across
threads and no barrier; exponentials are base 2 with the scale folded in. A row is reduced once at
its end. Backward: a grid of (row, block of columns), no communication at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_cgrpo.kernels.backend import INTERPRETED

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# Finite stand-in for −inf: differences of two of them are 0, not NaN.
_LOWEST = tl.constexpr(-1.0e30)
# A NaN logit must come out as a NaN, not as the bound.
_NAN = tl.constexpr(tl.PropagateNan.ALL)

# Launch configurations. Triton measures them once per vocabulary size on a GPU; all of them are
# checked offline, the middle one runs under the interpreter.
FORWARD_CONFIGS = (
    {"LANES": 128, "VEC": 8, "num_warps": 4},
    {"LANES": 256, "VEC": 8, "num_warps": 8},
    {"LANES": 512, "VEC": 8, "num_warps": 16},
)
BACKWARD_CONFIGS = ({"BLOCK": 2048, "num_warps": 4}, {"BLOCK": 4096, "num_warps": 8})


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    # Flush-to-zero saves three instructions per element; the interpreter has no inline assembly.
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def stats_kernel(
    x_ptr,
    target_ptr,
    stats_ptr,
    stride,
    tokens,
    valid,
    first,
    scale,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    FAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = scale * _LOG2E
    base = x_ptr + row * stride
    offsets = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    m = tl.full([LANES], _LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    u = tl.zeros([LANES], tl.float32)
    for v0 in tl.range(0, valid, LANES * VEC):
        o = v0 + offsets
        x = tl.load(base + o, mask=o < valid, other=_LOWEST, eviction_policy="evict_first")
        x = x.to(tl.float32)
        if MASKED:
            x = tl.maximum(x, _LOWEST, propagate_nan=_NAN)
        m_new = tl.maximum(m, tl.max(x, 1))
        dm = (m - m_new) * c
        r = _exp2(dm, FAST)
        d = x * c - (m_new * c)[:, None]
        e = _exp2(d, FAST)
        u = r * (u + dm * s) + tl.sum(e * d, 1)
        s = r * s + tl.sum(e, 1)
        m = m_new
    top = tl.max(m, 0)
    dm = (m - top) * c
    w = _exp2(dm, FAST)
    local = tl.load(target_ptr + row) - first
    hit = (local >= 0) & (local < valid)
    target = tl.load(base + local, mask=hit, other=0.0).to(tl.float32) * scale
    tl.store(stats_ptr + row, top * scale)
    tl.store(stats_ptr + tokens + row, tl.sum(w * s, 0))
    tl.store(stats_ptr + 2 * tokens + row, tl.sum(w * (u + dm * s), 0) * _LN2)
    tl.store(stats_ptr + 3 * tokens + row, target)


@triton.jit
def gradient_kernel(
    x_ptr,
    out_ptr,
    target_ptr,
    lse_ptr,
    entropy_ptr,
    grad_logprob_ptr,
    grad_entropy_ptr,
    stride_x,
    stride_out,
    width,
    valid,
    first,
    scale,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = o < valid
    g_logprob = tl.load(grad_logprob_ptr + row)
    lse = tl.load(lse_ptr + row)
    x = tl.load(x_ptr + row * stride_x + o, mask=real, other=_LOWEST)
    logp = tl.maximum(x.to(tl.float32), _LOWEST, propagate_nan=_NAN) * scale - lse
    p = _exp2(logp * _LOG2E, FAST)
    g = -p * g_logprob
    if ENTROPY:
        h = tl.load(entropy_ptr + row)
        g_entropy = tl.load(grad_entropy_ptr + row)
        g -= tl.where(p > 0, p * (logp + h), 0.0) * g_entropy
    local = tl.load(target_ptr + row) - first
    g = tl.where(real & (o == local), g + g_logprob, g) * scale
    g = tl.where(real, g, 0.0)
    tl.store(out_ptr + row * stride_out + o, g.to(out_ptr.dtype.element_ty), mask=o < width)


def _autotune(kernel, configs, **options):
    choices = [
        triton.Config({k: v for k, v in c.items() if k != "num_warps"}, num_warps=c["num_warps"])
        for c in configs
    ]
    return triton.autotune(choices, key=["valid"], **options)(kernel)


_tuned_stats = _autotune(stats_kernel, FORWARD_CONFIGS)
# The gradient may overwrite the logits: trials must not see each other's output.
_tuned_gradient = _autotune(gradient_kernel, BACKWARD_CONFIGS, restore_value=["out_ptr"])


def local_stats_triton(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    valid: int,
    temperature: float,
    masked: bool,
) -> torch.Tensor:
    """See `token_logprob.local_stats`."""
    _check_layout(logits, targets)
    tokens = logits.size(0)
    out = torch.empty(4, tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        # The interpreter cannot choose between configurations.
        launch, config = _tuned_stats[(tokens,)], {}
        if INTERPRETED:
            launch, config = stats_kernel[(tokens,)], FORWARD_CONFIGS[1]
        launch(
            logits,
            targets,
            out,
            logits.stride(0),
            tokens,
            valid,
            first,
            1.0 / temperature,
            FAST=not INTERPRETED,
            MASKED=masked,
            **config,
        )
    return out


def write_gradient_triton(
    logits: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    first: int,
    valid: int,
    temperature: float,
) -> None:
    """See `token_logprob.write_gradient`."""
    _check_layout(logits, targets)
    _check_layout(out, targets)
    tokens, width = logits.shape
    if not tokens:
        return
    launch, config = _tuned_gradient, {}
    if INTERPRETED:
        launch, config = gradient_kernel, BACKWARD_CONFIGS[1]
    launch[lambda meta: (tokens, triton.cdiv(width, meta["BLOCK"]))](
        logits,
        out,
        targets,
        lse,
        entropy,
        grad_logprob.contiguous(),
        lse if grad_entropy is None else grad_entropy.contiguous(),
        logits.stride(0),
        out.stride(0),
        width,
        valid,
        first,
        1.0 / temperature,
        ENTROPY=grad_entropy is not None,
        FAST=not INTERPRETED,
        **config,
    )


def _check_layout(rows: torch.Tensor, targets: torch.Tensor) -> None:
    """The kernels know one stride.

    Raises:
        ValueError: for columns that are not next to each other.
    """
    if rows.stride(-1) != 1 or not targets.is_contiguous():
        raise ValueError("logits need contiguous columns, targets must be contiguous")
