"""Trigger, selection, advantages and batches against brute force."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.algorithm.advantages import group_advantages, with_advantages
from megatron_cgrpo.algorithm.batch import build_batch, supervised_batch
from megatron_cgrpo.algorithm.selection import select_refinements, trigger_fires
from megatron_cgrpo.config.algorithm import Algorithm, BelowTrigger
from tests.groups import groups, sample

REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=16)


@given(st.lists(st.booleans(), max_size=10), st.floats(0, 1))
def test_trigger(verdicts, x):
    assert trigger_fires("all_failed", verdicts) == (bool(verdicts) and not any(verdicts))
    assert trigger_fires("always", verdicts) == bool(verdicts)
    assert not trigger_fires("never", verdicts)
    share = sum(verdicts) / len(verdicts) if verdicts else 1.0
    assert trigger_fires(BelowTrigger(below=x), verdicts) == (bool(verdicts) and share < x)


@given(REWARDS)
def test_advantages_have_one_baseline(rewards):
    got = group_advantages(rewards)
    mean = sum(rewards) / len(rewards)
    if len(set(rewards)) == 1:
        assert got == [0.0] * len(rewards)
    else:
        assert got == pytest.approx([r - mean for r in rewards])
    assert abs(sum(got)) < 1e-12
    standard = group_advantages(rewards, normalize_std=True)
    assert all(math.isfinite(a) for a in standard)
    if len(set(rewards)) > 1:
        assert math.fsum(a * a for a in standard) / len(rewards) == pytest.approx(1.0)


def test_float_noise_is_not_blown_up():
    noisy = [0.35, 0.35 + 1e-9, 0.35 - 1e-9]
    assert group_advantages(noisy, normalize_std=True) == [0.0] * 3
    assert group_advantages([0.35], normalize_std=True) == [0.0]
    assert group_advantages([0.3] * 7 + [0.35])[-1] == pytest.approx(0.05 * 7 / 8)


def test_refinements_share_the_baseline_with_initial_responses():
    failed = groups(0, 2)[1]
    assert failed.refinements
    rewards = [s.reward for s in failed.initial + failed.refinements]
    mean = sum(rewards) / len(rewards)
    assert list(failed.advantages) == pytest.approx([r - mean for r in rewards])


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.integers(1, 6))
def test_selection_prefers_right_ones(flags, k):
    rng = random.Random(0)
    pool = []
    for i, (correct, cut) in enumerate(flags):
        s = sample(rng, "refinement", (5,), 50, correct, parent=i)
        if cut:
            object.__setattr__(s.completion, "finish_reason", "length")
        pool.append(s)
    options = Algorithm(responses=8, refinements=k)
    kept = select_refinements(pool, options, "seed")
    usable = [s for s in pool if not s.completion.truncated]
    assert len(kept) == min(k, len(usable))
    right = sum(bool(s.verdict.correct) for s in usable)
    assert sum(bool(s.verdict.correct) for s in kept) == min(k, right)
    assert not any(s.completion.truncated for s in kept)
    assert kept == select_refinements(list(pool), options, "seed")
    everything = Algorithm(responses=8, refinements=k, drop_truncated_refinements=False)
    assert len(select_refinements(pool, everything, "seed")) == min(k, len(pool))


def test_selection_depends_on_the_seed_only():
    rng = random.Random(1)
    pool = [sample(rng, "refinement", (5,), 50, False, parent=i) for i in range(8)]
    options = Algorithm(responses=9, refinements=2)
    chosen = {tuple(s.parent for s in select_refinements(pool, options, str(i))) for i in range(40)}
    assert len(chosen) > 10


@pytest.mark.parametrize("norm", ["none", "sequence", "token"])
@pytest.mark.parametrize("mini", [1, 2, 4])
def test_weights_hold_every_normaliser(norm, mini):
    gs = groups(1, 4)
    options = Algorithm(responses=4, refinements=2, length_norm=norm)
    batch = build_batch(gs, options, mini, max_response_tokens=40)
    size = 4 // mini
    at = 0
    for g, group in enumerate(gs):
        part = gs[g // size * size : (g // size + 1) * size]
        total = sum(len(s.completion.token_ids) for p in part for s in p.members)
        for s, advantage in zip(group.members, group.advantages):
            n = len(group.refinements if s.role == "refinement" else group.initial)
            length = len(s.completion.token_ids)
            want = {
                "none": 1 / (size * n * 40),
                "sequence": 1 / (size * n * length),
                "token": 1 / total,
            }[norm]
            start, end = batch.cu_seqlens[at : at + 2].tolist()
            cut = start + len(s.completion.prompt_ids)
            assert not batch.loss_mask[start:cut].any() and batch.loss_mask[cut:end].all()
            assert torch.allclose(batch.weight[cut:end], torch.tensor(want))
            assert torch.allclose(batch.advantage[cut:end], torch.tensor(float(advantage)))
            assert batch.tokens[cut:end].tolist() == list(s.completion.token_ids)
            assert batch.engine_logprob[cut:end].tolist() == pytest.approx(s.completion.logprobs)
            assert bool(batch.is_refinement[start]) == (s.role == "refinement")
            assert int(batch.mini_batch[at]) == g // size
            at += 1
    assert at == batch.samples


def test_batch_refuses_what_does_not_fit():
    gs = groups(1, 3)
    options = Algorithm(responses=4, refinements=2)
    with pytest.raises(ValueError, match="do not divide"):
        build_batch(gs, options, 2, 40)
    bare = with_advantages(gs[0])
    object.__setattr__(bare, "advantages", ())
    with pytest.raises(ValueError, match="no advantages"):
        build_batch([bare], options, 1, 40)
    with pytest.raises(ValueError, match="without a response"):
        supervised_batch([([1, 2], [])])


def test_unjudged_samples_have_no_reward():
    s = sample(random.Random(0), "initial", (1,), 50, None)
    with pytest.raises(ValueError, match="no verdict"):
        _ = s.reward
