"""Reading the problems of a run: every file, every layout, each problem once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_cgrpo.config.schema import Fields
from megatron_cgrpo.data.errors import DataError
from megatron_cgrpo.data.files import expand, records
from megatron_cgrpo.data.layouts import Reader
from megatron_cgrpo.types import Problem

Paths = str | Path | Sequence[str | Path]
NAMED = 10
"""Names that a note lists before it breaks off."""


@dataclass
class Reading:
    """What was read.

    `layouts` counts the records by the fields that their question and answer were found in;
    `repeated` those with prompt and answer of an earlier one, `renamed` those whose id was used
    before; `conflicts` are pairs of ids with the same prompt and different answers.
    """

    problems: list[Problem] = field(default_factory=list)
    layouts: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    renamed: list[str] = field(default_factory=list)
    conflicts: list[tuple[str, str]] = field(default_factory=list)

    def notes(self, source: str) -> list[str]:
        """What users should know, one sentence each."""
        out = []
        if self.repeated:
            out.append(f"{source}: {self.repeated} records repeat the prompt and answer of others")
        if self.renamed:
            out.append(
                f"{source}: {len(self.renamed)} records have an id that was used before; they are "
                f"called {_some(self.renamed)}"
            )
        if self.conflicts:
            pairs = _some([" and ".join(pair) for pair in self.conflicts])
            out.append(f"{source}: the same prompt with different answers: {pairs}")
        return out


def shown(paths: Paths) -> str:
    """Paths as users are told of them."""
    return str(paths) if isinstance(paths, (str, Path)) else ", ".join(map(str, paths))


def read_problems(
    paths: Paths,
    fields: Fields,
    kind: str,
    limit: int | None = None,
    shuffle_options: bool = True,
    keep_repeated: bool = False,
) -> Reading:
    """The problems of these files, in their order.

    Records of kind `choice`, and those with options, get lettered ones (`data.choices`); records
    of kind `code` are in HumanEval's or MBPP's form (`data.programs`).

    Args:
        paths: files, patterns, dataset directories (`data.files`).
        limit: only the first so many problems.
        keep_repeated: problems with the prompt and answer of an earlier one stay.

    Raises:
        DataError: one sentence with file, record and field; also when there is no problem at all.
    """
    files, reader, out = expand(paths), Reader(fields, kind, shuffle_options), Reading()
    names: set[str] = set()
    answers: dict[str, dict[str, str]] = {}
    """Prompt → answer → id of the first problem that has both."""
    for path in files:
        for place, row in records(path):
            if limit is not None and len(out.problems) >= limit:
                return out
            number = place.split()[-1]
            fallback = number if len(files) == 1 else f"{_stem(path)}-{number}"
            understood = reader.understand(row, f"{path}, {place}", fallback)
            out.layouts[understood.layout] += 1
            known = answers.setdefault(understood.asked, {})
            if understood.answered in known:
                out.repeated += 1
                if not keep_repeated:
                    continue
            problem = understood.problem
            if problem.id in names:
                problem = replace(problem, id=_unused(f"{_stem(path)}-{number}", names))
                out.renamed.append(problem.id)
            if known and understood.answered not in known:
                out.conflicts.append((next(iter(known.values())), problem.id))
            known.setdefault(understood.answered, problem.id)
            names.add(problem.id)
            out.problems.append(problem)
    if not out.problems:
        raise DataError(f"{shown(paths)} holds no problems")
    return out


def _unused(name: str, names: set[str]) -> str:
    """A name like this one that is not taken."""
    tries = (name, *(f"{name}-{i}" for i in range(2, len(names) + 3)))
    return next(n for n in tries if n not in names)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (" …" if len(names) > NAMED else "")
