"""The problems of a run: read, freed of what cannot be judged, and turned into prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.problems import read_problems, shown
from megatron_cgrpo.data.prompts import PromptBuilder, within_limit
from megatron_cgrpo.feedback.golds import unusable_golds
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.rollout.pipeline import Prompted
from megatron_cgrpo.training.record import Record
from megatron_cgrpo.types import Problem

EXCLUDED = "excluded.jsonl"
"""File of a run with the problems that cannot be judged."""
NAMED = 20


@dataclass(frozen=True)
class ProblemSets:
    """What is trained on, and what is validated on (nothing where no file is given).

    `notes` say what users should know of the files.
    """

    train: list[Problem]
    held_out: list[Problem]
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> set[str]:
        return {p.kind for p in self.train + self.held_out}

    def prompted(
        self, prompts: PromptBuilder, limit: int
    ) -> tuple[list[Prompted], list[Prompted], int]:
        """Both with their prompt ids, and how many problems had prompts over `limit` tokens."""
        train, dropped = within_limit(self.train, prompts, limit)
        held_out: list[Prompted] = []
        if self.held_out:
            held_out, more = within_limit(self.held_out, prompts, limit)
            dropped += more
        return train, held_out, dropped


def read_sets(config: Config) -> ProblemSets:
    """The problems of `data.path` and `validation.path`.

    Raises:
        DataError: for unusable files.
    """
    d, v = config.data, config.validation
    train = read_problems(d.path, d.fields, d.kind, d.limit, d.shuffle_options, d.keep_repeated)
    notes, held_out = train.notes(shown(d.path)), []
    if v.path is not None:
        # A benchmark stays as it is.
        read = read_problems(v.path, d.fields, d.kind, v.limit, d.shuffle_options, True)
        notes, held_out = notes + read.notes(shown(v.path)), read.problems
    return ProblemSets(train.problems, held_out, tuple(notes))


def without_unusable_golds(
    sets: ProblemSets,
    config: Config,
    pool: VerifierPool,
    run: Callable[[Coroutine[Any, Any, Any]], Any],
    record: Record,
    resumed: bool,
) -> ProblemSets:
    """Both sets without the problems that cannot be judged; those are named in EXCLUDED.

    A run that continues leaves out what it left out before: its place in the data counts the
    others.

    Args:
        run: runs a coroutine on the loop of the pool.

    Raises:
        ConfigError: when none is left of a set.
    """
    written = record.root / EXCLUDED
    paths = shown(config.data.path), shown(config.validation.path or "")
    if resumed and written.exists():
        rows = [json.loads(line) for line in written.read_text().splitlines()]
        out = {(r["file"], r["id"]) for r in rows}
        kept = (
            [p for p in problems if (path, p.id) not in out]
            for problems, path in zip((sets.train, sets.held_out), paths)
        )
        return ProblemSets(*kept)
    written.unlink(missing_ok=True)

    def usable(problems: list[Problem], path: str) -> list[Problem]:
        if not problems:
            return []
        with record.progress("gold answers", len(problems)) as advance:
            unusable = run(unusable_golds(pool, problems, advance))
        _name(unusable, path, written, record.warn)
        if len(unusable) == len(problems):
            raise ConfigError(
                f"no gold answer of {path} can be read by its verifier (first reason: "
                f"{next(iter(unusable.values()))}); is data.kind right?"
            )
        return [p for p in problems if p.id not in unusable]

    return ProblemSets(usable(sets.train, paths[0]), usable(sets.held_out, paths[1]))


def _name(unusable: dict[str, str], path: str, file: Path, warn: Callable[[str], None]) -> None:
    with open(file, "a", encoding="utf-8") as f:
        for name, why in unusable.items():
            f.write(json.dumps({"file": path, "id": name, "reason": why}) + "\n")
    if unusable:
        names = ", ".join(list(unusable)[:NAMED]) + (" …" if len(unusable) > NAMED else "")
        warn(
            f"excluded {len(unusable)} problems of {path}: their gold answers cannot be judged "
            f"against ({EXCLUDED}): {names}"
        )
