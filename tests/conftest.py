from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

# Property tests share two cores with engines and ranks: no deadline per example.
settings.register_profile("default", deadline=None, max_examples=60)
settings.load_profile("default")

# What breaks most shows first.
ROOMS = ("unit", "kernels", "distributed", "engine", "e2e", "launch")
SHARED = Path(__file__).parents[2] / "shared" / "benchmarks"


@pytest.fixture(scope="session")
def benchmarks() -> Path:
    """Real benchmark files, where the checkout has them beside it."""
    if not SHARED.is_dir():
        pytest.skip("no benchmark files beside the checkout")
    return SHARED


def _room(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).parts[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ROOMS.index(_room(item.nodeid)))


def pytest_terminal_summary(terminalreporter) -> None:
    """Where the time of a run went, by room."""
    seconds, tests = defaultdict(float), defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "when"):
                room = _room(report.nodeid)
                seconds[room] += report.duration
                tests[room] += report.when == "call"
    for room in seconds:
        terminalreporter.write_line(f"{room:<12} {tests[room]:>4} tests {seconds[room]:>7.0f} s")
