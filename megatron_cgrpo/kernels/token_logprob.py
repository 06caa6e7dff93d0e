"""Log-probability and entropy of target tokens from vocabulary-parallel logits.

With z the logits of one position over the unpadded vocabulary, T the temperature, x = z/T:

    logp(v) = x_v − ln Σ_u exp(x_u)                H = −Σ_u p_u ln p_u
    ∂logp(v)/∂z_u = ([u = v] − p_u)/T              ∂H/∂z_u = −p_u (ln p_u + H)/T

The vocabulary is cut over the tensor-parallel group. One pass over a rank's shard gives four
numbers per token, m = max x, S = Σ exp(x − m), U = Σ exp(x − m)(x − m), and x_v or 0; one
all-gather of these 16 bytes per token and rank is merged in closed form. With M = max m and
w = exp(m − M):

    lse = M + ln Σ w S        H = ln Σ w S − Σ w (U + (m − M) S) / Σ w S

The backward pass recomputes p from lse, so nothing but lse and H is kept beside the logits; it may
write the gradient over them.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_cgrpo.kernels import backend

# Rows of the plain-torch path are worked through in blocks of about this many elements, which stay
# in a core's cache from one elementwise pass to the next.
BLOCK_ELEMENTS = 1 << 18


def token_logprob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    in_place: bool = False,
    masked: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(target) and entropy for each row; differentiable in both.

    Args:
        logits: [tokens, V/TP] of this rank's vocabulary shard, any float dtype, rows contiguous.
        targets: [tokens] int64, global token ids.
        temperature: rollout temperature T > 0.
        vocab_size: unpadded vocabulary; padded columns at its end take no part.
        group: tensor-parallel group (None: the logits are whole).
        in_place: the backward pass may overwrite the logits with their gradient; only when
            nothing else needs them.
        masked: logits may hold −inf, which costs the GPU kernel one more instruction per element;
            without it a −inf gives NaN there.

    Returns:
        (logprob, entropy), both [tokens] float32 (in plain torch float64 for float64 logits),
        natural units, equal on all ranks of `group`. The gradient reaches each rank's own shard;
        ranks must use the same upstream gradient.

    Raises:
        ValueError: on the Triton path, for logits whose columns are not next to each other.
    """
    first, valid = shard_bounds(logits.size(-1), vocab_size, group)
    return _TokenLogprob.apply(logits, targets, first, valid, temperature, group, in_place, masked)


def shard_bounds(
    width: int, vocab_size: int | None, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """(first global id, number of real columns) of this rank's shard of `width` columns."""
    first = 0 if group is None else dist.get_rank(group) * width
    limit = first + width if vocab_size is None else vocab_size
    return first, min(max(limit - first, 0), width)


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, valid, temperature, group, in_place, masked):
        stats = local_stats(logits, targets, first, valid, temperature, masked)
        logprob, entropy, lse = merge_stats(gather_stats(stats, group))
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.meta = (first, valid, temperature, in_place)
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        logits, targets, lse, entropy = ctx.saved_tensors
        first, valid, temperature, in_place = ctx.meta
        out = logits if in_place else torch.empty_like(logits)
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(lse)
        write_gradient(
            logits,
            out,
            targets,
            lse,
            entropy,
            grad_logprob,
            grad_entropy,
            first,
            valid,
            temperature,
        )
        return out, None, None, None, None, None, None, None


def local_stats(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    valid: int,
    temperature: float,
    masked: bool = False,
) -> torch.Tensor:
    """[4, tokens] float32 (m, S, U, x_target) of this shard; see the module's text."""
    if backend.use_triton(logits):
        from megatron_cgrpo.kernels.token_logprob_triton import local_stats_triton

        return local_stats_triton(logits, targets, first, valid, temperature, masked)
    tokens = logits.size(0)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = torch.empty(4, tokens, dtype=dtype, device=logits.device)
    if not valid:
        out[0], out[1:] = -torch.inf, 0.0
        return out
    lowest = torch.finfo(dtype).min
    for rows in _blocks(tokens, logits.size(1)):
        x = _scaled(logits[rows, :valid], dtype, temperature)
        # Of the shard alone: with lse for m, S is 1 and U is Σ p ln p.
        lsm = torch.log_softmax(x, -1)
        top = x.amax(-1)
        lse = top - lsm.amax(-1)
        local = targets[rows] - first
        owned = (local >= 0) & (local < valid)
        picked = x.gather(1, local.clamp(0, valid - 1)[:, None])[:, 0]
        dead = top == -torch.inf  # a row of −inf adds nothing
        # p = 0 times ln p = −inf counts as 0.
        moment = torch.linalg.vecdot(_exp(lsm), lsm)
        out[0, rows] = torch.where(dead, lowest, lse)
        out[1, rows] = (~dead).to(dtype)
        out[2, rows] = torch.where(dead, 0.0, moment)
        out[3, rows] = torch.where(owned, picked, 0.0)
    return out


def gather_stats(stats: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[TP, 4, tokens]: the statistics of all ranks."""
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1:
        return stats[None]
    everyone = [torch.empty_like(stats) for _ in range(size)]
    dist.all_gather(everyone, stats, group=group)
    return torch.stack(everyone)


def merge_stats(stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, lse), each [tokens], from [ranks, 4, tokens]."""
    m, s, u, target = stats.unbind(1)
    top = m.max(0).values
    shift = (m - top).clamp(min=torch.finfo(m.dtype).min)
    w = shift.exp()
    total = (w * s).sum(0)
    log_total = total.log()
    moment = (w * (u + torch.where(w > 0, shift * s, 0.0))).sum(0)
    lse = top + log_total
    return target.sum(0) - lse, log_total - moment / total, lse


def write_gradient(
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
    """d loss / d logits of this shard into `out` (which may be `logits`); padded columns get 0."""
    if backend.use_triton(logits):
        from megatron_cgrpo.kernels.token_logprob_triton import write_gradient_triton

        write_gradient_triton(
            logits,
            out,
            targets,
            lse,
            entropy,
            grad_logprob,
            grad_entropy,
            first,
            valid,
            temperature,
        )
        return
    for rows in _blocks(logits.size(0), logits.size(1)):
        logp = _scaled(logits[rows, :valid], lse.dtype, temperature) - lse[rows, None]
        scale = grad_logprob[rows, None] / -temperature
        p = _exp(logp)
        if grad_entropy is None:
            grad = p.mul_(scale)
        else:
            slope = logp.add_(entropy[rows, None])
            slope.mul_(grad_entropy[rows, None] / -temperature).add_(scale)
            grad = p.mul_(slope)
        if valid:
            local = targets[rows] - first
            owned = (local >= 0) & (local < valid)
            hit = (grad_logprob[rows] * owned / temperature)[:, None].to(grad.dtype)
            grad.scatter_add_(1, local.clamp(0, valid - 1)[:, None], hit)
        out[rows, :valid] = grad
    out[:, valid:] = 0


def _exp(logp: torch.Tensor) -> torch.Tensor:
    """exp(ln p) with `logp` bounded from below in place; what would be about denormal is 0.

    torch's exp is twenty times slower on a CPU where it underflows, and far from the top of a
    vocabulary most probabilities do.
    """
    lowest = math.log(torch.finfo(logp.dtype).tiny) + 8
    return F.threshold_(logp.clamp_(min=lowest).exp(), 2 * math.exp(lowest), 0.0)


def _scaled(logits: torch.Tensor, dtype: torch.dtype, temperature: float) -> torch.Tensor:
    """logits / T; the logits themselves where there is nothing to do."""
    x = logits.to(dtype)
    return x if temperature == 1.0 else x / temperature


def _blocks(tokens: int, width: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(width, 1))
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]
