"""One tensor-parallel rank: the kernels on shards against float64 on the whole (gloo)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_cgrpo.kernels import backend
from megatron_cgrpo.kernels.linear_logprob import linear_logprob, linear_logprob_loss
from megatron_cgrpo.kernels.token_logprob import token_logprob

VOCAB, HIDDEN, TOKENS, TEMPERATURE = 302, 24, 21, 0.7


def relative(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(0)
    width = -(-VOCAB // world)
    weight = torch.zeros(width * world, HIDDEN)
    weight[:VOCAB] = torch.randn(VOCAB, HIDDEN)
    hidden, a = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS)
    targets = torch.randint(0, VOCAB, (TOKENS,))
    wide = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    lsm = torch.log_softmax((wide[0] @ wide[1].t())[:, :VOCAB] / TEMPERATURE, -1)
    want = lsm.gather(1, targets[:, None])[:, 0]
    entropy = -(lsm.exp() * lsm).sum(-1)
    ((want * a).sum() + 0.2 * entropy.sum()).backward()
    mine = slice(rank * width, (rank + 1) * width)
    settings = {"temperature": TEMPERATURE, "vocab_size": VOCAB, "group": group}
    worst = [0.0]
    for form in ("logits", "recompute", "inside"):
        h, w = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
        if form == "inside":
            loss = linear_logprob_loss(
                h,
                w,
                targets,
                lambda logp, ent, rows: (logp * a[rows]).sum() + 0.2 * ent.sum(),
                **settings,
            )
            worst.append(abs(loss.item() - ((want * a).sum() + 0.2 * entropy.sum()).item()) / 100)
        else:
            if form == "logits":
                logp, ent = token_logprob(h @ w.t(), targets, in_place=True, **settings)
            else:
                logp, ent = linear_logprob(h, w, targets, **settings)
            worst += [relative(logp, want.detach()), relative(ent, entropy.detach())]
            loss = (logp * a).sum() + 0.2 * ent.sum()
        loss.backward()
        dist.all_reduce(h.grad)
        worst += [relative(h.grad, wide[0].grad), relative(w.grad, wide[1].grad[mine])]
    # torch's maximum keeps a NaN, Python's does not.
    error = torch.tensor(worst).max()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if rank == 0:
        report = {"error": error.item(), "triton": backend.INTERPRETED}
        Path(out).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2])
