"""Conversion rules: fuse, cut, join and split are exact inverses."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.plan import check_tensors, plan_for
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint, write_hf
from tests.tiny import FAMILIES, make_model

SHAPE = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 48,
    "vocab_size": 151,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@given(
    family=st.sampled_from(FAMILIES),
    kv=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    tied=st.booleans(),
)
def test_round_trip_at_any_tensor_parallel_size(family, kv, tp, tied):
    hf = {**SHAPE, "model_type": family, "num_key_value_heads": kv, "tie_word_embeddings": tied}
    shape = shape_of(hf)
    generator = torch.Generator().manual_seed(0)
    for entry in plan_for(shape):
        parts = [torch.randn(d, generator=generator) for d in entry.hf_shapes]
        shards = [entry.rule.shard(parts, shape, tp, r) for r in range(tp)]
        assert len({s.shape for s in shards}) == 1
        back = entry.rule.unshard(shards, shape)
        assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True)), entry


def test_qkv_is_stored_per_group():
    shape = shape_of({**SHAPE, "model_type": "llama"})
    entry = next(e for e in plan_for(shape) if "linear_qkv.weight" in e.megatron[0])
    q, k, v = (torch.full(d, i) for i, d in enumerate(entry.hf_shapes, 1))
    rows = entry.rule.fuse([q, k, v], shape)[:, 0].tolist()
    assert rows == ([1] * 16 + [2] * 4 + [3] * 4) * 2


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_plan_names_every_tensor_of_transformers(family, tied, tmp_path):
    root = make_model(tmp_path, family, tied)
    shape = shape_of(json.loads((root / "config.json").read_text()))
    found = HFCheckpoint(root).shapes()
    check_tensors(plan_for(shape), found, "test", shape)
    assert {n for e in plan_for(shape) for n in e.hf_names} == set(found)


def test_differences_are_named(tmp_path):
    shape = shape_of(SHAPE)
    plan = plan_for(shape)
    good = {n: d for e in plan for n, d in zip(e.hf_names, e.hf_shapes)}
    check_tensors(plan, good, "x", shape)
    with pytest.raises(ValueError, match="lacks the tensor model.norm.weight"):
        check_tensors(plan, {k: v for k, v in good.items() if k != "model.norm.weight"}, "x", shape)
    with pytest.raises(ValueError, match="has shape"):
        check_tensors(plan, {**good, "model.norm.weight": (3,)}, "x", shape)
    with pytest.raises(ValueError, match="no place for: extra"):
        check_tensors(plan, {**good, "extra": (3,)}, "x", shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [1], "num_experts": 4},
            "dense layers",
        ),
        ({"model_type": "qwen3_moe"}, "lacks num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "sliding"),
    ],
)
def test_unsupported_models_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        shape_of({**SHAPE, **change})


def test_broken_checkpoints(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        HFCheckpoint(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no tensors"):
        HFCheckpoint(tmp_path)
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names y"):
        HFCheckpoint(tmp_path)


def test_write_is_all_or_nothing(tmp_path):
    root = make_model(tmp_path / "m", "qwen3", True)
    source = HFCheckpoint(root)
    names = list(source.shapes())
    out = write_hf(tmp_path / "out", ((n, source.get(n)) for n in names), [root])
    copy = HFCheckpoint(out)
    assert copy.shapes() == source.shapes()
    assert all(torch.equal(copy.get(n), source.get(n)) for n in names)
    half = write_hf(tmp_path / "half", ((n, source.get(n).bfloat16()) for n in names), [root])
    assert "bfloat16" in (half / "config.json").read_text()

    def failing():
        yield names[0], source.get(names[0])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write_hf(tmp_path / "other", failing(), [root])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half", "m", "out"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(out).eos_token == "<end>"
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "qwen3"
