"""The recipes pass every check, and their shards fit into 80 GB beside the engines."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_cgrpo.cli import main
from megatron_cgrpo.config import ConfigError, load_config, parse_config
from megatron_cgrpo.config.checks import check_gpu_memory
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.plan import plan_for
from megatron_cgrpo.planning.memory import GIB, needed_bytes, parameters_by_stage, rank_memory
from megatron_cgrpo.training.preflight import preflight
from megatron_cgrpo.worlds import chain
from tests.unit.test_config import BASE
from tests.unit.test_published_models import MODELS

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "launch" / "recipes").glob("*_*n.yaml"))
H100 = int(79.6 * GIB)
OTHER_LAYOUTS = [
    (
        "Qwen3-30B-A3B",
        {"world_size": 16, "tensor": 4, "pipeline": 2, "expert": 8, "expert_tensor": 1},
        (0, 15),
    ),
    (
        "Qwen3-30B-A3B",
        {"world_size": 16, "tensor": 4, "pipeline": 2, "expert": 4, "expert_tensor": 2},
        (0, 15),
    ),
    ("Qwen2.5-7B", {"world_size": 8, "tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, (0, 7)),
    (
        "Qwen2.5-14B",
        {"world_size": 4, "tensor": 1, "pipeline": 4, "first_stage_layers": 9},
        (0, 1, 3),
    ),
]


def published(config) -> dict:
    """config.json of a recipe's model, without rope scaling (tables need real memory)."""
    name = Path(config.model.path).name.removesuffix("-Instruct").replace("Llama-3.3", "Llama-3.1")
    return {k: v for k, v in MODELS[name].items() if k != "rope_scaling"}


def job(config, hf, ranks) -> dict:
    return {"config": config.model_dump(mode="json"), "hf": hf, "ranks": ranks}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Megatron's own shards: rank 0 and the last rank of each recipe, ranks of other layouts."""
    root = tmp_path_factory.mktemp("shards")
    jobs = []
    for path in RECIPES:
        config = load_config(path)
        jobs.append(job(config, published(config), [0, config.parallel.world_size - 1]))
    for name, parallel, ranks in OTHER_LAYOUTS:
        parallel = {"sequence_parallel": parallel["tensor"] > 1, **parallel}
        jobs.append(job(parse_config({**BASE, "parallel": parallel}), MODELS[name], ranks))
    (root / "jobs.json").write_text(json.dumps(jobs))
    env = dict(os.environ, OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.shard_worker"]
        + [str(root / "jobs.json"), str(root / "out.json")],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(zip(jobs, json.loads((root / "out.json").read_text())))


def test_the_estimate_counts_what_megatron_builds(shards):
    for job, ranks in shards:
        p = parse_config(job["config"]).parallel
        stages = parameters_by_stage(shape_of(job["hf"]), p)
        for found in ranks:
            assert stages[found["stage"]] == (found["dense"], found["experts"]), job["config"]
    assert {f["stage"] for _, ranks in shards for f in ranks} == {0, 1, 2, 3} - {2}


def write_header(path: Path, shape) -> None:
    """A file with the header of a model's tensors, and a hole where their bytes would be."""
    header, end = {}, 0
    for entry in plan_for(shape):
        for name, dims in zip(entry.hf_names, entry.hf_shapes):
            start, end = end, end + 2 * math.prod(dims)
            header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_fits_and_passes_the_checks(path, tmp_path, capsys):
    config = load_config(path)
    hf = published(config)
    shape = shape_of(hf)
    need = needed_bytes(config, shape, H100)
    assert 0.6 * H100 < need <= H100, f"{need / GIB:.1f} GiB"
    assert config.rollout.servers * config.rollout.tensor == config.parallel.world_size
    chain.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    write_header(tmp_path / "model.safetensors", shape)
    rows = [{"id": str(i), "problem": f"{i}+1", "answer": str(i + 1)} for i in range(128)]
    data = tmp_path / "problems.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    paths = [f"{k}={v}" for k, v in (("model.path", tmp_path), ("data.path", data))]
    paths.append(f"validation.path={data}")
    preflight(load_config(path, paths))
    assert main(["train", str(path), *paths, "--dry-run"]) == 0
    assert "# stage 0: " in capsys.readouterr().out


def test_what_does_not_fit_is_refused():
    config = load_config(RECIPES[0], ["rollout.gpu_memory_utilization=0.9"])
    shape = shape_of(published(config))
    with pytest.raises(ConfigError, match="a GPU needs about .* GiB"):
        check_gpu_memory(needed_bytes(config, shape, H100), H100)
    more = load_config(RECIPES[0], ["training.measure_refinement_gradient=true"])
    plain, second = (rank_memory(c, shape)[0] for c in (config, more))
    assert second.gradients == 2 * plain.gradients and second.weights == plain.weights


def test_a_file_that_includes_another(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {path: m}\ndata: {path: d}\nrun: {seed: 3}\n")
    (tmp_path / "mine.yaml").write_text("include: base.yaml\nrun: {name: mine}\n")
    config = load_config(tmp_path / "mine.yaml", ["data.limit=5"])
    assert (config.run.name, config.run.seed, config.data.limit) == ("mine", 3, 5)
    (tmp_path / "base.yaml").write_text("include: mine.yaml\n")
    with pytest.raises(ConfigError, match="includes itself"):
        load_config(tmp_path / "mine.yaml")
    (tmp_path / "base.yaml").write_text("include: [a, b]\n")
    with pytest.raises(ConfigError, match="include must name one file"):
        load_config(tmp_path / "mine.yaml")
