"""Configuration: refusals name the mistake; every documented option changes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_cgrpo.config import ConfigError, apply_overrides, load_config, parse_config
from megatron_cgrpo.config.checks import check_memory, check_model
from megatron_cgrpo.config.presets import METHODS
from megatron_cgrpo.config.reference import reference
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.plan import parameter_count

BASE = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}


def config(**sections):
    return parse_config({**BASE, **sections})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"algorithm": {"gama": 0.2}}, "did you mean 'algorithm.gamma'"),
        ({"trainig": {}}, "did you mean 'training'"),
        ({"data": {"path": "x", "fields": {"qestion": "q"}}}, "data.fields.question"),
        ({"algorithm": {"responses": 4, "refinements": 4}}, "must be smaller"),
        ({"algorithm": {"method": "ppo"}}, "algorithm.method"),
        ({"algorithm": {"method": "grpo", "trigger": "always"}}, "no refinements"),
        ({"algorithm": {"method": "resample", "critique": "cot"}}, "critique=none"),
        ({"parallel": {"world_size": 3, "tensor": 2}}, "not a multiple"),
        ({"parallel": {"sequence_parallel": True}}, "tensor ≥ 2"),
        ({"parallel": {"virtual_pipeline": 2}}, "pipeline ≥ 2"),
        ({"training": {"problems_per_step": 10, "mini_batch_problems": 4}}, "not a multiple"),
        ({"training": {"micro_batch_tokens": 100}}, "less than one longest sequence"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature"),
        ({"rollout": {"placement": "split"}}, "rollout.gpus"),
        ({"validation": {"temperature": 0, "samples": 4}}, "greedy"),
        ({"model": {"path": "m", "context_length": 100}}, "exceeds"),
        (
            {
                "parallel": {"world_size": 64},
                "training": {"problems_per_step": 4},
                "algorithm": {"responses": 8},
            },
            "cannot be shared",
        ),
    ],
)
def test_mistakes_are_named(raw, expected):
    with pytest.raises(ConfigError) as e:
        parse_config({**BASE, **raw})
    assert expected in str(e.value)
    assert "\n" not in str(e.value)


def test_overrides_are_typed_and_nested(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(BASE))
    c = load_config(
        path,
        [
            "algorithm.gamma=0.5",
            "optimizer.lr=3e-6",
            "algorithm.trigger={below: 0.5}",
            "run.name=x",
        ],
    )
    assert (c.algorithm.gamma, c.optimizer.lr, c.run.name) == (0.5, 3e-6, "x")
    assert c.algorithm.trigger.below == 0.5
    with pytest.raises(ConfigError, match="key.path=value"):
        apply_overrides(BASE, ["gamma"])
    with pytest.raises(ConfigError, match="is a value"):
        apply_overrides(BASE, ["model.path.x=1"])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(bad)
    bad.write_text("- 1")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(bad)


@pytest.mark.parametrize("method", METHODS)
def test_presets_fill_only_what_is_left_out(method):
    c = config(algorithm={"method": method})
    for key, value in METHODS[method].items():
        assert getattr(c.algorithm, key) == value
    assert config(algorithm={"method": method, "gamma": 0.3}).algorithm.gamma == 0.3
    changed = config(algorithm={"method": method, "normalize_std": True, "length_norm": "token"})
    assert changed.algorithm.normalize_std and changed.algorithm.length_norm == "token"


def test_resolved_configuration_reads_back_the_same(tmp_path):
    c = config(algorithm={"trigger": {"below": 0.25}}, rollout={"urls": ["http://a:1"]})
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(c.model_dump(mode="json")))
    assert load_config(path) == c


def test_the_reference_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference(), (
        "run: python -m megatron_cgrpo.config.reference > docs/configuration.md"
    )


def test_every_option_is_documented():
    assert not [line for line in reference().splitlines() if line.endswith("|  |")]


LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"parallel": {"world_size": 7, "tensor": 7}}, "does not divide the model's 64"),
        (
            {"parallel": {"world_size": 3, "pipeline": 3}},
            "80 layers do not divide into pipeline chunks: 80 are left for 3",
        ),
        (
            {"parallel": {"world_size": 4, "pipeline": 4, "first_stage_layers": 18}},
            "62 are left for 3",
        ),
        ({"parallel": {"world_size": 2, "expert": 2}}, "need a mixture-of-experts model"),
        (
            {"parallel": {"world_size": 2, "tensor": 2, "expert_tensor": 1}},
            "need a mixture-of-experts model",
        ),
        ({"model": {"weights": "/nowhere"}}, "not a distributed checkpoint"),
        ({"rollout": {"tensor": 3}}, "rollout.tensor=3 does not divide"),
    ],
)
def test_model_and_machine_are_checked_before_anything_starts(sections, expected, tmp_path):
    sections = dict(sections)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=expected):
        model = {"path": str(tmp_path), **sections.pop("model", {})}
        check_model(parse_config({**BASE, **sections, "model": model}))


def test_experts_that_megatron_would_train_wrong_are_refused(tmp_path):
    mixture = dict(num_experts=8, moe_intermediate_size=64, model_type="qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, **mixture}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    parallel = {"world_size": 2, "tensor": 2, "expert_tensor": 1, "sequence_parallel": True}
    model = {"path": str(tmp_path)}
    with pytest.raises(ConfigError, match="needs parallel.expert > 1"):
        check_model(parse_config({**BASE, "parallel": parallel, "model": model}))
    check_model(parse_config({**BASE, "parallel": {**parallel, "expert": 2}, "model": model}))


def test_a_model_that_cannot_fit_is_refused():
    shape = shape_of(LLAMA_70B)
    assert parameter_count(shape) == 70_553_706_496  # Llama-3.1-70B
    with pytest.raises(ConfigError, match="70.6B parameters needs about .* GiB"):
        check_memory(config(), parameter_count(shape))
    check_memory(config(), 1_000_000)
