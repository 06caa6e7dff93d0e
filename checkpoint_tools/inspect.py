"""What is in a checkpoint of either form: model, sizes, dtypes, layout, training state."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoint_tools.common import ModelFiles, open_checkpoint, run
from megatron_cgrpo.conversion.megatron_io import MegatronCheckpoint
from megatron_cgrpo.conversion.plan import parameter_count
from megatron_cgrpo.conversion.safetensors_io import nbytes, read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hf", type=Path, help="directory with config.json, if it is not inside")
    parser.add_argument("--tensors", action="store_true", help="also list every tensor")


def main(args: argparse.Namespace) -> int:
    """Print the report; the exit code."""
    model = open_checkpoint(args.directory, args.hf)
    specs, shape = model.specs(), model.shape
    dtypes = Counter(str(dtype).removeprefix("torch.") for g in specs for _, (_, dtype) in g)
    form = "Hugging Face" if isinstance(model, ModelFiles) else "megatron-core torch_dist"
    rows = {
        "form": form,
        "family": shape.family,
        "parameters": f"{parameter_count(shape):,}",
        "weights": f"{sum(map(nbytes, specs)) / 2**30:.3f} GiB",
        "tensors": f"{sum(map(len, specs))} ({', '.join(f'{n} {d}' for d, n in dtypes.items())})",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": f"{shape.heads} ({shape.kv_heads} KV) × {shape.head_dim}",
        "vocabulary": f"{shape.vocab}{' (tied)' if shape.tied else ''}",
    }
    if shape.experts:
        rows["experts"] = f"{shape.experts}, {shape.experts_per_token} a token"
    if isinstance(model, MegatronCheckpoint):
        rows |= _megatron_rows(model)
    else:
        rows["files"] = len({model.checkpoint.file_of(n) for g in specs for n, _ in g})
    for name, value in rows.items():
        print(f"{name:<16}{value}")
    if args.tensors:
        for name, (dims, dtype) in (item for group in specs for item in group):
            print(f"{name}  {list(dims)}  {str(dtype).removeprefix('torch.')}")
    return 0


def _megatron_rows(model: MegatronCheckpoint) -> dict[str, object]:
    stored = {
        k: m
        for k, m in model.metadata.state_dict_metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    optimizer = sum(
        math.prod(m.size) * m.properties.dtype.itemsize
        for k, m in stored.items()
        if k.startswith("optimizer.")
    )
    rows: dict[str, object] = {
        "files": len({w.relative_path for w in model.metadata.storage_data.values()}),
        "pieces": sum(len(m.chunks) for m in stored.values()),
        "optimizer state": f"{optimizer / 2**30:.3f} GiB" if optimizer else "none",
    }
    state = model.root / "run.json"
    if state.exists():
        run_state = read_json(state)
        rows |= {"step": run_state.get("step"), "weight version": run_state.get("version")}
        parallel = run_state.get("config", {}).get("parallel")
        if parallel:
            rows["layout"] = ", ".join(f"{k} {v}" for k, v in parallel.items() if v)
    return rows


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
