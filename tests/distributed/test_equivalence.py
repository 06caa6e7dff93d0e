"""The actor at every layout against transformers: log-probs, gradients, exported tensors."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from tests.tiny import FAMILIES, make_model

LAYOUTS = {
    1: [
        {"tp": 1, "pp": 1},
        {"tp": 1, "pp": 1, "packing": "packed", "temperature": 0.6},
        {"tp": 1, "pp": 1, "output_layer": "logits", "micro": 4096},
    ],
    2: [
        {"tp": 2, "pp": 1},
        {"tp": 2, "pp": 1, "sp": True},
        {"tp": 2, "pp": 1, "output_layer": "logits"},
        {"tp": 1, "pp": 2, "micro": 256},
        {"tp": 1, "pp": 1, "measure": False},
        {"tp": 1, "pp": 1, "cp": 2},
        {"tp": 1, "pp": 1, "cp": 2, "packing": "packed"},
        {"tp": 1, "pp": 1, "sharded": True},
    ],
    4: [
        {"tp": 2, "pp": 2},
        {"tp": 2, "pp": 2, "sp": True, "packing": "packed"},
        {"tp": 1, "pp": 2, "length_norm": "sequence"},
        {"tp": 1, "pp": 2, "vpp": 2},
        {"tp": 1, "pp": 4},
        {"tp": 4, "pp": 1},
        {"tp": 2, "pp": 1, "cp": 2, "sp": True},
        {"tp": 2, "pp": 1, "cp": 2, "sp": True, "packing": "packed"},
        {"tp": 1, "pp": 2, "cp": 2, "sharded": True, "lr": 1e-2, "clip": True},
        {"tp": 1, "pp": 1, "cp": 4},
        {"tp": 1, "pp": 2, "sharded": True, "lr": 1e-2, "clip": True},
        {"tp": 2, "pp": 2, "sharded": True, "lr": 1e-2, "clip": True},
    ],
}


# Mixtures need sequence parallelism beside tensor parallelism.
MOE_LAYOUTS = {
    1: [{"tp": 1, "pp": 1}],
    2: [
        {"tp": 1, "pp": 1, "ep": 2},
        {"tp": 2, "pp": 1, "sp": True},
        {"tp": 2, "pp": 1, "sp": True, "ep": 2, "etp": 1},
    ],
    4: [
        {"tp": 2, "pp": 1, "sp": True, "ep": 2, "packing": "packed"},
        {"tp": 2, "pp": 2, "sp": True, "ep": 2, "etp": 1},
        {"tp": 1, "pp": 2, "ep": 2, "first": 1},
        {"tp": 1, "pp": 1, "cp": 2, "ep": 2},
    ],
}
# Scalings of the rotary embedding, at positions beyond the original context.
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


def _cases(world: int, tied: bool, models) -> list[dict]:
    return [
        dict(layout, world=world, family=family, tied=tied, root=str(models[family, tied]))
        for family in FAMILIES
        for layout in LAYOUTS[world]
        # The Qwen2 model has two heads; training steps are checked on one family.
        # Four ranks take time: there, each family with one kind of embedding.
        if (world < 4 or tied == (family != "qwen2"))
        and (layout["tp"] <= 2 or family != "qwen2")
        and ("lr" not in layout or family == "qwen3")
    ] + [
        dict(layout, world=world, family="qwen3_moe", tied=tied, root=str(models["qwen3_moe"]))
        for layout in MOE_LAYOUTS[world]
        if not tied
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {k: make_model(root / k, "llama", True, rope_scaling=r) for k, r in ROPES.items()}
    made["qwen3_moe"] = make_model(root / "moe", "qwen3_moe", False)
    return made | {
        (f, tied): make_model(root / f"{f}-{tied}", f, tied)
        for f in FAMILIES
        for tied in (True, False)
    }


@pytest.mark.parametrize("world", sorted(LAYOUTS))
def test_actor_equals_transformers(world, models, tmp_path):
    cases = _cases(world, True, models) + _cases(world, False, models)
    if world == 1:
        cases += [{"tp": 1, "pp": 1, "world": 1, "root": str(models[k])} for k in ROPES]
    worker = "tests.distributed.equivalence_worker"
    results = run_ranks(world, worker, {"cases": cases}, tmp_path)
    assert len(results) == len(cases)
    for r in results:
        assert r["logprob"] <= 1e-5, r
        assert r["grad"] <= 1e-4, r
        assert r["export"] == 0, r
        assert r["norm"] == pytest.approx(r["reference_norm"], rel=1e-4), r
        # On-policy identity: scoring and training give the same bits.
        assert r["max_log_ratio"] == 0.0 and r["clipped"] == 0, r
        if r["case"].get("measure", True):
            assert 0 < r["refinement_norm"] <= 10 * r["norm"], r
        # After two clipped steps: the same weights as one rank, and equal copies of tied ones.
        if r["case"].get("lr"):
            assert r["tied_copies"] == 0.0, r
            assert r["stepped"] < 1e-4, r
