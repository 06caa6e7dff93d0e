"""Options of the optimizer and the objective at the level of the actor, on one rank."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_cgrpo.algorithm.batch import build_batch
from megatron_cgrpo.config import parse_config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint, write_hf
from tests.groups import groups
from tests.tiny import make_model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m"), "qwen3", True, layers=2)


@pytest.fixture
def build(root):
    from megatron_cgrpo.policy.actor import MegatronActor
    from megatron_cgrpo.policy.parallel import initialize, shutdown

    def make(**sections):
        base = {
            "model": {"path": str(root), "dtype": "float32"},
            "data": {"path": "unused"},
            "optimizer": {"lr": 1e-2},
            "algorithm": {"responses": 4, "refinements": 2},
            "rollout": {"max_prompt_tokens": 60, "max_response_tokens": 60},
            "training": {"problems_per_step": 4, "micro_batch_tokens": 256, "steps": 4},
        }
        for name, values in sections.items():
            base[name] = {**base.get(name, {}), **values}
        config = parse_config(base)
        initialize(config.parallel)
        shape = shape_of(json.loads((root / "config.json").read_text()))
        return MegatronActor(config, shape, HFCheckpoint(root))

    yield make
    shutdown()


def steps(actor, count, mini=1):
    """`count` rollout steps on the same groups; the update results of each."""
    batch = build_batch(groups(3, 4), actor.config.algorithm, mini, 60)
    out = []
    for _ in range(count):
        micro_batches = actor.prepare(batch, mini)
        actor.score(micro_batches)
        out.append([actor.train(m) for m in micro_batches])
    return out


def weights(actor):
    return {n: p.detach().clone() for n, p in actor.model.parameters_by_name().items()}


def test_second_mini_batch_is_off_policy(build):
    ((first, second),) = steps(build(training={"mini_batch_problems": 2}), 1, mini=2)
    assert first.max_log_ratio == 0.0 and second.max_log_ratio > 0


def test_learning_rate_schedules(build):
    def rates(**optimizer):
        return [u.lr for (u,) in steps(build(optimizer=optimizer), 4)]

    assert rates(lr=1e-3) == pytest.approx([1e-3] * 4)
    assert rates(lr=1e-3, warmup_steps=2) == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
    linear = rates(lr=1e-3, lr_schedule="linear", min_lr=2e-4)
    assert linear == pytest.approx([8e-4, 6e-4, 4e-4, 2e-4])


def test_norms_are_never_decayed(build):
    actor = build(optimizer={"lr": 1e-2, "weight_decay": 0.5})
    before = weights(actor)
    for p in actor.model.parameters_by_name().values():
        p.main_grad.zero_()
    actor._step()
    for name, p in weights(actor).items():
        if p.dim() == 1:
            assert torch.equal(p, before[name]), name
        else:
            torch.testing.assert_close(p, before[name] * (1 - 1e-2 * 0.5))


def test_clipping_bounds_the_update_direction(build):
    free = steps(build(optimizer={"clip_grad": 0.0}), 1)[0][0].grad_norm
    clipped = build(optimizer={"clip_grad": free / 10})
    result = steps(clipped, 1)[0][0]
    assert result.grad_norm == pytest.approx(free)
    grads = [p.main_grad for p in clipped.model.parameters_by_name().values()]
    assert torch.cat([g.flatten() for g in grads]).norm().item() == pytest.approx(
        free / 10, rel=1e-3
    )


def test_sharded_and_plain_optimizers_agree(build):
    a = build(optimizer={"sharded": True})
    steps(a, 2)
    kept = weights(a)
    b = build(optimizer={"sharded": False})
    steps(b, 2)
    for name, p in weights(b).items():
        torch.testing.assert_close(p, kept[name], rtol=1e-5, atol=1e-6)


def test_reference_kl_is_zero_at_first_and_pulls_back_later(build):
    def kl(coef):
        actor = build(algorithm={"kl_coef": coef}, optimizer={"lr": 1e-3})
        return [u[0].sums["reference_kl"] for u in steps(actor, 6)]

    weak, strong = kl(1e-6), kl(10.0)
    assert weak[0] == pytest.approx(0.0, abs=1e-6) and weak[1] > 1e-3
    assert strong[-1] < weak[-1] / 2


def test_entropy_bonus_raises_entropy(build):
    def entropy_after(coef):
        actor = build(algorithm={"entropy_coef": coef}, optimizer={"lr": 1e-3})
        steps(actor, 3)
        batch = build_batch(groups(3, 4), actor.config.algorithm, 1, 60)
        sums = actor.score(actor.prepare(batch, 1)).sums
        return sums["entropy"] / sums["tokens"]

    assert entropy_after(5.0) > entropy_after(0.0)


def test_non_finite_gradients_are_skipped_then_stop_the_run(build):
    from megatron_cgrpo.policy.actor import NonFiniteGradient

    actor = build(training={"max_skipped_updates": 2})
    before = weights(actor)
    batch = build_batch(groups(3, 4), actor.config.algorithm, 1, 60)
    bad = torch.where(batch.loss_mask, torch.inf, batch.weight)
    object.__setattr__(batch, "weight", bad)
    micro_batches = actor.prepare(batch, 1)
    actor.score(micro_batches)
    result = actor.train(micro_batches[0])
    assert not result.applied
    after = weights(actor)
    assert all(torch.equal(before[n], after[n]) for n in before)
    with pytest.raises(NonFiniteGradient, match="2 updates in a row"):
        actor.train(micro_batches[0])
    # A good batch in between starts the count anew.
    actor.skipped_in_a_row = 1
    assert steps(actor, 1)[0][0].applied and actor.skipped_in_a_row == 0


def test_a_step_without_a_signal_changes_nothing(build):
    actor = build()
    before = weights(actor)
    batch = build_batch(groups(3, 4), actor.config.algorithm, 1, 60)
    object.__setattr__(batch, "advantage", torch.zeros_like(batch.advantage))
    micro_batches = actor.prepare(batch, 1)
    score = actor.score(micro_batches)
    result = actor.train(micro_batches[0])
    assert not result.applied and result.grad_norm == 0.0
    assert score.sums["tokens"] > 0
    after = weights(actor)
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("output_layer", ["fused", "logits"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_memory_options_do_not_change_the_numbers(build, output_layer, recompute):
    plain = steps(build(), 1)[0][0]
    other = build(model={"output_layer": output_layer, "recompute": recompute})
    result = steps(other, 1)[0][0]
    assert result.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert result.max_log_ratio == 0.0


def test_bfloat16_trains_in_float32_state(build):
    actor = build(model={"dtype": "bfloat16"})
    result = steps(actor, 2)[-1][0]
    assert result.applied and result.max_log_ratio == 0.0
    assert all(p.dtype == torch.bfloat16 for p in actor.model.parameters_by_name().values())
    assert all(p.main_grad.dtype == torch.float32 for p in actor._parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(root, tmp_path, value):
    from megatron_cgrpo.config.errors import ConfigError
    from megatron_cgrpo.policy.parallel import initialize, shutdown
    from megatron_cgrpo.training.directory import Progress
    from megatron_cgrpo.training.state import build_actor

    stored = HFCheckpoint(root)
    tensors = {n: stored.get(n) for n in stored.shapes()}
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][0, 3] = value
    model = write_hf(tmp_path / "model", tensors.items(), [root])
    config = parse_config(
        {"model": {"path": str(model), "dtype": "float32"}, "data": {"path": "unused"}}
    )
    initialize(config.parallel)
    try:
        shape = shape_of(json.loads((root / "config.json").read_text()))
        # A fused parameter names all that it is made of.
        with pytest.raises(ConfigError, match=r"holds NaN or infinite values in .*layers\.1\.self"):
            build_actor(config, shape, Progress(None, {}))
    finally:
        shutdown()
