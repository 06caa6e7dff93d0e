"""megatron-core distributed checkpoint, saved at any layout → Hugging Face directory."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from checkpoint_tools.common import (
    default_threads,
    progress_bar,
    refuse_existing,
    run,
    summary,
)
from megatron_cgrpo.conversion.budget import Budget, in_threads
from megatron_cgrpo.conversion.megatron_io import MegatronCheckpoint
from megatron_cgrpo.conversion.safetensors_io import FILE_BYTES, hf_directory, nbytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megatron", type=Path, required=True, help="distributed checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="Hugging Face directory to write")
    parser.add_argument(
        "--hf",
        type=Path,
        help="directory with config.json and tokenizer; default: inside --megatron",
    )
    parser.add_argument("--force", action="store_true", help="replace what is at --out")
    parser.add_argument("--threads", type=int, default=default_threads(), help="files at once")
    parser.add_argument("--file-gb", type=float, default=FILE_BYTES / 1e9, help="size of one file")


def main(args: argparse.Namespace) -> int:
    """Convert; the exit code."""
    start = time.perf_counter()
    refuse_existing(args.out, args.force)
    source = MegatronCheckpoint(args.megatron, args.hf)
    specs = source.specs()
    by_name = {group[0][0]: entry for group, entry in zip(specs, source.plan)}
    sizes = [nbytes(group) for group in specs]
    budget = Budget(2 * max(sizes))
    with (
        progress_bar("Megatron → HF", sum(sizes)) as advance,
        hf_directory(args.out, specs, [source.companions], int(args.file_gb * 1e9)) as files,
    ):

        def tensors(index: int) -> Iterator[tuple[str, torch.Tensor]]:
            for group in files.files[index]:
                entry = by_name[group[0][0]]
                # What is read, beside the parameter it is copied into or the parts it is cut into.
                with budget.hold(2 * nbytes(group)):
                    parts = source.get(entry)
                    advance(nbytes(group))
                    yield from zip(entry.hf_names, parts)
                    del parts

        def write(index: int) -> None:
            # Closed also after an error: others wait for what it holds of the budget.
            with contextlib.closing(tensors(index)) as source_of_file:
                files.write_file(index, source_of_file)

        in_threads(write, range(len(files.files)), args.threads)
    print(f"{args.out}: {summary(sum(sizes), max(sizes), start)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
