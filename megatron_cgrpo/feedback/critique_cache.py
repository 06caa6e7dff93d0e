"""Critiques that were paid for, by content: a repeated step does not pay twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_cgrpo.feedback.chat_models import Reply


class CritiqueCache:
    """A file of replies. One that cannot be read or written is done without.

    Args:
        warn: told once when the file fails (full disk).
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._warn, self._path = warn, path
        self._file: sqlite3.Connection | None = None
        self._try(self._open)

    @staticmethod
    def key(*parts: Any) -> str:
        """Of everything that a reply depends on."""
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Reply | None:
        row = self._try(
            lambda: self._file.execute("SELECT reply FROM replies WHERE key = ?", [key]).fetchone()
        )
        try:
            return Reply(**json.loads(row[0])) if row else None
        except (TypeError, ValueError):
            return None  # of another release, or damaged: asked for again

    def put(self, key: str, reply: Reply) -> None:
        def write() -> None:
            with self._file:
                row = [key, json.dumps(asdict(reply))]
                self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", row)

        self._try(write)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        self._file = sqlite3.connect(self._path)
        # A critique that a power cut loses is asked for again: no wait for the disk.
        self._file.execute("PRAGMA synchronous = OFF")
        with self._file:
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)"
            )

    def _try(self, action: Callable[[], Any]) -> Any:
        if self._file is None and action != self._open:
            return None
        try:
            return action()
        except (sqlite3.Error, OSError) as e:
            self._warn(f"critiques are no longer kept: {self._path}: {e}")
            self.close()
            self._file = None
            return None
