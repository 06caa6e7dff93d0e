"""megatron-core distributed checkpoints (`torch_dist`) without Megatron and without ranks.

The format is torch.distributed.checkpoint's: files of tensors and a pickled table of what lies
where. Tensors have global names and shapes (all layers of one parameter are one tensor), so the
layout that wrote them does not matter. Written and read here one parameter at a time.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megatron_cgrpo.conversion.budget import Budget, in_threads
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.directories import copy_companions, written_whole
from megatron_cgrpo.conversion.plan import Entry, check_tensors, plan_for
from megatron_cgrpo.conversion.safetensors_io import (
    HFCheckpoint,
    Spec,
    read_json,
    split_by_size,
)
from megatron_cgrpo.conversion.shape import ModelShape

COMPANION_FOLDER = "hf"
"""Folder of a Megatron checkpoint with the Hugging Face configuration and tokenizer."""
# What megatron-core's dist_checkpointing (0.16–0.19) writes and asks for.
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FILE_BYTES = 1 << 29
# What torch raises when the bytes of a tensor are not what was written.
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    AssertionError,
    KeyError,
    pickle.UnpicklingError,
)
_CONFIG, _COMMON = "metadata.json", "common.pt"


def is_megatron(root: Path) -> bool:
    """A directory that claims to be a distributed checkpoint."""
    return (root / _CONFIG).exists() or (root / ".metadata").exists()


class MegatronCheckpoint:
    """Hugging Face tensors out of a distributed checkpoint saved at any layout.

    Args:
        root: directory of the checkpoint, a converted one or a training checkpoint.
        hf: directory with config.json; default: the one inside the checkpoint.

    Raises:
        ValueError: no or damaged metadata, a missing file, or parameters that differ from the
            model's plan.
    """

    def __init__(self, root: str | Path, hf: str | Path | None = None) -> None:
        self.root = Path(root)
        self.companions = Path(hf) if hf else self.root / COMPANION_FOLDER
        config = self.companions / "config.json"
        if not config.exists():
            raise ValueError(
                f"{self.companions} holds no config.json; name its directory with --hf"
            )
        self.shape = shape_of(read_json(config))
        self.plan = plan_for(self.shape)
        self._reader = FileSystemReader(self.root)
        self.metadata = self._read_metadata()
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._check_parameters()
        self._chunks = self._chunks_by_index()

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._stored(entry).properties.dtype

    def specs(self) -> list[list[tuple[str, Spec]]]:
        """(HF name, (shape, dtype)) of every entry's tensors, in the plan's order."""
        return [
            [(n, (dims, self.dtype(e))) for n, dims in zip(e.hf_names, e.hf_shapes)]
            for e in self.plan
        ]

    def get(self, entry: Entry) -> list[torch.Tensor]:
        """The HF tensors of one entry.

        Raises:
            ValueError: naming the parameter whose data cannot be read.
        """
        region = _chunk(entry)
        # Only the chunks of this layer: a mixture has thousands under one name.
        stored = self._stored(entry)
        mine = TensorStorageMetadata(
            stored.properties, stored.size, self._chunks[entry.key][entry.index]
        )
        items = create_read_items_for_chunk_list(entry.key, mine, [region])
        whole = torch.empty(region.sizes, dtype=stored.properties.dtype)
        covered = sum(math.prod(i.lengths) for i in items)
        if covered != whole.numel():
            raise ValueError(f"{self.root} holds only a part of {entry.key} {entry.index}")
        try:
            self._reader.read_data(LoadPlan(items), _Into(whole))
        except _UNREADABLE as e:
            raise ValueError(f"{self.root}: cannot read {entry.key} {entry.index}: {e}") from e
        return entry.rule.split(whole.view(entry.stored_shape), self.shape)

    def _stored(self, entry: Entry) -> TensorStorageMetadata:
        return self.metadata.state_dict_metadata[entry.key]

    def _read_metadata(self) -> Metadata:
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError as e:
            raise ValueError(f"{self.root} is no complete distributed checkpoint: {e}") from e
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as e:
            raise ValueError(f"{self.root}/.metadata is damaged: {e}") from e
        ends: dict[str, int] = defaultdict(int)
        last: dict[str, str] = {}
        for index, where in metadata.storage_data.items():
            if where.offset + where.length > ends[where.relative_path]:
                ends[where.relative_path] = where.offset + where.length
                last[where.relative_path] = index.fqn
        for file, end in ends.items():
            path = self.root / file
            if not path.exists():
                raise ValueError(f"{path}, which holds {last[file]}, is not there")
            if path.stat().st_size < end:
                raise ValueError(f"{path} is cut: it ends before the end of {last[file]}")
        return metadata

    def _check_parameters(self) -> None:
        wanted = {e.key: (*e.outer, *e.stored_shape) for e in self.plan}
        found = {
            k: tuple(m.size)
            for k, m in self.metadata.state_dict_metadata.items()
            if isinstance(m, TensorStorageMetadata) and not k.startswith("optimizer.")
        }
        padded = {e.key for e in self.plan if e.rule.pads}
        for key, dims in wanted.items():
            if key not in found:
                raise ValueError(f"{self.root} lacks the parameter {key} {dims}")
            rows = found[key][0] if key in padded else dims[0]
            if found[key] != (rows, *dims[1:]) or rows < dims[0]:
                raise ValueError(
                    f"{self.root}: {key} has shape {found[key]}, expected {dims} by "
                    f"{self.companions / 'config.json'}"
                )
        # The last pipeline stage's copy of a tied embedding is saved under the embedding's name.
        for key in found:
            if key not in wanted:
                raise ValueError(
                    f"{self.root} has a parameter that the model has no place for: {key}"
                )

    def _chunks_by_index(self) -> dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]]:
        lead = {e.key: len(e.index) for e in self.plan}
        out: dict[str, dict] = {key: defaultdict(list) for key in lead}
        for key, count in lead.items():
            for chunk in self.metadata.state_dict_metadata[key].chunks:
                out[key][tuple(chunk.offsets[:count])].append(chunk)
        return out


class _Into(DefaultLoadPlanner):
    """Reads into one tensor, whose region begins at the entry's place."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self._whole = whole

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        out = self._whole
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            out = out.narrow(dim, start, length)
        return out

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def write_megatron(
    target: str | Path,
    source: HFCheckpoint,
    shape: ModelShape,
    companions: Iterable[Path],
    threads: int = 1,
    progress: Callable[[int], Any] = lambda done: None,
) -> Path:
    """Write a distributed checkpoint of the weights of a Hugging Face checkpoint, dtypes kept.

    Args:
        target: directory to create; one that is there is replaced once the new one is complete.
        threads: files written at once.
        progress: called with the bytes of each parameter written.

    Raises:
        ValueError: tensors that differ from the model's plan.
        OSError: the disk is full or not writable; nothing is left then.
    """
    target, plan = Path(target), plan_for(shape)
    check_tensors(plan, source.shapes(), source.root, shape, source.file_of)
    table = _table(plan, source)
    sizes = {e: math.prod(e.stored_shape) * table[e.key].properties.dtype.itemsize for e in plan}
    planner = _FromHF(plan, source, shape, progress)
    budget = Budget(2 * max(sizes.values()))
    with written_whole(target) as partial:
        writer = FileSystemWriter(partial)
        writer.set_up_storage_writer(is_coordinator=True)
        # The writer holds a tensor of each name until its file is complete: so, small files.
        files = [
            SavePlan([_write_item(e, table[e.key]) for e in group])
            for group in split_by_size(plan, sizes.__getitem__, FILE_BYTES)
        ]
        files = writer.prepare_global_plan([writer.prepare_local_plan(f) for f in files])

        def write(file: SavePlan) -> list[WriteResult]:
            held = [sizes[planner.entry(item)] for item in file.items]
            # Beside the tensors: one's parts, or its serialised form.
            with budget.hold(sum(held) + max(held)):
                return writer.write_data(file, planner).wait()

        try:
            results = in_threads(write, files, threads)
        except RuntimeError as e:
            # torch.save reports a full disk as a RuntimeError.
            raise OSError(f"cannot write {partial}: {e}") from e
        writer.finish(Metadata(state_dict_metadata=table), results)
        torch.save({}, partial / _COMMON)
        (partial / _CONFIG).write_text(json.dumps(BACKEND))
        (partial / COMPANION_FOLDER).mkdir()
        copy_companions(companions, partial / COMPANION_FOLDER)
    return target


class _FromHF(DefaultSavePlanner):
    """Makes each parameter when the writer asks for it."""

    def __init__(
        self,
        plan: list[Entry],
        source: HFCheckpoint,
        shape: ModelShape,
        progress: Callable[[int], Any],
    ) -> None:
        super().__init__()
        self._entries = {_at(e): e for e in plan}
        self._source, self._shape, self._progress = source, shape, progress

    def entry(self, write_item: WriteItem) -> Entry:
        return self._entries[write_item.index]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        entry = self.entry(write_item)
        whole = entry.rule.fuse([self._source.get(n) for n in entry.hf_names], self._shape)
        self._progress(whole.nbytes)
        return whole.view(*(1,) * len(entry.index), *entry.stored_shape)


def _chunk(entry: Entry) -> ChunkStorageMetadata:
    """Where an entry lies in the tensor of all layers."""
    dims = entry.stored_shape
    return ChunkStorageMetadata(
        torch.Size((*entry.index, *(0,) * len(dims))),
        torch.Size((*(1,) * len(entry.index), *dims)),
    )


def _at(entry: Entry) -> MetadataIndex:
    return MetadataIndex(entry.key, _chunk(entry).offsets)


def _write_item(entry: Entry, stored: TensorStorageMetadata) -> WriteItem:
    return WriteItem(
        index=_at(entry),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(_chunk(entry), stored.properties, stored.size),
    )


def _table(plan: list[Entry], source: HFCheckpoint) -> dict[str, TensorStorageMetadata]:
    """Global name → what the checkpoint holds under it."""
    specs, out = source.specs(), {}
    for entry in plan:
        dtypes = {specs[n][1] for n in entry.hf_names}
        if entry.key in out:
            dtypes.add(out[entry.key].properties.dtype)
        else:
            (first, *_) = dtypes
            size = torch.Size((*entry.outer, *entry.stored_shape))
            out[entry.key] = TensorStorageMetadata(TensorProperties(dtype=first), size, [])
        if len(dtypes) > 1:
            raise ValueError(
                f"{source.file_of(entry.hf_names[0])}: {entry.hf_names[0]} is of another dtype "
                "than the same tensor of other layers; a distributed checkpoint holds them as one"
            )
        out[entry.key].chunks.append(_chunk(entry))
    return out
