"""Directories that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

# Files beside the weights that make a directory loadable by transformers and vLLM.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


PARTIAL, OLD = "partial", "old"
"""Last parts of the names of directories that are being written, and replaced."""


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A temporary directory beside `target` that gets its name when the block ends well.

    What was at `target` goes only then. After an exception nothing is left of the new one.
    """
    partial, old = hidden_name(target, PARTIAL), hidden_name(target, OLD)
    if old.exists() and not target.exists():
        os.replace(old, target)  # killed between the two renames of `replace_directory`
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_files(partial)
        replace_directory(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_directory(complete: Path, target: Path) -> None:
    """Give a written directory its name; what had it goes only when the new one is there."""
    old = hidden_name(target, OLD)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(complete, target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def hidden_name(target: Path, state: str) -> Path:
    """The name beside `target` of a directory that is not (or no longer) whole."""
    return target.with_name(f".{target.name}.{state}")


def sync_files(directory: Path) -> None:
    """Have the disk hold everything in the directory before it gets the name of a whole one."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        # Some network file systems cannot do that for directories.
        if not (path.is_dir() and e.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)


def copy_companions(sources: Iterable[Path], target: Path) -> None:
    """Copy configuration and tokenizer files, each from the first directory that has it."""
    sources = list(sources)
    for file in COMPANIONS:
        found = next((s / file for s in sources if (s / file).exists()), None)
        if found:
            shutil.copyfile(found, target / file)
