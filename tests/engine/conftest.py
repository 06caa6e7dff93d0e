from __future__ import annotations

import time

import psutil
import pytest

from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.studies.warm_start import shipped_policy
from megatron_cgrpo.worlds import chain
from tests.engine.engine_config import tiny_config


@pytest.fixture(scope="package")
def policy(tmp_path_factory):
    return shipped_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="package")
def fleet(policy, tmp_path_factory):
    """A server that tests only ask; when it is stopped, none of its processes may stay."""
    logs = tmp_path_factory.mktemp("logs")
    fleet = EngineFleet(tiny_config(policy), chain.CONTEXT, logs, "critic")
    fleet.start()
    try:
        fleet.wait_ready()
        process = psutil.Process(fleet.servers[0].process.pid)
        family = [process, *process.children(recursive=True)]
        assert len(family) > 1
        yield fleet
    finally:
        fleet.stop()
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != "zombie" for p in family):
        assert time.monotonic() < deadline, "a process of the engine survived stop()"
        time.sleep(0.1)
