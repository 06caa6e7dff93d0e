"""Run under TRITON_INTERPRET=1 by test_kernels.py: the Triton kernels against float64."""

from __future__ import annotations

import pytest
import torch

from megatron_cgrpo.config.algorithm import Algorithm
from megatron_cgrpo.kernels import backend
from megatron_cgrpo.kernels.linear_logprob import linear_logprob, linear_logprob_loss
from megatron_cgrpo.kernels.policy_loss import LossColumns, policy_loss, policy_loss_reference
from megatron_cgrpo.kernels.token_logprob import local_stats, merge_stats, token_logprob
from tests.kernels.interpreter_fix import install

assert backend.INTERPRETED, "run through tests/kernels/test_kernels.py"
install()


def exact(logits, targets, temperature, valid):
    """float64 (logprob, entropy) with autograd."""
    lsm = torch.log_softmax(logits[:, :valid].double() / temperature, -1)
    p = lsm.exp()
    entropy = -torch.where(p > 0, p * lsm, 0.0).sum(-1)
    return lsm.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "padding"), [(70, 0), (1003, 5), (2048, 0), (4099, 29)])
@pytest.mark.parametrize(("temperature", "spread"), [(1.0, 1.0), (0.6, 12.0), (1.0, 300.0)])
def test_values_and_gradients(dtype, vocab, padding, temperature, spread):
    torch.manual_seed(vocab)
    logits = (torch.randn(5, vocab + padding) * spread).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (5,))
    a, b = torch.randn(5), torch.randn(5)
    kept = logits.detach().clone()
    logp, entropy = token_logprob(logits, targets, temperature=temperature, vocab_size=vocab)
    (logp * a + entropy * b).sum().backward()
    assert torch.equal(logits.detach(), kept)
    wide = kept.double().requires_grad_()
    want, want_entropy = exact(wide, targets, temperature, vocab)
    (want * a + want_entropy * b).sum().backward()
    scale = max(1.0, spread / 10)
    torch.testing.assert_close(logp.double(), want, rtol=1e-5, atol=3e-5 * scale)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=3e-5 * scale)
    tolerance = {"rtol": 1e-4, "atol": 2e-5 * scale}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 8e-3, "atol": 2e-5 * scale}
    torch.testing.assert_close(logits.grad.double(), wide.grad, **tolerance)
    assert not logits.grad[:, vocab:].any()


def test_in_place_gradient_without_entropy():
    torch.manual_seed(0)
    leaf = torch.randn(4, 300, requires_grad=True)
    targets = torch.randint(0, 300, (4,))
    logits = leaf * 1.0
    logp, _ = token_logprob(logits, targets, in_place=True)
    address = logits.data_ptr()
    logp.sum().backward()
    want, _ = exact(leaf.detach().double().requires_grad_(), targets, 1.0, 300)
    p = torch.softmax(leaf.detach(), -1)
    onehot = torch.nn.functional.one_hot(targets, 300)
    torch.testing.assert_close(leaf.grad, onehot - p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.detach(), leaf.grad)
    assert logits.data_ptr() == address
    torch.testing.assert_close(logp.double(), want.detach(), rtol=1e-5, atol=1e-5)


def test_masked_vocabulary_and_extremes():
    logits = torch.randn(4, 600)
    logits[:, 500:] = -torch.inf
    logits[1, :40] = -torch.inf
    logits[2] *= 1e4
    targets = torch.tensor([3, 45, 7, 499])
    leaf = logits.clone().requires_grad_()
    logp, entropy = token_logprob(leaf, targets, masked=True)
    (logp + entropy).sum().backward()
    want, want_entropy = exact(logits.double(), targets, 1.0, 600)
    torch.testing.assert_close(logp.double(), want, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-4)
    assert torch.isfinite(leaf.grad).all() and not leaf.grad[:, 500:].any()
    none = token_logprob(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64))
    assert none[0].shape == (0,)


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_shards_merge_exactly(shards):
    """Also a last shard that is all padding, and a target that sits in another shard."""
    torch.manual_seed(1)
    vocab, width = 400, 200 if shards == 3 else 400 // shards
    whole = torch.randn(6, width * shards) * 3
    targets = torch.randint(0, vocab, (6,))
    stats = []
    for r in range(shards):
        valid = min(max(vocab - r * width, 0), width)
        part = whole[:, r * width : (r + 1) * width].contiguous()
        stats.append(local_stats(part, targets, r * width, valid, 0.8))
    logp, entropy, _ = merge_stats(torch.stack(stats))
    want, want_entropy = exact(whole, targets, 0.8, vocab)
    torch.testing.assert_close(logp.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


OPTIONS = [
    {},
    {"clip_refinements": False, "gamma": 0.01},
    {"dual_clip": 3.0, "importance_cap": 2.0},
    {"kl_coef": 0.05, "entropy_coef": 0.01, "clip_high": 0.28},
    {"dual_clip": 1.5, "importance_cap": 1.2, "kl_coef": 0.1, "entropy_coef": 0.02},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tokens", [1, 128, 1000])
def test_policy_loss(options, tokens):
    o = Algorithm(responses=4, refinements=2, **options)
    g = torch.Generator().manual_seed(tokens)

    def rand(scale=1.0):
        return torch.randn(tokens, generator=g) * scale

    logp, entropy = -rand().abs() * 2, rand().abs()
    columns = LossColumns(
        logp + rand(0.4),
        logp + rand(0.4),
        rand(),
        rand().abs() / tokens,
        torch.rand(tokens, generator=g) < 0.4,
        torch.rand(tokens, generator=g) < 0.8,
        logp + rand(0.3),
    )
    leaves = [logp.clone().requires_grad_(), entropy.clone().requires_grad_()]
    loss, sums, largest = policy_loss(*leaves, columns, o)
    (3 * loss).backward()
    wide = [x.double().requires_grad_() for x in (logp, entropy)]
    same = LossColumns(
        *(
            x.double() if x.is_floating_point() else x
            for x in (
                columns.old_logprob,
                columns.engine_logprob,
                columns.advantage,
                columns.weight,
                columns.is_refinement,
                columns.loss_mask,
                columns.reference_logprob,
            )
        )
    )
    want, want_sums, want_largest = policy_loss_reference(*wide, same, o)
    (3 * want).backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, want_sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(largest.double(), want_largest, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaves[0].grad.double(), wide[0].grad, rtol=1e-4, atol=1e-7)
    if o.entropy_coef:
        torch.testing.assert_close(leaves[1].grad.double(), wide[1].grad, rtol=1e-5, atol=1e-9)


def test_policy_loss_ignores_what_is_masked_and_survives_extremes():
    o = Algorithm(responses=4, refinements=2, kl_coef=0.1, importance_cap=2.0)
    nan = torch.nan
    columns = LossColumns(
        torch.tensor([0.0, -1e4, -1e4, -50.0, nan]),
        torch.tensor([0.0, -1e4, 0.0, -50.0, nan]),
        torch.tensor([1.0, -1.0, -1.0, 1.0, nan]),
        torch.tensor([1.0, 1.0, 1.0, 1.0, nan]),
        torch.tensor([False, True, False, True, False]),
        torch.tensor([True, True, True, True, False]),
        torch.tensor([0.0, 0.0, -1e4, 0.0, nan]),
    )
    logp = torch.tensor([-1e4, -1e4, 0.0, -50.0, nan], requires_grad=True)
    loss, sums, _ = policy_loss(logp, torch.zeros(5), columns, o)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all() and torch.isfinite(sums).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_logprob_on_the_kernels(dtype):
    """The chunked output layer with Triton inside, both forms, against float64."""
    torch.manual_seed(2)
    hidden = torch.randn(19, 32).to(dtype)
    weight = (torch.randn(216, 32) * 0.3).to(dtype)
    targets = torch.randint(0, 211, (19,))
    a = torch.randn(19)
    wide = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    want, entropy = exact(wide[0] @ wide[1].t(), targets, 0.8, 211)
    ((want * a).sum() + 0.1 * entropy.sum()).backward()
    settings = {"temperature": 0.8, "vocab_size": 211}
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 4e-2, "atol": 4e-2}
    for form in ("recompute", "inside"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if form == "recompute":
            logp, ent = linear_logprob(*leaves, targets, **settings)
            loss = (logp * a).sum() + 0.1 * ent.sum()
        else:
            loss = linear_logprob_loss(
                *leaves,
                targets,
                lambda logp, ent, rows: (logp * a[rows]).sum() + 0.1 * ent.sum(),
                **settings,
            )
        loss.backward()
        for got, ref in zip(leaves, wide):
            torch.testing.assert_close(got.grad.double(), ref.grad, **tolerance)


def test_a_nan_stays_a_nan():
    """As on the torch path: it must reach the gradient norm, which skips the update."""
    logits = torch.randn(3, 50)
    logits[1, 7] = torch.nan
    leaf = logits.clone().requires_grad_()
    logp, entropy = token_logprob(leaf, torch.tensor([1, 2, 3]))
    (logp.sum() + entropy.sum()).backward()
    assert logp.isnan().tolist() == [False, True, False] and leaf.grad[1].isnan().all()
    for broken in range(3):
        columns = [torch.full((4,), -1.0) for _ in range(3)]
        columns[broken][2] = torch.nan
        logp, old, engine = columns
        leaf = logp.clone().requires_grad_()
        rest = LossColumns(
            old, engine, torch.ones(4), torch.ones(4), torch.zeros(4).bool(), torch.ones(4).bool()
        )
        options = Algorithm(responses=4, refinements=2, importance_cap=2.0)
        loss, _, largest = policy_loss(leaf, torch.zeros(4), rest, options)
        loss.backward()
        assert loss.isnan() and leaf.grad[2].isnan() and not leaf.grad[:2].isnan().any()
        assert largest.isnan() == (broken < 2)
