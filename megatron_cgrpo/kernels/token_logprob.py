"""Log-probability and entropy of target tokens from vocabulary-parallel logits (plain torch).

With z the logits of one position over the unpadded vocabulary and T the temperature:

    logp(v) = z_v/T − ln Σ_u exp(z_u/T)            H = −Σ_u p_u ln p_u
    ∂logp(v)/∂z_u = ([u = v] − p_u)/T              ∂H/∂z_u = −p_u (ln p_u + H)/T

The vocabulary is sharded over the tensor-parallel group: the merge needs the local maximum,
Σ exp, Σ exp·z and the target's logit, i.e. four floats per token and rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, valid, temperature, group):
        z = logits[:, :valid].float() / temperature
        top = z.max(dim=-1).values if valid else z.new_full((len(z),), -torch.inf)
        top = _reduce(top.clone(), dist.ReduceOp.MAX, group)
        shifted = z - top[:, None]
        e = shifted.exp()
        local = targets - first
        owned = (local >= 0) & (local < valid)
        picked = shifted.new_zeros(len(z))
        if valid:
            rows = shifted.gather(1, local.clamp(0, valid - 1)[:, None])[:, 0]
            picked = torch.where(owned, rows, picked)
        # A logit of −inf has probability 0 and adds 0·(−inf) := 0 to the entropy.
        weighted = torch.where(e > 0, e * shifted, 0.0).sum(-1)
        sums = _reduce(torch.stack([e.sum(-1), weighted, picked]), dist.ReduceOp.SUM, group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, targets, top + log_sum, entropy)
        ctx.meta = (first, valid, temperature)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        logits, targets, lse, entropy = ctx.saved_tensors
        first, valid, temperature = ctx.meta
        grad = torch.zeros_like(logits)
        if valid:
            logp = logits[:, :valid].float() / temperature - lse[:, None]
            p = logp.exp()
            g = -grad_logprob[:, None] * p
            if bool(grad_entropy.any()):
                g -= grad_entropy[:, None] * torch.where(p > 0, p * (logp + entropy[:, None]), 0.0)
            local = targets - first
            owned = (local >= 0) & (local < valid)
            g.scatter_add_(
                1, local.clamp(0, valid - 1)[:, None], (grad_logprob * owned)[:, None].float()
            )
            grad[:, :valid] = (g / temperature).to(grad.dtype)
        return grad, None, None, None, None, None


def token_logprob_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(target) and entropy for each row; differentiable in both.

    Args:
        logits: [tokens, V/TP] of this rank's vocabulary shard, any float dtype; not modified.
        targets: [tokens] int64, global token ids.
        temperature: rollout temperature T > 0.
        vocab_size: unpadded vocabulary; padded columns at its end take no part.
        group: tensor-parallel group (None: the logits are whole).

    Returns:
        (logprob, entropy), both [tokens] float32, natural units, equal on all ranks of `group`.
        The gradient reaches each rank's own shard; ranks must use the same upstream gradient.
    """
    rank = 0 if group is None else dist.get_rank(group)
    width = logits.size(-1)
    first = rank * width
    limit = vocab_size if vocab_size is not None else first + width
    valid = min(max(limit - first, 0), width)
    return _TokenLogprob.apply(logits, targets, first, valid, temperature, group)


def _reduce(x: torch.Tensor, op, group) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op=op, group=group)
    return x
