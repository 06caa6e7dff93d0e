"""What the tools share: opening either form, progress, and the frame around a command."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.conversion.megatron_io import (
    COMPANION_FOLDER,
    MegatronCheckpoint,
    is_megatron,
)
from megatron_cgrpo.conversion.model_files import ModelFiles


def open_checkpoint(root: Path, hf: Path | None = None) -> ModelFiles | MegatronCheckpoint:
    """Either form, told apart by its files."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a directory")
    if not is_megatron(root):
        return ModelFiles(root)
    inside = (root / COMPANION_FOLDER / "config.json").exists()
    return MegatronCheckpoint(root, None if inside else hf)


def refuse_existing(out: Path, force: bool) -> None:
    """Raises ValueError when `out` is there and `--force` is not given."""
    if out.exists() and not force:
        raise ValueError(f"{out} exists; give --force to replace it")


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes; yields what to call with the bytes of each step."""
    columns = [TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def summary(nbytes: int, largest: int, start: float) -> str:
    """Seconds, rate and peak memory of this process."""
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{nbytes / 2**30:.2f} GiB in {seconds:.1f} s ({nbytes / 2**30 / seconds:.2f} GiB/s), "
        f"peak memory {peak:.2f} GiB (largest tensor {largest / 2**30:.2f} GiB)"
    )


def default_threads() -> int:
    return min(4, os.cpu_count() or 1)


def run(tool: ModuleType, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Parse, run and translate what a user can act on into one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog=prog, description=tool.__doc__)
    tool.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return tool.main(args)
    except (ConfigError, ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
