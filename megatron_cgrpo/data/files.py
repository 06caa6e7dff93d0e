"""Records of the files that people keep problems in."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_cgrpo.data.errors import DataError

Record = dict[str, Any]
Numbered = Iterator[tuple[str, Record]]
"""Records with where each stands: "line 3", "record 7"."""
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
# A field of a CSV file may hold a whole solution.
_LONGEST_FIELD = 1 << 27


def expand(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files and dataset directories; patterns with *, ? or [] stand for what they match, sorted.

    Raises:
        DataError: for a path or a pattern with nothing behind it.
    """
    out: list[Path] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        # A file may really be called so.
        found = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path), recursive=True))
        if not found:
            raise DataError(f"data file {path} does not exist")
        out += [Path(f) for f in found]
    return out


def records(path: Path) -> Numbered:
    """The records of one file or dataset directory, in order.

    .jsonl, .ndjson, .json (an array), .csv, each also with .gz; .parquet, .arrow, and directories
    that `datasets.save_to_disk` wrote.

    Raises:
        DataError: an unknown form, or content that is not of that form; the line or record is
            named.
    """
    try:
        if path.is_dir():
            yield from _saved_dataset(path)
            return
        suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if suffix.lower() in _TEXTS:
            yield from _text(path, _TEXTS[suffix.lower()])
        elif path.suffix.lower() in _TABLES:
            yield from _TABLES[path.suffix.lower()](path)
        else:
            known = ", ".join([*_TEXTS, *_TABLES])
            raise DataError(
                f"{path}: unknown suffix {path.suffix!r}; use one of {known} (the first four also "
                "with .gz), or a directory saved by datasets"
            )
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e


def _text(path: Path, parse: Callable[[TextIO, Path], Numbered]) -> Numbered:
    opener = gzip.open if path.suffix == ".gz" else open
    # A byte-order mark is no part of the text.
    with opener(path, "rt", encoding="utf-8-sig", newline="") as f:
        try:
            yield from parse(f, path)
        except UnicodeDecodeError as e:
            with opener(path, "rb") as raw:
                start = raw.read(2)
            guess = _MARKS.get(start, "Latin-1 or Windows-1252")
            raise DataError(
                f"{path} is not UTF-8 (byte 0x{e.object[e.start]:02x}); it looks like {guess}: "
                "convert it with `iconv -f … -t utf-8`"
            ) from e


def _jsonl(f: TextIO, path: Path) -> Numbered:
    for number, line in enumerate(f, 1):
        if line.strip():
            yield f"line {number}", _object(_json(line, f"{path}, line {number}"), path, number)


def _json_array(f: TextIO, path: Path) -> Numbered:
    whole = _json(f.read(), str(path))
    if not isinstance(whole, list):
        hint = "; name a file whose records are an array, or one record a line (.jsonl)"
        raise DataError(f"{path} holds {_kind(whole)}, not an array of records{hint}")
    for number, row in enumerate(whole, 1):
        yield f"record {number}", _object(row, path, number)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as e:
        raise DataError(f"{where} is nested too deeply") from e
    except ValueError as e:
        # Also a number with more digits than Python converts.
        line = f" (line {e.lineno})" if getattr(e, "lineno", 1) > 1 else ""
        raise DataError(f"{where} is not valid JSON{line}: {getattr(e, 'msg', e)}") from e


def _object(row: Any, path: Path, number: int) -> Record:
    if not isinstance(row, dict):
        raise DataError(f"{path}, record {number} is {_kind(row)}, not a JSON object")
    return row


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a text", type(None): "null"}
    return names.get(type(value), "a number")


def _csv(f: TextIO, path: Path) -> Numbered:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(f, strict=True)
    try:
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            raise DataError(f"{path}, line 1 names a field twice: {', '.join(names)}")
        for number, row in enumerate(reader, 1):
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, record {number} (line {reader.line_num}) has not as many fields as "
                    f"the {len(reader.fieldnames)} that the first line names"
                )
            yield f"record {number}", row
    except csv.Error as e:
        raise DataError(f"{path}, line {reader.line_num} is not valid CSV: {e}") from e


def _parquet(path: Path) -> Numbered:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _rows(file.iter_batches())
    except pyarrow.ArrowException as e:
        raise DataError(f"{path} is not a Parquet file: {_first_line(e)}") from e


def _arrow(path: Path) -> Numbered:
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as source:
            try:
                batches: Any = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                # The form for random access, with a footer.
                file = pyarrow.ipc.open_file(source)
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
            yield from _rows(batches)
    except pyarrow.ArrowException as e:
        raise DataError(f"{path} is not an Arrow file: {_first_line(e)}") from e


def _rows(batches: Any) -> Numbered:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"record {number}", row


def _saved_dataset(path: Path) -> Numbered:
    """A directory of `Dataset.save_to_disk`, or of a `DatasetDict` with a single split."""
    if (path / "dataset_dict.json").exists():
        listed = _json((path / "dataset_dict.json").read_text(encoding="utf-8"), str(path))
        splits = listed.get("splits") if isinstance(listed, dict) else None
        if not isinstance(splits, list) or len(splits) != 1:
            raise DataError(f"{path} holds the splits {splits}: name one, as {path}/train")
        path = path / str(splits[0])
    state = path / "state.json"
    if not state.exists():
        raise DataError(
            f"{path} is a directory, and none that `datasets` saved (no state.json): name its "
            f"files, as {path}/*.jsonl"
        )
    listed = _json(state.read_text(encoding="utf-8"), str(state))
    if not isinstance(listed, dict) or listed.get("_indices_data_files"):
        raise DataError(
            f"{path} was saved with a selection or an order of rows: flatten_indices() first"
        )
    files = [f.get("filename") for f in listed.get("_data_files") or [] if isinstance(f, dict)]
    if not files or not all(isinstance(name, str) for name in files):
        raise DataError(f"{state} names no data files")
    number = 0
    for name in files:
        for _, row in _arrow(path / name):
            number += 1
            yield f"record {number}", row


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_TEXTS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json_array, ".csv": _csv}
_TABLES = {".parquet": _parquet, ".arrow": _arrow}
