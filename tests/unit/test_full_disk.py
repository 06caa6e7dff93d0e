"""Exports on a disk that is really full."""

from __future__ import annotations

import pytest
import torch

from megatron_cgrpo.config.checks import check_disk
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint, write_hf
from tests.disk import small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path, "2m") as mounted:
        if not mounted:
            pytest.skip("needs the right to mount a tmpfs")
        yield tmp_path


def test_a_full_disk_keeps_the_last_export(disk):
    small = [("x", torch.arange(1000.0))]
    write_hf(disk / "step_1", small, [])
    with pytest.raises(OSError, match="No space left|os error 28"):
        write_hf(disk / "step_2", [("x", torch.zeros(1_000_000))], [])
    assert [p.name for p in disk.iterdir()] == ["step_1"]
    assert torch.equal(HFCheckpoint(disk / "step_1").get("x"), small[0][1])
    with pytest.raises(ConfigError, match="MiB free"):
        check_disk(disk, 1 << 30)
