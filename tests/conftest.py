from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Property tests share two cores with engines and ranks: no deadline per example.
settings.register_profile("default", deadline=None, max_examples=60)
settings.load_profile("default")

SHARED = Path(__file__).parents[2] / "shared" / "benchmarks"


@pytest.fixture(scope="session")
def benchmarks() -> Path:
    """Real benchmark files, where the checkout has them beside it."""
    if not SHARED.is_dir():
        pytest.skip("no benchmark files beside the checkout")
    return SHARED
