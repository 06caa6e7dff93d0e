"""Checkpoint conversion against a plain copy of the same bytes, at the shapes of a large model.

    python -m benchmarks.conversion [--layers 3] [--directory DIR]

Writes a synthetic checkpoint with the shapes of Llama-3.1-70B and few layers (8.7 GiB at 3), then
measures in one run, each from a cold page cache and synced to disk at the end: a plain copy of the
files, HF → Megatron, a plain copy of the result, Megatron → HF. Checks that the way there and back
gives the same bits. Needs four times the checkpoint's size on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.plan import plan_for
from megatron_cgrpo.conversion.safetensors_io import write_hf

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}


def synthetic(root: Path, layers: int) -> Path:
    """A checkpoint of random bits (below infinity), one tensor at a time."""
    config = LLAMA_70B | {"num_hidden_layers": layers}
    source = root / "config"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    specs = {
        n: (dims, torch.bfloat16)
        for e in plan_for(shape_of(config))
        for n, dims in zip(e.hf_names, e.hf_shapes)
    }
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dims, _) in specs.items():
            yield (
                name,
                torch.empty(dims, dtype=torch.int16)
                .random_(0, 16000, generator=generator)
                .view(torch.bfloat16),
            )

    return write_hf(root / "hf", tensors(), [source], specs)


def forget(root: Path) -> None:
    """Take the files out of the page cache."""
    os.sync()
    for path in (p for p in root.rglob("*") if p.is_file()):
        with path.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> float:
    """Seconds for a plain copy, synced."""
    forget(source)
    start = time.perf_counter()
    for path in (p for p in source.rglob("*") if p.is_file()):
        out = target / path.relative_to(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out)
        with out.open("rb") as f:
            os.fsync(f.fileno())
    return time.perf_counter() - start


def convert(source: Path, *arguments: str) -> tuple[float, str]:
    """(seconds of a whole process, its last line)."""
    forget(source)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=True
    )
    return time.perf_counter() - start, done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        hf, megatron, back = root / "hf", root / "megatron", root / "back"
        synthetic(root, args.layers)
        size = sum(p.stat().st_size for p in hf.rglob("*")) / 2**30
        print(f"{size:.2f} GiB, largest tensor {2 * 128256 * 8192 / 2**30:.2f} GiB")
        rows = [("copy of the HF files", copy(hf, root / "copy"), "")]
        shutil.rmtree(root / "copy")
        there = ["checkpoint_tools.hf_to_megatron", "--hf", str(hf), "--out", str(megatron)]
        rows.append(("HF → Megatron", *convert(hf, *there)))
        rows.append(("copy of the Megatron files", copy(megatron, root / "copy"), ""))
        shutil.rmtree(root / "copy")
        here = ["checkpoint_tools.megatron_to_hf", "--megatron", str(megatron), "--out", str(back)]
        rows.append(("Megatron → HF", *convert(megatron, *here)))
        print(f"{'':<28}{'seconds':>9}{'GiB/s':>8}{'of a copy':>11}{'peak GiB':>10}")
        base = 0.0
        for name, seconds, line in rows:
            base = seconds if name.startswith("copy") else base
            peak = re.search(r"peak memory ([\d.]+)", line)
            print(
                f"{name:<28}{seconds:>9.1f}{size / seconds:>8.2f}{base / seconds:>11.2f}"
                f"{peak.group(1) if peak else '':>10}"
            )
        verify = ["checkpoint_tools.verify", str(hf), str(back), "--no-logits"]
        print(f"there and back: {convert(hf, *verify)[1]}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
