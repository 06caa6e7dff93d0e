"""Model directories as users have them: held against the plan from headers, or refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.model_files import ModelFiles
from megatron_cgrpo.conversion.safetensors_io import INDEX, HFCheckpoint
from megatron_cgrpo.conversion.shape import ModelShape
from tests.tiny import make_model

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "whole", "qwen3", True, layers=2)


@pytest.fixture
def model(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


def config(root: Path, **changes) -> None:
    file = root / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def tensors(root: Path, **changes) -> None:
    """Change (or, with None, remove) tensors of the file."""
    file = root / "model.safetensors"
    held = {k: v for k, v in (load_file(file) | changes).items() if v is not None}
    save_file(held, file, metadata={"format": "pt"})


def sharded(root: Path, **places) -> None:
    names = HFCheckpoint(root).shapes()
    (root / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors") | places})
    )


def cut(root: Path) -> None:
    file = root / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def pointer(root: Path) -> None:
    (root / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    )


BROKEN = {
    "a missing tensor": (lambda r: tensors(r, **{NORM: None}), f"lacks the tensor {NORM}"),
    "an extra tensor": (lambda r: tensors(r, extra=torch.ones(2)), "no place for: extra"),
    "another shape": (lambda r: tensors(r, **{NORM: torch.ones(3)}), "has shape (3,), expected"),
    "whole numbers": (
        lambda r: tensors(r, **{NORM: torch.ones(64, dtype=torch.int32)}),
        f"{NORM} is torch.int32, not a floating type",
    ),
    "a truncated file": (cut, "it ends before the end of"),
    "a Git LFS pointer": (pointer, "is a Git LFS pointer, not the weights"),
    "an absent shard": (
        lambda r: sharded(r, **{NORM: "model-00002.safetensors"}),
        "in model-00002.safetensors, which is not there",
    ),
    "a damaged index": (lambda r: (r / INDEX).write_text('{"weight_map": [1]}'), "no weight_map"),
    "an index that is no JSON": (lambda r: (r / INDEX).write_text("{"), "is not valid JSON"),
    "more layers than tensors": (
        lambda r: config(r, num_hidden_layers=3),
        "lacks the tensor model.layers.2.",
    ),
    "fewer layers than tensors": (
        lambda r: config(r, num_hidden_layers=1),
        "has a tensor that the model has no place for",
    ),
    "8-bit weights": (
        lambda r: config(r, quantization_config={"quant_method": "fp8"}),
        "are quantised ('fp8'",
    ),
    "a null size": (lambda r: config(r, hidden_size=None), "hidden_size is None, not a positive"),
    "a size that is text": (lambda r: config(r, vocab_size="151"), "vocab_size is '151', not a"),
    "a size of zero": (lambda r: config(r, num_attention_heads=0), "num_attention_heads is 0"),
    "an unknown family": (lambda r: config(r, model_type=["x"]), "is not supported; supported:"),
    "heads that do not divide": (lambda r: config(r, num_key_value_heads=3), "is no multiple of"),
    "a scaling that lacks its factor": (
        lambda r: config(r, rope_parameters={"rope_type": "linear"}),
        "factor is None, not a positive number",
    ),
    "a theta that is text": (
        lambda r: config(r, rope_parameters={"rope_theta": "1e4"}),
        "rope_theta is '1e4', not a positive number",
    ),
}


def test_a_whole_model(whole):
    files = ModelFiles(whole)
    assert {n for group in files.specs() for n, _ in group} == set(files.checkpoint.shapes())


@pytest.mark.parametrize("kind", BROKEN)
def test_what_does_not_fit_is_named(model, kind):
    damage, said = BROKEN[kind]
    damage(model)
    with pytest.raises(ValueError) as e:
        ModelFiles(model)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_a_directory_without_weights_or_config(tmp_path, model):
    with pytest.raises(ValueError, match="holds no config.json"):
        ModelFiles(tmp_path)
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no tensors"):
        ModelFiles(model)


# ----------------------------------------------------------------- properties

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just("F32")
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["dtype", "shape", "data_offsets", "rope_type", "factor", "rope_theta"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 151,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default"},
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "quantization_config": None,
}


@given(st.dictionaries(st.sampled_from(sorted(CONFIG)), values, max_size=3))
def test_any_config_is_a_shape_or_one_sentence(changes):
    try:
        shape = shape_of(CONFIG | changes)
    except ConfigError as e:
        assert "\n" not in str(e) and len(str(e)) < 300
        return
    assert isinstance(shape, ModelShape)
    sizes = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.vocab)
    assert all(type(n) is int and n > 0 for n in sizes)
    assert isinstance(shape.rope_theta, float) and shape.norm_eps > 0


def _file(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


entries = st.one_of(
    values,
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "I32"]),
            "shape": st.lists(st.integers(-1, 4), max_size=3),
            "data_offsets": st.lists(st.integers(-4, 64), min_size=1, max_size=3),
        }
    ),
)


@given(st.dictionaries(st.text(max_size=5), entries, max_size=3), st.binary(max_size=64))
def test_any_header_is_tensors_or_one_sentence(tmp_path_factory, header, data):
    root = tmp_path_factory.getbasetemp() / "headers"
    root.mkdir(exist_ok=True)
    (root / "model.safetensors").write_bytes(_file(json.dumps(header).encode(), data))
    try:
        checkpoint = HFCheckpoint(root)
    except ValueError as e:
        assert str(root) in str(e)
        return
    for name, (dims, dtype) in checkpoint.specs().items():
        tensor = checkpoint.get(name)
        assert tuple(tensor.shape) == dims and tensor.dtype == dtype


@given(st.binary(max_size=40))
def test_any_bytes_are_refused(tmp_path_factory, data):
    root = tmp_path_factory.getbasetemp() / "bytes"
    root.mkdir(exist_ok=True)
    (root / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="model.safetensors|holds no tensors"):
        HFCheckpoint(root)
