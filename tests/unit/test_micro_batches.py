"""Micro-batches: every sample exactly once, within bounds, whatever the cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.algorithm.batch import build_batch
from megatron_cgrpo.config.algorithm import Algorithm
from megatron_cgrpo.policy.micro_batches import PARTS, build_micro_batch, plan_parts
from tests.groups import groups


@given(
    seed=st.integers(0, 50),
    dp=st.integers(1, 5),
    limit=st.sampled_from([48, 64, 200, 4096]),
    packed=st.booleans(),
    multiple=st.sampled_from([1, 2, 4]),
    skip=st.booleans(),
    pad=st.sampled_from([1, 2, 4]),
)
def test_plan_and_layout(seed, dp, limit, packed, multiple, skip, pad):
    batch = build_batch(groups(seed, 4), Algorithm(responses=4, refinements=2), 2, 40)
    for mini in (0, 1):
        plan = plan_parts(batch, mini, dp, limit, packed, multiple, skip)
        seen = []
        for part in PARTS:
            counts = {len(rank) for rank in plan[part]}
            assert len(counts) == 1 and counts.pop() % multiple == 0
            for samples in (s for rank in plan[part] for s in rank):
                mb = build_micro_batch(batch, part, samples, packed, pad)
                seen += samples
                assert mb.input_ids.size(1) % pad == 0
                if len(samples) > 1:
                    longest = max(int(batch.lengths[i]) for i in samples)
                    total = sum(int(batch.lengths[i]) for i in samples)
                    assert (total if packed else longest * len(samples)) <= limit
                check_rows(batch, mb, samples)
        wanted = [i for i in range(batch.samples) if int(batch.mini_batch[i]) == mini]
        assert sorted(seen) == wanted


def check_rows(batch, mb, samples):
    """Each row's input is the token before its target, at its position in the sample."""
    targets, weights = [], []
    for i in samples:
        start, end = batch.cu_seqlens[i : i + 2].tolist()
        counted = [t for t in range(start + 1, end) if batch.loss_mask[t]]
        targets += [
            (int(batch.tokens[t - 1]), int(batch.tokens[t]), t - 1 - start) for t in counted
        ]
        weights += [float(batch.weight[t]) for t in counted]
    ids, positions = mb.input_ids.flatten()[mb.rows], mb.position_ids.flatten()[mb.rows]
    got = list(zip(ids.tolist(), mb.targets.tolist(), positions.tolist()))
    assert got == targets
    assert torch.allclose(mb.columns.weight, torch.tensor(weights))


@given(
    seed=st.integers(0, 50),
    packed=st.booleans(),
    pad=st.sampled_from([1, 2]),
    size=st.sampled_from([2, 3, 4]),
    count=st.integers(0, 6),
)
def test_context_parallel_ranks_share_a_pass(seed, packed, pad, size, count):
    """Each token is on one rank, with the same predecessor and position; costs are balanced."""
    batch = build_batch(groups(seed, 4), Algorithm(responses=4, refinements=2), 1, 40)
    samples = list(range(count))
    parts = [
        build_micro_batch(batch, "initial", samples, packed, pad, (r, size)) for r in range(size)
    ]
    whole = build_micro_batch(batch, "initial", samples, packed)
    assert len({mb.input_ids.shape for mb in parts}) == 1
    assert parts[0].input_ids.size(1) % (2 * pad) == 0

    def tokens(mb):
        ids, positions = mb.input_ids.flatten()[mb.rows], mb.position_ids.flatten()[mb.rows]
        columns = (ids, mb.targets, positions, mb.columns.weight, mb.columns.engine_logprob)
        return list(zip(*(c.tolist() for c in columns)))

    assert sorted(t for mb in parts for t in tokens(mb)) == sorted(tokens(whole))
    if packed:
        # Causal attention: a position costs as much as there are before it.
        assert len({int(mb.position_ids.sum()) for mb in parts}) == 1


def test_samples_without_a_signal_are_idle():
    gs = groups(0, 4)
    batch = build_batch(gs, Algorithm(responses=4, refinements=2), 1, 40)
    silent = torch.zeros_like(batch.advantage)
    object.__setattr__(batch, "advantage", silent)
    plan = plan_parts(batch, 0, 1, 4096, False)
    assert not plan["initial"][0] and not plan["refinement"][0] and plan["idle"][0]
    full = plan_parts(batch, 0, 1, 4096, False, skip_zero_advantage=False)
    assert not full["idle"][0] and full["initial"][0]
