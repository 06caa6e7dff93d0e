"""Which fields a record keeps its question and answer in, by the names that are common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron_cgrpo.config.schema import Fields
from megatron_cgrpo.data.choices import LETTERS, lettered
from megatron_cgrpo.data.errors import DataError
from megatron_cgrpo.data.files import Record
from megatron_cgrpo.data.programs import program_problem
from megatron_cgrpo.data.records import (
    Messages,
    answer_of,
    chat_of,
    first,
    has,
    is_chat,
    lookup,
    name_of,
    text_of,
)
from megatron_cgrpo.types import Problem

QUESTION_FIELDS = (
    ("messages",),
    ("problem",),
    ("Body", "Question"),
    ("question",),
    ("Question",),
    ("input",),
    ("prompt",),
)
ANSWER_FIELDS = (
    "answer",
    "Answer",
    "expected_answer",
    "reward_model.ground_truth",
    "ground_truth",
    "target",
    "final_answer",
    "answerKey",
    "Correct Answer",
    "solution",
    "label",
)
ID_FIELDS = (
    "id",
    "ID",
    "idx",
    "unique_id",
    "task_id",
    "question_id",
    "Record ID",
    "extra_info.index",
)
OPTION_FIELDS = ("options", "choices")
GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True)
class Understood:
    """A record's problem, and where it was found in the record.

    Records with the same `asked` are the same prompt, with the same `answered` the same answer,
    however their options are shuffled.
    """

    problem: Problem
    layout: str
    asked: str
    answered: str


class Reader:
    """Turns records into problems.

    Args:
        fields: those that the user names; others are found by their names.
        kind: verifier of records that name none; records with options are multiple choice.
        shuffle_options: fixed by the problem's name. GPQA's, which begin with the right one,
            always are.
    """

    def __init__(self, fields: Fields, kind: str, shuffle_options: bool = True) -> None:
        self._fields, self._kind, self._shuffle = fields, kind, shuffle_options

    def understand(self, row: Record, where: str, fallback_id: str) -> Understood:
        """The problem of a record, and the layout that it has.

        Raises:
            DataError: one sentence with what is missing or not as it must be.
        """
        name = self._name(row, where, fallback_id)
        kind, meta = self._kind_of(row, where), _meta(row, where)
        if kind == "code" and not has(row, "messages") and not self._fields.question:
            try:
                question, answer, tests = program_problem(row, where)
            except ValueError as e:
                raise DataError(str(e)) from e
            user = {"role": "user", "content": question}
            problem = Problem(name, (user,), answer, kind, meta | tests)
            return _understood(problem, "program with tests", tests["tests"])
        messages, asked = self._messages(row, where)
        # Options that the default kind says nothing of.
        optional = kind == "math" and not has(row, "kind")
        options = self._options(row, where) if kind == "choice" or optional else None
        if options is not None:
            return self._choice(row, where, name, messages, meta, options, asked)
        field = self._answer_field(row, where)
        answer = answer_of(lookup(row, field), field, where, boxed=kind == "math")
        return _understood(Problem(name, messages, answer, kind, meta), f"{asked} → {field}")

    def _name(self, row: Record, where: str, fallback: str) -> str:
        field = self._fields.id or first(row, ID_FIELDS)
        if field is None or not has(row, field):
            return fallback
        return name_of(lookup(row, field), field, where) or fallback

    def _kind_of(self, row: Record, where: str) -> str:
        return text_of(row["kind"], "kind", where) if has(row, "kind") else self._kind

    def _messages(self, row: Record, where: str) -> tuple[Messages, str]:
        """The prompt, and the names of the fields that it is in."""
        names = self._fields.question
        names = (names,) if isinstance(names, str) else names
        if not names:
            found = [c for c in QUESTION_FIELDS if all(has(row, f) for f in c)]
            # Sets for fine-tuning keep whole conversations beside the question.
            if len(found) > 1 and found[0] == ("messages",) and _is_answered(row["messages"]):
                found = found[1:]
            names = found[0] if found else ()
        missing = [n for n in names if not has(row, n)]
        if not names or missing:
            raise DataError(
                f"{where} has no question ({', '.join(missing) or 'no known field'}); its fields "
                f"are {_names(row)}: name them with data.fields.question"
            )
        values = [lookup(row, n) for n in names]
        if names == ("messages",) or (len(values) == 1 and is_chat(values[0])):
            return chat_of(values[0], names[0], where), f"{names[0]} (chat)"
        text = " ".join(text_of(v, n, where) for v, n in zip(values, names))
        return ({"role": "user", "content": text},), " + ".join(names)

    def _answer_field(self, row: Record, where: str) -> str:
        empty = next((f for f in ANSWER_FIELDS if lookup(row, f) == ""), None)
        field = self._fields.answer or first(row, ANSWER_FIELDS) or empty
        if field is None or lookup(row, field) is None:
            raise DataError(
                f"{where} has no answer; its fields are {_names(row)}: name one with "
                "data.fields.answer"
            )
        return field

    def _options(self, row: Record, where: str) -> tuple[list[str], Any, bool] | None:
        """(texts, the gold's letter, index or text; whether their order is to be changed)."""
        if all(has(row, f) for f in GPQA) and not self._fields.answer:
            texts = [text_of(str(lookup(row, f)), f, where) for f in GPQA]
            return texts, 0, True
        field = first(row, OPTION_FIELDS)
        options = None if field is None else lookup(row, field)
        answer = lookup(row, self._answer_field(row, where)) if options else None
        if isinstance(options, dict) and isinstance(options.get("text"), (list, tuple)):
            # ARC: the labels may be numbers.
            labels = list(map(str, options.get("label") or ()))
            if str(answer) not in labels or len(labels) != len(options["text"]):
                raise DataError(f"{where}: the answer {answer!r} is none of the labels {labels}")
            return (
                _texts(options["text"], f"{field}.text", where),
                labels.index(str(answer)),
                (self._shuffle),
            )
        if options and not isinstance(options, (list, tuple)):
            raise DataError(f"{where}: {field} is no list of options")
        return (_texts(options, field, where), answer, self._shuffle) if options else None

    def _choice(
        self,
        row: Record,
        where: str,
        name: str,
        messages: Messages,
        meta: dict[str, Any],
        options: tuple[list[str], Any, bool],
        asked: str,
    ) -> Understood:
        texts, answer, shuffle = options
        try:
            question = messages[-1]["content"]
            text, letter, order = lettered(question, texts, answer, name if shuffle else None)
        except ValueError as e:
            raise DataError(f"{where}: {e}") from e
        lines = (*messages[:-1], {**messages[-1], "content": text})
        meta["option_order"] = order
        problem = Problem(name, lines, letter, "choice", meta)
        gold = texts[order[LETTERS.index(letter)]]
        return Understood(
            problem, f"{asked} with options", json.dumps([messages, sorted(texts)]), gold
        )


def _understood(problem: Problem, layout: str, answered: str | None = None) -> Understood:
    asked = json.dumps([problem.kind, problem.messages])
    return Understood(problem, layout, asked, problem.answer if answered is None else answered)


def _texts(options: Any, field: str, where: str) -> list[str]:
    out = []
    for i, option in enumerate(options):
        if isinstance(option, (dict, list, tuple)) or option is None:
            raise DataError(f"{where}: {field}[{i}] is no text")
        out.append(str(option))
    return out


def _meta(row: Record, where: str) -> dict[str, Any]:
    meta = row.get("meta")
    if meta is None or meta == "":
        meta = {}
    if not isinstance(meta, dict):
        raise DataError(f"{where}: meta is no mapping")
    source = row.get("data_source")
    meta = {**meta, "data_source": source} if isinstance(source, str) else dict(meta)
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as e:
        raise DataError(f"{where}: meta holds what JSON does not: {e}") from e
    return meta


def _is_answered(chat: Any) -> bool:
    return is_chat(chat) and bool(chat) and chat[-1].get("role") == "assistant"


def _names(row: Record) -> str:
    return ", ".join(sorted(map(str, row)))
