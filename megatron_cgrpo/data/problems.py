"""Reading problems from JSONL and Parquet files as users have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_cgrpo.config.schema import Fields
from megatron_cgrpo.data.choices import OPTION_FIELDS, lettered
from megatron_cgrpo.data.programs import program_problem
from megatron_cgrpo.types import Problem

QUESTION_FIELDS = (
    ("problem",),
    ("Body", "Question"),
    ("question",),
    ("Question",),
    ("input",),
    ("prompt",),
)
ANSWER_FIELDS = ("answer", "Answer", "target", "final_answer", "solution", "label")
ID_FIELDS = ("id", "ID", "idx", "unique_id", "task_id", "question_id")


class DataError(ValueError):
    """A problem file that cannot be used; says which line or field."""


def load_problems(
    path: str | Path,
    fields: Fields,
    kind: str,
    limit: int | None = None,
    shuffle_options: bool = True,
) -> list[Problem]:
    """Problems of a .jsonl or .parquet file, in its order.

    Records of kind `choice` with `options` get lettered ones, shuffled by the problem's id;
    records of kind `code` are in HumanEval's or MBPP's form (`data.programs`).

    Raises:
        DataError: missing file, unknown suffix, a line that does not parse (its number is named),
            missing fields, duplicate ids, or no problem at all.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"data file {path} does not exist")
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown suffix {path.suffix!r}; use .jsonl or .parquet")
    problems, seen = [], set()
    for number, row in readers[path.suffix](path):
        if limit is not None and len(problems) >= limit:
            break
        where = f"{path}, record {number}"
        problem = _problem(row, fields, kind, where, str(number), shuffle_options)
        if problem.id in seen:
            raise DataError(f"{path}, record {number}: the id {problem.id!r} is used twice")
        seen.add(problem.id)
        problems.append(problem)
    if not problems:
        raise DataError(f"{path} holds no problems")
    return problems


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as e:
                raise DataError(f"{path}, line {number} is not valid JSON: {e.msg}") from e
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is not a JSON object")
            yield number, row


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as e:
        raise DataError(f"{path} is not a Parquet file: {e}") from e
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _problem(
    row: dict[str, Any],
    fields: Fields,
    kind: str,
    where: str,
    fallback_id: str,
    shuffle_options: bool,
) -> Problem:
    id_field = fields.id or next((f for f in ID_FIELDS if f in row), None)
    name = str(row[id_field]) if id_field and row.get(id_field) is not None else fallback_id
    kind, meta = str(row.get("kind", kind)), dict(row.get("meta") or {})
    if kind == "code" and "messages" not in row and not fields.question:
        try:
            question, answer, tests = program_problem(row, where)
        except ValueError as e:
            raise DataError(str(e)) from e
        user = {"role": "user", "content": question}
        return Problem(name, (user,), answer, kind, meta | tests)
    messages = row.get("messages")
    if messages is None or fields.question:
        messages = ({"role": "user", "content": _question(row, fields, where)},)
    answer_field = fields.answer or next((f for f in ANSWER_FIELDS if f in row), None)
    if answer_field is None or row.get(answer_field) is None:
        raise DataError(
            f"{where} has no answer; its fields are {sorted(row)}: name one with data.fields.answer"
        )
    answer = row[answer_field]
    options = next((row[f] for f in OPTION_FIELDS if row.get(f)), None)
    if kind == "choice" and options is not None:
        seed = name if shuffle_options else None
        try:
            text, answer, order = lettered(messages[-1]["content"], options, answer, seed)
        except ValueError as e:
            raise DataError(f"{where}: {e}") from e
        messages = (*messages[:-1], {**messages[-1], "content": text})
        meta["option_order"] = order
    return Problem(name, tuple(messages), normalize_answer(answer), kind, meta)


def _question(row: dict[str, Any], fields: Fields, where: str) -> str:
    names = fields.question
    if isinstance(names, str):
        names = (names,)
    if not names:
        names = next((c for c in QUESTION_FIELDS if all(f in row for f in c)), ())
    missing = [n for n in names if row.get(n) is None]
    if not names or missing:
        raise DataError(
            f"{where} has no question ({missing or 'no known field'}); its fields are "
            f"{sorted(row)}: name them with data.fields.question"
        )
    return " ".join(str(row[n]).strip() for n in names)


def normalize_answer(answer: Any) -> str:
    """The final answer as text: `27.0` is "27", GSM8K's "… #### 1,018" is "1018"."""
    if isinstance(answer, (list, tuple)):
        return ", ".join(normalize_answer(a) for a in answer)
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    text = str(answer).strip()
    _, mark, tail = text.rpartition("####")
    if mark:
        text = tail.strip().replace(",", "")
    return text
