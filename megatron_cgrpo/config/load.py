"""Reading configurations: YAML file, then dotted overrides, then validation."""

from __future__ import annotations

import difflib
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config


def load_config(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read `path`, apply `key.path=value` overrides (values are YAML) and validate.

    A file with `include: FILE` (relative to it) changes the settings of that file.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key (the nearest valid one is named),
            value of a wrong type, or settings that contradict each other.
    """
    return parse_config(apply_overrides(_read(Path(path), ()), overrides), source=str(path))


def _read(path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in including:
        raise ConfigError(f"{path} includes itself")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as e:
        raise ConfigError(f"cannot read configuration {path}: {e.strerror}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(raw).__name__}")
    base = raw.pop("include", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError(f"{path}: include must name one file")
    return _merged(_read(path.parent / base, (*including, path.resolve())), raw)


def _merged(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {k: _merged(base.get(k), v) for k, v in changes.items()}


def apply_overrides(raw: dict[str, Any], overrides: list[str] = ()) -> dict[str, Any]:
    """A copy of `raw` with each `section.key=value` set; the value is parsed as YAML.

    Raises:
        ConfigError: an override without `=`, or one that descends into a scalar.
    """
    out = _copy(raw)
    for item in overrides:
        key, sep, text = item.partition("=")
        if not sep or not key.strip():
            raise ConfigError(f"override {item!r} is not of the form key.path=value")
        node, parts = out, key.strip().split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {item!r}: {part!r} is a value, not a section")
        try:
            node[parts[-1]] = yaml.safe_load(text)
        except yaml.YAMLError as e:
            raise ConfigError(f"override {item!r}: the value is not valid YAML") from e
    return out


def parse_config(raw: dict[str, Any], source: str = "configuration") -> Config:
    """Validate a plain dict.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    unknown = list(_unknown_keys(raw, Config, ""))
    if unknown:
        raise ConfigError(f"{source}: " + "; ".join(unknown))
    try:
        return Config.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(f"{source}: " + "; ".join(_sentence(err) for err in e.errors())) from e


def _copy(node: Any) -> Any:
    return {k: _copy(v) for k, v in node.items()} if isinstance(node, dict) else node


def _sentence(err: dict[str, Any]) -> str:
    where = ".".join(str(p) for p in err["loc"])
    message = err["msg"].removeprefix("Value error, ")
    got = f" (got {err['input']!r})" if where and not isinstance(err["input"], dict) else ""
    return f"{where}: {message}{got}" if where else message


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model class behind an annotation, `X | None` included."""
    options = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    return next((a for a in options if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _unknown_keys(raw: Any, model: type[BaseModel], prefix: str) -> typing.Iterator[str]:
    if not isinstance(raw, dict):
        return
    for key, value in raw.items():
        field = model.model_fields.get(key)
        if field is None:
            known = list(model.model_fields)
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix + near[0]!r}?" if near else f"known: {', '.join(known)}"
            yield f"unknown key {prefix + str(key)!r}; {hint}"
            continue
        section = section_of(field.annotation)
        if section is not None:
            yield from _unknown_keys(value, section, f"{prefix}{key}.")
