"""What the fields of a record mean: chats, questions, answers, names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cgrpo.data.boxes import boxes
from megatron_cgrpo.data.errors import DataError
from megatron_cgrpo.data.files import Record

ROLES = ("system", "user", "assistant")
Messages = tuple[dict[str, str], ...]
_ABSENT = object()
_GROUPED = re.compile(r"\D{0,3}\d{1,3}(?:,\d{3})+(?:\.\d+)?\D{0,3}")


def lookup(row: Record, path: str) -> Any:
    """The value of a field; `a.b.0` descends into mappings and lists. None where it is not."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part, _ABSENT)
        elif isinstance(value, (list, tuple)) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
        if value is _ABSENT:
            return None
    return value


def has(row: Record, path: str) -> bool:
    """Whether a field says anything: null and empty cells of a table do not."""
    value = lookup(row, path)
    return value is not None and value != ""


def first(row: Record, paths: Sequence[str]) -> str | None:
    """The first of these fields that says anything."""
    return next((p for p in paths if has(row, p)), None)


def is_chat(value: Any) -> bool:
    """Whether a field holds messages rather than text."""
    return isinstance(value, (list, tuple)) and all(isinstance(m, Mapping) for m in value)


def text_of(value: Any, field: str, where: str) -> str:
    """A field's text.

    Raises:
        DataError: for anything that is not text, or empty.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is {_described(value)}, not text")
    if not value.strip():
        raise DataError(f"{where}: {field} is empty")
    return _unicode(value, field, where).strip()


def _unicode(text: str, field: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DataError(f"{where}: {field} holds half of a character (a lone surrogate)") from e
    return text


def chat_of(value: Any, field: str, where: str) -> Messages:
    """A prompt as chat messages: the last is the user's.

    Raises:
        DataError: naming the message that is none, or what is missing.
    """
    if not is_chat(value):
        raise DataError(
            f"{where}: {field} is {_described(value)}, not a list of messages {{role, content}}"
        )
    if not value:
        raise DataError(f"{where}: {field} is an empty list of messages")
    messages = tuple(_message(m, f"{field}[{i}]", where) for i, m in enumerate(value))
    if messages[-1]["role"] != "user":
        raise DataError(
            f"{where}: {field} ends with a message of the {messages[-1]['role']}; a prompt ends "
            "with one of the user"
        )
    return messages


def _message(message: Mapping[str, Any], field: str, where: str) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: {field} has the role {role!r}; known: {', '.join(ROLES)}")
    if isinstance(content, (list, tuple)):
        content = _parts(content, field, where)
    if not isinstance(content, str):
        raise DataError(f"{where}: the content of {field} is {_described(content)}, not text")
    if not content.strip():
        raise DataError(f"{where}: the content of {field} is empty")
    return {"role": role, "content": _unicode(content, field, where)}


def _parts(parts: Sequence[Any], field: str, where: str) -> str:
    """Content in parts, of which only text is understood."""
    texts = []
    for part in parts:
        known = isinstance(part, Mapping) and part.get("type", "text") == "text"
        if not known or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: the content of {field} has a part that is not text")
        texts.append(part["text"])
    return "\n".join(texts)


def answer_of(value: Any, field: str, where: str, boxed: bool) -> str:
    """The final answer as text: `27.0` is "27", GSM8K's "… #### 1,018" is "1018".

    Args:
        boxed: of a whole solution, its last \\boxed{…} is the answer.

    Raises:
        DataError: for what is no answer: mappings, several values, NaN.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, tuple)):
        raise DataError(
            f"{where}: {field} is a list of {len(value)}: are they alternatives, or parts of one "
            "answer? Write the answer as one text"
        )
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{where}: {field} is {value}, not a number")
        return str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, int):
        # Not str(): it refuses numbers of thousands of digits.
        return format(value, "d") if abs(value) < 10**4000 else _too_long(field, where)
    # Empty ones are left out, and named, with all golds that cannot be judged against.
    text = text_of(value, field, where) if value != "" else ""
    _, mark, tail = text.rpartition("####")
    if mark:
        tail = tail.strip()
        return tail.replace(",", "") if _GROUPED.fullmatch(tail) else tail
    found = boxes(text) if boxed else []
    return found[-1][1] if found else text


def _too_long(field: str, where: str) -> str:
    raise DataError(f"{where}: {field} is a number with too many digits")


def name_of(value: Any, field: str, where: str) -> str:
    """A record's name: text or a whole number.

    Raises:
        DataError: for anything else.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise DataError(f"{where}: {field} is {_described(value)}, not a name")
    if isinstance(value, str):
        return _unicode(value, field, where).strip()
    return format(value, "d") if abs(value) < 10**100 else _too_long(field, where)


def _described(value: Any) -> str:
    names = {
        dict: "a mapping",
        list: "a list",
        tuple: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), f"of type {type(value).__name__}")
