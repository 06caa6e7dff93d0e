"""HF → distributed checkpoint → a layout's shards → training checkpoint → HF: the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_tools.common import ModelFiles
from megatron_cgrpo.conversion.megatron_io import write_megatron
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from tests.distributed.launch import run_ranks
from tests.tiny import make_model

# Five layers: no pipeline divides them. Vocabulary 151 is padded differently at TP 1, 2 and 4, and
# TP 4 has more ranks than there are KV heads.
LAYOUTS = {
    "TP1": {},
    "TP2": {"tensor": 2},
    "TP4": {"tensor": 4},
    "PP2": {"pipeline": 2, "first_stage_layers": 3},
    "PP4": {"pipeline": 4, "first_stage_layers": 2},
    "TP2×PP2": {"tensor": 2, "pipeline": 2, "last_stage_layers": 2},
}
MOE_LAYOUTS = {
    "EP2": {"expert": 2},
    "EP2×PP2": {"expert": 2, "pipeline": 2, "first_stage_layers": 3},
    "TP2×EP2": {"tensor": 2, "expert": 2},
    "TP2×EP4, ETP1": {"tensor": 2, "expert": 4, "expert_tensor": 1},
}
FAMILIES = {
    "llama": {"tied": False},
    "qwen2": {"tied": True, "num_attention_heads": 4},
    "qwen3": {"tied": True},
    "qwen3_moe": {"tied": False},
}
HALF = ("TP1", "TP2×PP2", "EP2")


def _layouts(family: str) -> dict[str, dict]:
    layouts = LAYOUTS | (MOE_LAYOUTS if family == "qwen3_moe" else {})
    if family != "qwen3_moe":
        return layouts
    return {
        k: v | ({"sequence_parallel": True} if v.get("tensor", 1) > 1 else {})
        for k, v in layouts.items()
    }


CASES = [
    (f, d, n)
    for f in FAMILIES
    for d in ("float32", "bfloat16")
    for n in _layouts(f)
    if d == "float32" or n in HALF
]
# One of each kind of cut; the others run with the slow tests.
QUICK = [
    ("llama", "float32", "TP4"),
    ("llama", "bfloat16", "TP2×PP2"),
    ("qwen2", "float32", "PP4"),
    ("qwen3_moe", "float32", "TP2×EP2"),
]


def make_trips(cases: list[tuple[str, str, str]], root: Path) -> dict[tuple, dict]:
    """Make the models, convert them, and take all the trips in one start of four ranks."""
    jobs = {}
    for family, dtype, name in cases:
        hf, converted = root / f"{family}-{dtype}", root / f"{family}-{dtype}-megatron"
        if not hf.exists():
            options = FAMILIES[family]
            make_model(hf, family, layers=5, dtype=getattr(torch, dtype), **options)
            model = ModelFiles(hf)
            write_megatron(converted, model.checkpoint, model.shape, [hf], threads=2)
        jobs[family, dtype, name] = {
            "root": str(hf),
            "megatron": str(converted),
            "dtype": dtype,
            "layout": _layouts(family)[name],
            "out": str(root / f"{family}-{dtype}-{name}"),
        }
    job = {"cases": list(jobs.values())}
    wrong = run_ranks(4, "tests.distributed.conversion_worker", job, root)
    return {k: case | {"wrong": w} for (k, case), w in zip(jobs.items(), wrong, strict=True)}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return make_trips(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def trips(tmp_path_factory):
    return make_trips([c for c in CASES if c not in QUICK], tmp_path_factory.mktemp("trips"))


def check(trip: dict) -> None:
    assert trip["wrong"] == []
    before, after = HFCheckpoint(trip["root"]), HFCheckpoint(f"{trip['out']}/hf")
    assert before.specs() == after.specs()
    for name in before.specs():
        assert torch.equal(before.get(name), after.get(name)), name


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_same_bits_after_a_trip(quick, case):
    check(quick[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c not in QUICK], ids="-".join)
def test_same_bits_after_every_trip(trips, case):
    check(trips[case])


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_the_result_loads_in_transformers(quick, case):
    trip, dtype = quick[case], case[1]
    ids = torch.arange(3, 35)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        for path in (trip["root"], f"{trip['out']}/hf")
    ]
    assert {p.dtype for m in models for p in m.parameters()} == {getattr(torch, dtype)}
    a, b = (m(ids).logits.float() for m in models)
    assert (a - b).abs().max() <= 1e-4
    same = AutoTokenizer.from_pretrained(f"{trip['out']}/hf")
    assert same.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    for file in ("config.json", "generation_config.json"):
        old, new = (
            json.loads(open(f"{d}/{file}").read()) for d in (trip["root"], trip["out"] + "/hf")
        )
        assert old == new
