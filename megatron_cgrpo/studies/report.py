"""How a study in the chain world shows its result: a table, a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def write_csv(path: Path, rows: Rows) -> None:
    """One line a row; the first row names the columns."""
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def print_rows(title: str, rows: Rows) -> None:
    """The same as a table on the console."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*("–" if v is None else str(v) for v in row.values()))
    Console().print(table)


def plot_bars(path: Path, title: str, rows: Rows, label: str, columns: Sequence[str]) -> None:
    """Groups of bars in per cent, one group a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / len(columns)
    for i, column in enumerate(columns):
        places = [j + (i - (len(columns) - 1) / 2) * width for j in range(len(rows))]
        bars = axes.bar(places, [r[column] or 0.0 for r in rows], width, label=column)
        axes.bar_label(bars, ["" if r[column] is None else f"{r[column]:g}" for r in rows], size=7)
    axes.set_xticks(range(len(rows)), [str(r[label]) for r in rows])
    axes.set(ylabel="%", ylim=(0, 110), title=title)
    axes.legend(frameon=False, ncols=len(columns), loc="upper left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
