"""Hugging Face directories: reading single tensors, writing complete ones, both as streams."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import torch

from megatron_cgrpo.conversion.directories import copy_companions, written_whole

INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
# As transformers' save_pretrained.
FILE_BYTES = 5_000_000_000

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_NAMES = {v: k for k, v in _DTYPES.items()}

T = TypeVar("T")
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class HFCheckpoint:
    """Tensors of a directory of safetensors files, read one at a time.

    Read with plain file reads: a memory map would count every page that was ever touched as this
    process's memory.

    Raises:
        ValueError: a file that is no complete safetensors file, or an index that names an absent
            file or tensor.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._where: dict[str, tuple[Path, Spec, int]] = {}
        index = self.root / INDEX
        places = _read_index(index) if index.exists() else {}
        for name, file in places.items():
            if not (self.root / file).exists():
                raise ValueError(f"{index} names {name} in {file}, which is not there")
        # Some publish the same weights once more in files of another form beside them.
        files = {self.root / f for f in places.values()} or self.root.glob("*.safetensors")
        for path in sorted(files):
            for name, (spec, offset) in _read_header(path).items():
                if name in self._where:
                    raise ValueError(f"{path} and {self.file_of(name)} both hold {name}")
                self._where[name] = (path, spec, offset)
        for name, file in places.items():
            if name not in self._where or self.file_of(name) != self.root / file:
                raise ValueError(f"{index} names {name} in {file}, which does not hold it")
        if not self._where:
            raise ValueError(f"{self.root} holds no tensors (*.safetensors)")

    def specs(self) -> dict[str, Spec]:
        return {n: spec for n, (_, spec, _) in self._where.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: spec[0] for n, (_, spec, _) in self._where.items()}

    def file_of(self, name: str) -> Path:
        return self._where[name][0]

    def get(self, name: str) -> torch.Tensor:
        path, (dims, dtype), offset = self._where[name]
        count = math.prod(dims) * dtype.itemsize
        data = np.fromfile(path, dtype=np.uint8, count=count, offset=offset)
        if len(data) != count:
            raise ValueError(f"{path} ends within {name}: it became shorter while it was read")
        return torch.from_numpy(data).view(dtype).view(dims)


def _read_header(path: Path) -> dict[str, tuple[Spec, int]]:
    """name → (spec, offset of the data in the file).

    Raises:
        ValueError: naming the first tensor that the file is too short for.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(8)
        if start == LFS_POINTER[:8]:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the weights: fetch them with `git lfs pull`"
            )
        length = int.from_bytes(start, "little")
        try:
            header = json.loads(f.read(length)) if 0 < length <= size - 8 else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a complete safetensors file: its header is cut or damaged")
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        code, dims, (start, end) = _header_entry(entry, name, path)
        if code not in _DTYPES:
            raise ValueError(f"{path}: {name} has the unsupported dtype {code}")
        dtype = _DTYPES[code]
        if 8 + length + end > size:
            raise ValueError(
                f"{path} is not a complete safetensors file: it ends before the end of {name}"
            )
        if end - start != math.prod(dims) * dtype.itemsize:
            raise ValueError(f"{path}: {name} has {end - start} bytes, not those of {dims} {dtype}")
        out[name] = ((dims, dtype), 8 + length + start)
    return out


def _header_entry(
    entry: object, name: str, path: Path
) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """(dtype code, shape, offsets) of a header's entry, whatever it holds."""
    fields = entry if isinstance(entry, dict) else {}
    code, dims, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))

    def sizes(value: object) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)

    if not isinstance(code, str) or not sizes(dims) or not sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{path} has a damaged header: the entry of {name}")
    return code, tuple(dims), (offsets[0], offsets[1])


def _read_index(path: Path) -> dict[str, str]:
    """Tensor → file.

    Raises:
        ValueError: when it is no such mapping.
    """
    index = read_json(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    names = [*places, *places.values()] if isinstance(places, dict) else [None]
    if not all(isinstance(n, str) and n for n in names):
        raise ValueError(f"{path} is damaged: it holds no weight_map of tensors and files")
    return places


def read_json(path: Path) -> dict:
    """A JSON file.

    Raises:
        ValueError: naming the file and the line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not valid JSON (line {e.lineno})") from e
    except (UnicodeDecodeError, RecursionError, ValueError) as e:
        raise ValueError(f"{path} is not valid JSON") from e


@contextlib.contextmanager
def hf_directory(
    target: Path,
    specs: Sequence[Sequence[tuple[str, Spec]]],
    companions: Iterable[Path],
    file_bytes: int = FILE_BYTES,
    end_token_ids: Sequence[int] = (),
) -> Iterator[HFFiles]:
    """A loadable directory that appears at `target` when its files have been written.

    Args:
        target: directory to create; one that is there is replaced once the new one is complete.
        specs: shape and dtype of every tensor, in the order of writing; an inner list stays in
            one file.
        companions: directories searched for configuration and tokenizer files, first hit wins.
        end_token_ids: recorded for whoever generates with the model; none: as the companions say.
    """
    with written_whole(target) as partial:
        files = HFFiles(partial, specs, file_bytes)
        yield files
        files.write_index()
        copy_companions(companions, partial)
        dtypes = {dtype for file in files.files for _, (_, dtype) in _flat(file)}
        _record_dtype(partial / "config.json", dtypes)
        if end_token_ids:
            _record_ends(partial / "generation_config.json", list(end_token_ids))


class HFFiles:
    """The safetensors files of one directory; written in any order, from several threads."""

    def __init__(self, root: Path, specs: Sequence[Sequence[tuple[str, Spec]]], limit: int) -> None:
        self.root = root
        self.files = split_by_size(specs, nbytes, limit)

    def name(self, index: int) -> str:
        many = len(self.files)
        return (
            "model.safetensors" if many == 1 else f"model-{index + 1:05d}-of-{many:05d}.safetensors"
        )

    def write_file(self, index: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the file `files[index]`; `tensors` yields its tensors in that order.

        Raises:
            OSError: the disk is full or not writable.
        """
        specs = _flat(self.files[index])
        path = self.root / self.name(index)
        with path.open("wb", buffering=0) as f:
            _write_all(f, _header(specs))
            source = iter(tensors)
            for name, (dims, dtype) in specs:
                got, tensor = next(source)
                if (got, tuple(tensor.shape), tensor.dtype) != (name, dims, dtype):
                    raise ValueError(f"{got} {tuple(tensor.shape)} came instead of {name} {dims}")
                flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
                _write_all(f, memoryview(flat.numpy()))
                # Gone before the next one is made: the budget counts one.
                del tensor, flat
            os.fsync(f.fileno())

    def write_index(self) -> None:
        """The index of several files; one file needs none."""
        if len(self.files) == 1:
            return
        places = {n: self.name(i) for i, file in enumerate(self.files) for n, _ in _flat(file)}
        total = sum(nbytes(group) for file in self.files for group in file)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (self.root / INDEX).write_text(json.dumps(index, indent=1))


def write_hf(
    target: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    companions: Iterable[Path],
    specs: dict[str, Spec] | None = None,
    end_token_ids: Sequence[int] = (),
) -> Path:
    """Write a loadable directory from one stream of tensors.

    Args:
        specs: of the tensors, in the order they come. None: read off the tensors, which are then
            all held in memory.
        end_token_ids: as `hf_directory`.

    Raises:
        OSError: the disk is full or not writable; nothing is left then.
    """
    if specs is None:
        tensors = list(tensors)
        specs = {n: (tuple(t.shape), t.dtype) for n, t in tensors}
    source = iter(tensors)
    target = Path(target)
    items = [[item] for item in specs.items()]
    with hf_directory(target, items, companions, end_token_ids=end_token_ids) as files:
        for i in range(len(files.files)):
            files.write_file(i, source)
    return target


def split_by_size(items: Iterable[T], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """Cut into runs of at most `limit` bytes (a larger item is a run by itself)."""
    runs: list[list[T]] = []
    room = 0
    for item in items:
        if not runs or size(item) > room:
            runs.append([])
            room = limit
        runs[-1].append(item)
        room -= size(item)
    return runs


def _flat(file: Sequence[Sequence[tuple[str, Spec]]]) -> list[tuple[str, Spec]]:
    return [item for group in file for item in group]


def nbytes(group: Sequence[tuple[str, Spec]]) -> int:
    """Bytes of some tensors."""
    return sum(math.prod(dims) * dtype.itemsize for _, (dims, dtype) in group)


def _header(specs: Sequence[tuple[str, Spec]]) -> bytes:
    """Length and JSON of the header (the library writes only files that it holds in memory)."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dims, dtype) in specs:
        end = offset + math.prod(dims) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(dims),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(f: BinaryIO, data: bytes | memoryview) -> None:
    """One `write` takes at most 2 GiB."""
    view = memoryview(data)
    while len(view):
        view = view[f.write(view) :]


def _record_dtype(config: Path, dtypes: set[torch.dtype]) -> None:
    """config.json must name the dtype of the tensors beside it, not that of where it came from."""
    if not config.exists() or len(dtypes) != 1:
        return
    settings = json.loads(config.read_text())
    # transformers 5 writes `dtype`, transformers 4 `torch_dtype`.
    key = "dtype" if "dtype" in settings else "torch_dtype"
    dtype = str(dtypes.pop()).removeprefix("torch.")
    if settings.get(key) != dtype:
        settings[key] = dtype
        config.write_text(json.dumps(settings, indent=2) + "\n")


def _record_ends(generation: Path, ids: list[int]) -> None:
    """generation_config.json must name every token that the model has learnt to end with."""
    settings = json.loads(generation.read_text()) if generation.exists() else {}
    named = settings.get("eos_token_id")
    if (named if isinstance(named, list) else [named]) != ids:
        settings["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        generation.write_text(json.dumps(settings, indent=2) + "\n")
