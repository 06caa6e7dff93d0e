"""The trainer's YAML as far as a launcher must read it: includes and overrides, no validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class LaunchError(ValueError):
    """Unusable settings; one sentence says what to do."""


def resolve(path: str | Path, overrides: list[str] = ()) -> dict[str, Any]:
    """The configuration with its includes and `key.path=value` overrides.

    Raises:
        LaunchError: unreadable files, or overrides of another form.
    """
    raw = _read(Path(path), ())
    for item in overrides:
        key, sep, text = item.partition("=")
        if not sep:
            raise LaunchError(f"override {item!r} is not of the form key.path=value")
        node, parts = raw, key.split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise LaunchError(f"override {item!r}: {part!r} is a value, not a section")
        node[parts[-1]] = yaml.safe_load(text)
    return raw


def _read(path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in including:
        raise LaunchError(f"{path} includes itself")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as e:
        raise LaunchError(f"cannot read {path}: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise LaunchError(f"{path} must hold a mapping of sections")
    base = raw.pop("include", None)
    if base is None:
        return raw
    return _merged(_read(path.parent / base, (*including, path.resolve())), raw)


def _merged(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {k: _merged(base.get(k), v) for k, v in changes.items()}


def run_directory(config: dict[str, Any]) -> Path:
    """Where the run's files go: the same for every job that continues it.

    Raises:
        LaunchError: for a path that means something else on other nodes.
    """
    directory, name = str(option(config, "run.directory", "")), option(config, "run.name", "cgrpo")
    if not directory.startswith("/"):
        raise LaunchError(
            f"run.directory={directory!r} must be an absolute path that all nodes share "
            "(no ~: homes differ inside containers)"
        )
    if "/nemo_run" in f"{directory}/{name}":
        raise LaunchError(
            f"run.directory={directory!r}: NeMo-Run replaces /nemo_run wherever it stands in a "
            "job's script; choose another path"
        )
    return Path(directory) / str(name)


def option(config: dict[str, Any], path: str, default: Any) -> Any:
    """The value of `section.key`; the trainer's default where the file does not set it."""
    section, key = path.split(".")
    value = (config.get(section) or {}).get(key)
    return default if value is None else value
