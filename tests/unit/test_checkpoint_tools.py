"""The command-line tools: what they refuse, what they leave behind, what they report."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.common import run
from megatron_cgrpo.conversion.safetensors_io import INDEX, HFCheckpoint
from tests.tiny import make_model

ROOT = Path(__file__).parents[2]
PLAIN = "model.layers.1.self_attn.q_proj.weight"


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def tool(name: str, *arguments: object) -> Done:
    """A tool's whole command, in this process (importing torch takes seconds)."""
    out, err = io.StringIO(), io.StringIO()
    module = importlib.import_module(f"checkpoint_tools.{name}")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(module, [str(a) for a in arguments])
    return Done(code, out.getvalue(), err.getvalue())


def refused(done: Done, *parts: str) -> None:
    """Exit code 2 and one sentence that holds all the parts."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for part in parts:
        assert part in lines[0], (part, lines[0])


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """Two files with an index, as larger models have."""
    root = make_model(tmp_path_factory.mktemp("hf") / "model", "qwen3", False)
    tensors = load_file(root / "model.safetensors")
    (root / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:20]}
    parts["model-00002-of-00002.safetensors"] = names[20:]
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, root / file, metadata={"format": "pt"})
    places = {n: f for f, held in parts.items() for n in held}
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return root


@pytest.fixture(scope="module")
def megatron(hf, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("megatron") / "converted"
    done = tool("hf_to_megatron", "--hf", hf, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "GiB/s" in done.stdout and "peak memory" in done.stdout
    return out


@pytest.fixture
def broken(hf, tmp_path) -> Path:
    return Path(shutil.copytree(hf, tmp_path / "broken"))


def file_with(root: Path, name: str) -> Path:
    return root / json.loads((root / INDEX).read_text())["weight_map"][name]


def change(root: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Replace, add or (None) remove a tensor in the file that holds PLAIN."""
    path = file_with(root, PLAIN)
    tensors = load_file(path)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    index = json.loads((root / INDEX).read_text())
    index["weight_map"].pop(name, None)
    (root / INDEX).write_text(json.dumps(index))
    return path


def test_truncated_file(broken, tmp_path):
    path = file_with(broken, PLAIN)
    os.truncate(path, path.stat().st_size // 2)
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, str(path), "ends before the end of model.")
    assert not list(tmp_path.glob("*out*"))


def test_header_cut(broken, tmp_path):
    path = file_with(broken, PLAIN)
    os.truncate(path, 20)
    refused(tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out"), str(path), "header")


def test_missing_shard(broken, tmp_path):
    path = file_with(broken, PLAIN)
    path.unlink()
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, INDEX, path.name, "not there")


def test_index_names_absent_tensor(broken, tmp_path):
    index = json.loads((broken / INDEX).read_text())
    index["weight_map"]["model.absent"] = "model-00001-of-00002.safetensors"
    (broken / INDEX).write_text(json.dumps(index))
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, INDEX, "model.absent", "does not hold it")


def test_unsupported_family(broken, tmp_path):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neox"}))
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, "gpt_neox", "supported: llama, qwen2, qwen3, qwen3_moe")


def test_missing_tensor(broken, tmp_path):
    change(broken, PLAIN, None)
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, str(broken), f"lacks the tensor {PLAIN}")


def test_extra_tensor(broken, tmp_path):
    path = change(broken, "model.extra", torch.zeros(3))
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, str(path), "no place for: model.extra")


def test_wrong_shape(broken, tmp_path):
    path = change(broken, PLAIN, torch.zeros(3, 5))
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, str(path), PLAIN, "(3, 5)")


def test_mixed_dtypes(broken, tmp_path):
    path = change(broken, PLAIN, torch.zeros(128, 64, dtype=torch.bfloat16))
    done = tool("hf_to_megatron", "--hf", broken, "--out", tmp_path / "out")
    refused(done, path.name, "another dtype")
    assert not list(tmp_path.glob("*out*"))


def test_damaged_distributed_checkpoints(megatron, tmp_path):
    copy = Path(shutil.copytree(megatron, tmp_path / "copy"))
    data = next(copy.glob("*.distcp"))
    size = data.stat().st_size
    os.truncate(data, size - 100)
    refused(
        tool("megatron_to_hf", "--megatron", copy, "--out", tmp_path / "o"), str(data), "is cut"
    )
    data.unlink()
    refused(tool("megatron_to_hf", "--megatron", copy, "--out", tmp_path / "o"), str(data))
    (copy / ".metadata").write_bytes(b"no pickle")
    refused(tool("megatron_to_hf", "--megatron", copy, "--out", tmp_path / "o"), ".metadata")
    (copy / ".metadata").unlink()
    refused(tool("megatron_to_hf", "--megatron", copy, "--out", tmp_path / "o"), "no complete")
    assert not list(tmp_path.glob("*o"))


def test_another_models_config(megatron, tmp_path):
    other = make_model(tmp_path / "other", "qwen3", False, layers=2)
    done = tool("megatron_to_hf", "--megatron", megatron, "--out", tmp_path / "o", "--hf", other)
    refused(done, "decoder.layers.", "has shape (4, ", "expected (2, ")


def test_there_and_back(hf, megatron, tmp_path):
    out = tmp_path / "back"
    done = tool("megatron_to_hf", "--megatron", megatron, "--out", out, "--file-gb", "0.0003")
    assert done.returncode == 0, done.stderr
    places = json.loads((out / INDEX).read_text())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert sorted(set(places["weight_map"].values())) == files and len(files) > 2
    before, after = HFCheckpoint(hf), HFCheckpoint(out)
    assert before.specs() == after.specs()
    total = sum(t.nbytes for f in files for t in load_file(out / f).values())
    assert places["metadata"]["total_size"] == total
    assert sorted(p.name for p in hf.iterdir() if p.suffix != ".safetensors") == sorted(
        p.name for p in out.iterdir() if p.suffix != ".safetensors"
    )
    done = tool("verify", hf, out)
    assert done.returncode == 0 and "equal: 47 tensors" in done.stdout
    assert "logits differ by at most 0" in done.stdout


def test_files_beside_the_index_are_left_alone(broken):
    """As some publishers' consolidated.safetensors: the same weights under other names."""
    save_file({"layers.0.wq": torch.zeros(2)}, broken / "consolidated.safetensors")
    assert HFCheckpoint(broken).specs().keys().isdisjoint({"layers.0.wq"})
    shutil.copy(file_with(broken, PLAIN), broken / "twice.safetensors")
    (broken / INDEX).unlink()
    with pytest.raises(ValueError, match="both hold"):
        HFCheckpoint(broken)


def test_verify_names_the_first_difference(hf, megatron, broken):
    tensor = load_file(file_with(broken, PLAIN))[PLAIN].clone()
    tensor[3, 7] += 0.5
    change(broken, PLAIN, tensor)
    done = tool("verify", broken, megatron)
    assert done.returncode == 1
    assert f"different: {PLAIN}, by up to 0.5 at [3, 7]" in done.stdout
    gap = float(re.search(r"logits differ by at most (\S+)", done.stdout).group(1))
    assert gap > 0


def test_nothing_is_overwritten_without_force(hf, megatron, tmp_path):
    out = tmp_path / "kept"
    out.mkdir()
    (out / "mine").write_text("x")
    for name, source in (("hf_to_megatron", "--hf"), ("megatron_to_hf", "--megatron")):
        place = hf if source == "--hf" else megatron
        refused(tool(name, source, place, "--out", out), str(out), "--force")
    assert (out / "mine").exists()
    done = tool("megatron_to_hf", "--megatron", megatron, "--out", out, "--force")
    assert done.returncode == 0 and not (out / "mine").exists()


def test_inspect(hf, megatron):
    for root, form in ((hf, "Hugging Face"), (megatron, "torch_dist")):
        done = tool("inspect", root, "--tensors")
        assert done.returncode == 0, done.stderr
        assert form in done.stdout and "qwen3" in done.stdout
        assert f"{PLAIN}  [128, 64]  float32" in done.stdout
    refused(tool("inspect", hf.parent), "holds no config.json")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_conversion_leaves_nothing_that_looks_complete(tmp_path, how):
    big = make_model(tmp_path / "big", "llama", False, layers=40, hidden_size=512)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "checkpoint_tools.hf_to_megatron"]
    child = subprocess.Popen([*command, "--hf", big, "--out", out], cwd=ROOT, stdout=-3, stderr=-3)
    partial = tmp_path / ".out.partial"
    while child.poll() is None and not list(partial.glob("*.distcp")):
        time.sleep(0.002)
    child.send_signal(how)
    assert child.wait(60) != 0
    assert not out.exists()
    done = tool("hf_to_megatron", "--hf", big, "--out", out)
    assert done.returncode == 0, done.stderr
    assert not partial.exists() and tool("verify", big, out, "--no-logits").returncode == 0
