"""Output layer, log-prob and loss in one, without ever holding the logits.

Hidden states are worked through in chunks of tokens: a library matmul gives the chunk's logits, the
token log-prob kernels read them once and write their gradient over them, two more matmuls turn it
into d hidden and d weight. Memory is one chunk of logits beside the gradients.

* `linear_logprob_loss` runs the loss inside each chunk, so its backward has nothing left to
  compute: 6·T·H·V FLOPs. The loss must be a sum over tokens.
* `linear_logprob` is for any other loss: its backward multiplies once more, 8·T·H·V FLOPs.

Full fusion into one Triton matmul kernel is slower than this on Hopper, but for forward-only
scoring, where it would save a few per cent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_cgrpo.kernels.token_logprob import (
    gather_stats,
    local_stats,
    merge_stats,
    shard_bounds,
    write_gradient,
)

# Chunks of logits: enough tokens to keep a GPU's matmul busy; small in the cache's terms on a CPU.
CHUNK_TOKENS_CUDA = 2048
CHUNK_BYTES_CPU = 192 << 20

ChunkLoss = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(target) and entropy of each row of softmax(hidden · weightᵀ / T).

    Args:
        hidden: [tokens, H], the same on all ranks of `group`.
        weight: [V/TP, H], this rank's rows of the output layer (or the tied embedding).
        targets: [tokens] int64 global ids. Others as in `token_logprob`.

    Returns:
        (logprob, entropy), [tokens] float32, differentiable. The gradient of `hidden` is this
        rank's part: the caller sums it over `group` (Megatron's copy or gather region does).
    """
    first, valid = shard_bounds(weight.size(0), vocab_size, group)
    return _LinearLogprob.apply(hidden, weight, targets, first, valid, temperature, group)


def linear_logprob_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_loss: ChunkLoss,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A loss that is a sum over tokens, with gradients for `hidden` and `weight`.

    Args:
        chunk_loss: called as (logprob, entropy, rows) for each chunk in order; returns the chunk's
            share of the loss as a scalar, differentiable in both. Others as in `linear_logprob`.
    """
    first, valid = shard_bounds(weight.size(0), vocab_size, group)
    return _LinearLogprobLoss.apply(
        hidden, weight, targets, chunk_loss, first, valid, temperature, group
    )


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, first, valid, temperature, group):
        stats = [
            local_stats(_logits(hidden[rows], weight), targets[rows], first, valid, temperature)
            for rows in _chunks(hidden, weight)
        ]
        stats = torch.cat(stats, 1) if stats else hidden.new_empty(4, 0, dtype=torch.float32)
        logprob, entropy, lse = merge_stats(gather_stats(stats, group))
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.meta = (first, valid, temperature)
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        first, valid, temperature = ctx.meta
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(lse)
        sink = _Gradients(hidden, weight, ctx.needs_input_grad[1])
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight)
            write_gradient(
                logits,
                logits,
                targets[rows],
                lse[rows],
                entropy[rows],
                grad_logprob[rows],
                None if grad_entropy is None else grad_entropy[rows],
                first,
                valid,
                temperature,
            )
            sink.add(rows, logits)
        return sink.hidden, sink.weight_gradient(), None, None, None, None, None


class _LinearLogprobLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_loss, first, valid, temperature, group):
        sink = _Gradients(hidden, weight, ctx.needs_input_grad[1])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight)
            stats = local_stats(logits, targets[rows], first, valid, temperature)
            logprob, entropy, lse = merge_stats(gather_stats(stats, group))
            with torch.enable_grad():
                leaves = (logprob.requires_grad_(), entropy.requires_grad_())
                value = chunk_loss(*leaves, rows)
                grads = torch.autograd.grad(value, leaves, allow_unused=True)
            grad_logprob = torch.zeros_like(lse) if grads[0] is None else grads[0]
            write_gradient(
                logits,
                logits,
                targets[rows],
                lse,
                entropy.detach(),
                grad_logprob,
                grads[1],
                first,
                valid,
                temperature,
            )
            sink.add(rows, logits)
            total += value.detach()
        ctx.sink = sink
        return total

    @staticmethod
    def backward(ctx, upstream):
        sink, ctx.sink = ctx.sink, None
        if sink is None:
            raise RuntimeError("linear_logprob_loss can be differentiated once")
        weight = sink.weight_gradient(upstream)
        return sink.hidden.mul_(upstream), weight, None, None, None, None, None, None


class _Gradients:
    """d hidden, and d weight accumulated in float32 over the chunks."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, needs_weight: bool) -> None:
        self._source, self._weight = hidden, weight
        self.hidden = torch.empty_like(hidden)
        self._sum = None
        if needs_weight:
            self._sum = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def add(self, rows: slice, grad_logits: torch.Tensor) -> None:
        torch.mm(grad_logits, self._weight, out=self.hidden[rows])
        if self._sum is None:
            return
        if grad_logits.dtype == torch.float32:
            self._sum.addmm_(grad_logits.t(), self._source[rows])
        elif grad_logits.is_cuda:
            # One matmul with a float32 result: nothing is rounded to bfloat16 in between.
            self._sum = torch.addmm(
                self._sum, grad_logits.t(), self._source[rows], out_dtype=torch.float32
            )
        else:
            self._sum.addmm_(grad_logits.t().float(), self._source[rows].float())

    def weight_gradient(self, scale: torch.Tensor | None = None) -> torch.Tensor | None:
        if self._sum is None:
            return None
        total = self._sum if scale is None else self._sum.mul_(scale)
        return total.to(self._weight.dtype)


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden @ weight.t()


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    tokens = hidden.size(0)
    step = CHUNK_TOKENS_CUDA
    if not hidden.is_cuda:
        step = max(16, CHUNK_BYTES_CPU // max(1, weight.size(0) * weight.element_size()))
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]
