"""Token log-probs, entropy and the policy loss against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.config.algorithm import Algorithm
from megatron_cgrpo.kernels import linear_logprob as linear
from megatron_cgrpo.kernels.policy_loss import SUMS, LossColumns, policy_loss_reference
from megatron_cgrpo.kernels.token_logprob import token_logprob


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("vocab", [7, 151])
def test_token_logprob_and_gradients(temperature, vocab):
    torch.manual_seed(0)
    padded = vocab + 5
    logits = (torch.randn(20, padded) * 4).requires_grad_()
    targets = torch.randint(0, vocab, (20,))
    before = logits.detach().clone()
    logp, entropy = token_logprob(logits, targets, temperature=temperature, vocab_size=vocab)
    a, b = torch.randn(20), torch.randn(20)
    (logp * a + entropy * b).sum().backward()
    ref = before[:, :vocab].double().requires_grad_()
    lsm = torch.log_softmax(ref / temperature, -1)
    want = lsm.gather(1, targets[:, None])[:, 0]
    want_entropy = -(lsm.exp() * lsm).sum(-1)
    (want * a + want_entropy * b).sum().backward()
    torch.testing.assert_close(logp.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad[:, :vocab].double(), ref.grad, rtol=1e-4, atol=1e-6)
    assert not logits.grad[:, vocab:].any()
    assert torch.equal(logits.detach(), before)


def test_token_logprob_extremes():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 0.0, -torch.inf]], requires_grad=True)
    logp, entropy = token_logprob(logits, torch.tensor([1, 1]))
    assert logp.tolist() == [-2e4, 0.0] and entropy.tolist() == [0.0, 0.0]
    (logp + entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()
    empty, _ = token_logprob(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)


def brute_force(lp, old, engine, adv, weight, refined, mask, ref, ent, o: Algorithm):
    """The objective token by token, as written in the paper, and the sums of the metrics."""
    total = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(SUMS, 0.0)
    for i in range(len(lp)):
        if not mask[i]:
            continue
        a, w = adv[i], weight[i]
        if refined[i]:
            pi = lp[i].exp()
            ratio = pi / (pi + o.gamma)
            clip = o.clip_refinements
        else:
            ratio = (lp[i] - old[i]).exp()
            clip = True
        value = ratio * a
        if clip:
            value = torch.minimum(value, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * a)
        if not refined[i]:
            if o.dual_clip is not None and a < 0:
                value = torch.maximum(value, o.dual_clip * a)
            if o.importance_cap is not None:
                value = value * min(math.exp(old[i] - engine[i]), o.importance_cap)
        role = "refinement" if refined[i] else "initial"
        sums[f"{role}_tokens"] += 1
        sums[f"objective_{role}"] += float(w * value)
        sums["entropy"] += float(ent[i])
        x, below = float(ratio), float(ratio) < 1 - o.clip_low
        if refined[i]:
            sums["rho"] += x
            sums["rho_clipped"] += clip and below and float(a) < 0
        else:
            sums["ratio"] += x
            sums["clipped_low"] += below and float(a) < 0
            sums["clipped_high"] += x > 1 + o.clip_high and float(a) > 0
            sums["approx_kl"] += x - 1 - math.log(x)
        d = ref[i] - lp[i]
        if o.kl_coef:
            sums["reference_kl"] += float(d.exp() - d - 1)
        value = value - o.kl_coef * (d.exp() - d - 1) + o.entropy_coef * ent[i]
        total = total - w * value
    return total, sums


@given(
    seed=st.integers(0, 10_000),
    options=st.fixed_dictionaries(
        {
            "gamma": st.sampled_from([0.01, 0.1, 1.0]),
            "clip_low": st.sampled_from([0.1, 0.2]),
            "clip_high": st.sampled_from([0.2, 0.28]),
            "clip_refinements": st.booleans(),
            "dual_clip": st.sampled_from([None, 3.0]),
            "kl_coef": st.sampled_from([0.0, 0.05]),
            "entropy_coef": st.sampled_from([0.0, 0.01]),
            "importance_cap": st.sampled_from([None, 2.0]),
        }
    ),
)
def test_policy_loss_equals_the_paper(seed, options):
    o = Algorithm(responses=4, refinements=2, **options)
    g = torch.Generator().manual_seed(seed)
    size = 17

    def rand(scale=1.0):
        return torch.randn(size, generator=g, dtype=torch.float64) * scale

    lp = (-rand().abs() * 2).requires_grad_()
    entropy = rand().abs().requires_grad_()
    old, engine, ref = lp.detach() + rand(0.4), lp.detach() + rand(0.4), lp.detach() + rand(0.4)
    adv, weight = rand(), rand().abs()
    refined = torch.rand(size, generator=g) < 0.4
    mask = torch.rand(size, generator=g) < 0.8
    columns = LossColumns(old, engine, adv, weight, refined, mask, ref)
    loss, sums, _ = policy_loss_reference(lp, entropy, columns, o)
    grads = torch.autograd.grad(loss, (lp, entropy), allow_unused=True)
    want, want_sums = brute_force(lp, old, engine, adv, weight, refined, mask, ref, entropy, o)
    wanted = torch.autograd.grad(want, (lp, entropy), allow_unused=True)
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-12)
    for got, expected in zip(grads, wanted):
        zero = torch.zeros(size, dtype=torch.float64)
        got, expected = (zero if x is None else x for x in (got, expected))
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    named = dict(zip(SUMS, sums.tolist()))
    assert named == pytest.approx(want_sums, rel=1e-9, abs=1e-12)


def test_policy_loss_is_finite_at_the_extremes():
    o = Algorithm(responses=4, refinements=2)
    lp = torch.tensor([-1e4, -1e4, 0.0, -50.0], requires_grad=True)
    columns = LossColumns(
        torch.tensor([0.0, -1e4, -1e4, -50.0]),
        torch.zeros(4),
        torch.tensor([1.0, -1.0, -1.0, 1.0]),
        torch.ones(4),
        torch.tensor([False, True, False, True]),
        torch.ones(4, dtype=torch.bool),
    )
    loss, sums, _ = policy_loss_reference(lp, torch.zeros(4), columns, o)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(lp.grad).all() and torch.isfinite(sums).all()


def test_clip_of_refinements_only_stops_negative_advantages():
    # π = 0.05, γ = 0.1: ρ = 1/3 < 1 − ε, so the clip binds for Â < 0 and never for Â > 0.
    for clip, advantage, moves in [(True, 1.0, True), (True, -1.0, False), (False, -1.0, True)]:
        o = Algorithm(responses=4, refinements=2, clip_refinements=clip)
        lp = torch.tensor([math.log(0.05)], requires_grad=True)
        one = torch.ones(1)
        columns = LossColumns(
            lp.detach(), lp.detach(), one * advantage, one, one.bool(), one.bool()
        )
        policy_loss_reference(lp, one, columns, o)[0].backward()
        slope = 0.1 * 0.05 / 0.15**2
        assert lp.grad.item() == pytest.approx(-advantage * slope if moves else 0.0, rel=1e-5)


@pytest.mark.parametrize("form", ["recompute", "inside"])
def test_linear_logprob(form, monkeypatch):
    """Chunks of a few tokens; float64 on the whole logits is the reference."""
    monkeypatch.setattr(linear, "CHUNK_BYTES_CPU", 1)
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 12), torch.randn(40, 12)
    targets, a = torch.randint(0, 37, (70,)), torch.randn(70)
    wide = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    lsm = torch.log_softmax((wide[0] @ wide[1].t())[:, :37] / 0.7, -1)
    logp = lsm.gather(1, targets[:, None])[:, 0]
    entropy = -(lsm.exp() * lsm).sum(-1)
    want = (logp * a).sum() + 0.3 * entropy.sum()
    (2 * want).backward()
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    settings = {"temperature": 0.7, "vocab_size": 37}
    seen = []

    def chunk_loss(lp, ent, rows):
        seen.append(rows)
        return (lp * a[rows]).sum() + 0.3 * ent.sum()

    if form == "inside":
        loss = linear.linear_logprob_loss(*leaves, targets, chunk_loss, **settings)
        assert len(seen) == 5
    else:
        lp, ent = linear.linear_logprob(*leaves, targets, **settings)
        loss = chunk_loss(lp, ent, slice(None))
    (2 * loss).backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-4)
    for got, ref in zip(leaves, wide):
        torch.testing.assert_close(got.grad.double(), ref.grad, rtol=1e-4, atol=1e-4)
    if form == "inside":
        again = linear.linear_logprob_loss(*leaves, targets, chunk_loss, **settings)
        again.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once"):
            again.backward()


def test_scoring_and_training_see_the_same_bits():
    """On-policy identity at the level of the kernels: both forms share their forward pass."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16), torch.randn(300, 16)
    targets = torch.randint(0, 300, (50,))
    scored, _ = linear.linear_logprob(hidden, weight, targets)
    trained = []

    def keep(lp, ent, rows):
        trained.append(lp.detach().clone())
        return lp.sum()

    linear.linear_logprob_loss(hidden.requires_grad_(), weight, targets, keep)
    assert torch.equal(torch.cat(trained), scored)
