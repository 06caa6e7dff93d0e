"""Hugging Face safetensors → megatron-core distributed checkpoint, loadable at any layout."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from checkpoint_tools.common import (
    ModelFiles,
    default_threads,
    progress_bar,
    refuse_existing,
    run,
    summary,
)
from megatron_cgrpo.conversion.megatron_io import write_megatron
from megatron_cgrpo.conversion.safetensors_io import nbytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--force", action="store_true", help="replace what is at --out")
    parser.add_argument("--threads", type=int, default=default_threads(), help="files at once")


def main(args: argparse.Namespace) -> int:
    """Convert; the exit code."""
    start = time.perf_counter()
    refuse_existing(args.out, args.force)
    model = ModelFiles(args.hf)
    sizes = [nbytes(group) for group in model.specs()]
    with progress_bar("HF → Megatron", sum(sizes)) as advance:
        write_megatron(args.out, model.checkpoint, model.shape, [args.hf], args.threads, advance)
    print(f"{args.out}: {summary(sum(sizes), max(sizes), start)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
