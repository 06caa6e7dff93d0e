"""Dependencies between the packages point one way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_imports_follow_the_design():
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [tool], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:]
