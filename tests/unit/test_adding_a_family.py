"""The walk-through in docs/adding_a_family.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from checkpoint_tools.common import ModelFiles
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion import families
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.megatron_io import MegatronCheckpoint, write_megatron
from tests.tiny import make_model

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_family.md"


def test_the_walk_through(tmp_path, monkeypatch):
    root = make_model(tmp_path / "hf", "mistral", False, sliding_window=None)
    with pytest.raises(ConfigError, match="'mistral' is not supported"):
        ModelFiles(root)
    (code,) = re.findall(r"```python\n(.+?)```", PAGE.read_text(), re.S)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    monkeypatch.setitem(families.FAMILIES, "mistral", names["MISTRAL"])
    model = ModelFiles(root)
    write_megatron(tmp_path / "megatron", model.checkpoint, model.shape, [root])
    back = MegatronCheckpoint(tmp_path / "megatron")
    for entry in back.plan:
        for a, b in zip(back.get(entry), model.get(entry), strict=True):
            assert torch.equal(a, b)
    config = {**vars(model.shape), "model_type": "mistral", "sliding_window": 4096}
    with pytest.raises(ConfigError, match="sliding window"):
        shape_of(
            config
            | {
                "num_hidden_layers": 1,
                "hidden_size": 8,
                "num_attention_heads": 1,
                "intermediate_size": 8,
                "vocab_size": 8,
                "max_position_embeddings": 8,
                "rms_norm_eps": 1e-6,
            }
        )
