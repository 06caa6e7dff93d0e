"""Exports on a disk that is really full."""

from __future__ import annotations

import subprocess

import pytest
import torch

from megatron_cgrpo.config.checks import check_disk
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint, write_hf


@pytest.fixture
def small_disk(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_keeps_the_last_export(small_disk):
    small = [("x", torch.arange(1000.0))]
    write_hf(small_disk / "step_1", small, [])
    with pytest.raises(OSError, match="No space left|os error 28"):
        write_hf(small_disk / "step_2", [("x", torch.zeros(1_000_000))], [])
    assert [p.name for p in small_disk.iterdir()] == ["step_1"]
    assert torch.equal(HFCheckpoint(small_disk / "step_1").get("x"), small[0][1])
    with pytest.raises(ConfigError, match="MiB free"):
        check_disk(small_disk, 1 << 30)
