"""The plans of the models that users train, against transformers, without any weights."""

from __future__ import annotations

import math
import re

import pytest
import torch

from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.plan import parameter_count, plan_for
from megatron_cgrpo.conversion.rules import padded_vocab

QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
LLAMA = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _config(family: str, layers, hidden, ffn, heads, kv, **more) -> dict:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


def _qwen25(*sizes) -> dict:
    return _config("qwen2", *sizes, vocab_size=152064, max_position_embeddings=32768, **QWEN)


def _qwen3(*sizes, family="qwen3", **more) -> dict:
    own = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
    return _config(family, *sizes, **own, **QWEN, **more)


# Sizes as published; parameters as transformers counts them.
MODELS = {
    "Qwen2.5-7B": _qwen25(28, 3584, 18944, 28, 4),
    "Qwen2.5-14B": _qwen25(48, 5120, 13824, 40, 8),
    "Qwen2.5-32B": _qwen25(64, 5120, 27648, 40, 8),
    "Qwen2.5-72B": _qwen25(80, 8192, 29568, 64, 8),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, 8),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40, 8),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64, 8),
    "Qwen3-30B-A3B": _qwen3(
        48,
        2048,
        6144,
        32,
        4,
        family="qwen3_moe",
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "Llama-3.1-8B": _config("llama", 32, 4096, 14336, 32, 8, **LLAMA),
    "Llama-3.1-70B": _config("llama", 80, 8192, 28672, 64, 8, **LLAMA),
}
BILLIONS = dict(zip(MODELS, (7.62, 14.77, 32.76, 72.71, 8.19, 14.77, 32.76, 30.53, 8.03, 70.55)))


def fused_experts(found: dict[str, tuple]) -> dict[str, tuple]:
    """Names and shapes as transformers ≥ 5 holds them: one tensor for all experts of a layer."""
    out: dict[str, tuple] = {}
    for name, dims in found.items():
        expert = re.fullmatch(r"(.+\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if expert is None:
            out[name] = dims
            continue
        where, kind = expert.groups()
        key = f"{where}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
        experts = out.get(key, (0,))[0] + (kind != "up")
        rows = dims[0] * (1 if kind == "down" else 2)
        out[key] = (experts, rows, dims[1])
    return out


@pytest.mark.parametrize("name", MODELS)
def test_plan_has_the_tensors_of_transformers(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shape_of(MODELS[name])
    mine = {n: d for e in plan_for(shape) for n, d in zip(e.hf_names, e.hf_shapes)}
    hf = dict(MODELS[name])
    config = AutoConfig.for_model(hf.pop("model_type"), **hf)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    want = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert fused_experts(mine) == want
    assert parameter_count(shape) == sum(p.numel() for p in model.parameters())
    assert parameter_count(shape) / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_all_ranks_make_up_the_whole(name):
    shape = shape_of(MODELS[name])
    # Megatron wants whole heads on every rank.
    tp, pp = (8 if shape.heads % 8 == 0 else 4), 4
    stages, seen = [0] * pp, {}
    for entry in plan_for(shape):
        last = pp - 1 if entry.key.startswith(("output", "decoder.final")) else 0
        stage = entry.index[0] * pp // shape.layers if entry.index else last
        if entry.key in seen:
            # The same shapes as in the layer (and expert) before.
            stages[stage] += seen[entry.key]
            continue
        parts = [torch.empty(d, device="meta") for d in entry.hf_shapes]
        shards = [entry.rule.shard(parts, shape, tp, r) for r in range(tp)]
        assert len({s.shape for s in shards}) == 1
        copies = tp if entry.rule.dim is None else 1
        held = sum(s.numel() for s in shards) // copies
        if entry.rule.pads:
            held -= (padded_vocab(shape.vocab, tp) - shape.vocab) * shape.hidden
        assert held == sum(math.prod(d) for d in entry.hf_shapes), entry
        seen[entry.key] = held
        stages[stage] += held
    assert sum(stages) == parameter_count(shape)
    assert stages[1] == stages[2] < min(stages[0], stages[3])
