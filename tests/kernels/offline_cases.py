"""Run without the interpreter by test_kernels.py: the kernels compiled for sm_90 and sm_100."""

from __future__ import annotations

import pytest

from benchmarks import offline
from megatron_cgrpo.kernels import backend

assert not backend.INTERPRETED


def test_every_configuration_is_fit():
    seen = 0
    for usage, streaming in offline.all_configurations():
        assert usage.complaints(streaming) == [], usage
        seen += 1
    assert seen == 2 * (6 + 4 + 1)


@pytest.mark.parametrize("sm", offline.ARCHITECTURES)
def test_the_gate_sees_spills(sm):
    bad = offline.compile_stats(sm, {"LANES": 256, "VEC": 512, "num_warps": 8})
    assert any("spill" in c for c in bad.complaints(True)), bad


def test_the_gate_sees_narrow_loads():
    narrow = offline.compile_stats(90, {"LANES": 256, "VEC": 8, "num_warps": 8}, width=18_991)
    assert "no 16-byte loads" in narrow.complaints(True), narrow


def test_the_gate_sees_slow_loops():
    slow = offline.compile_stats(90, {"LANES": 256, "VEC": 1, "num_warps": 8})
    assert any("instructions per element" in c for c in slow.complaints(True)), slow
