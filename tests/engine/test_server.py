"""A server's start, its guard, and its last words."""

from __future__ import annotations

import os
import signal
import socket
import time

import psutil
import pytest
import requests

from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.rollout.server import EngineError
from tests.engine.engine_config import tiny_config
from tests.tiny import make_model

ROUTES = [
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/update_weights"),
    ("POST", "/pause"),
    ("POST", "/collective_rpc"),
    ("POST", "/sleep"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", True)


def test_every_route_needs_the_token_and_nothing_stays_behind(model, tmp_path):
    fleet = EngineFleet(tiny_config(model), 256, tmp_path)
    fleet.start()
    try:
        fleet.wait_ready()
        url = fleet.servers[0].url
        for method, route in ROUTES:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = requests.request(method, url + route, headers=headers, timeout=10)
                assert answer.status_code == 401, route
        good = requests.get(f"{url}/v1/models", headers=fleet.servers[0].headers, timeout=10)
        assert good.status_code == 200 and good.json()["data"][0]["id"] == "policy"
        process = psutil.Process(fleet.servers[0].process.pid)
        family = [process, *process.children(recursive=True)]
        assert len(family) > 1
        token = fleet.servers[0].token
        assert token not in " ".join(process.cmdline())
    finally:
        fleet.stop()
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != "zombie" for p in family):
        assert time.monotonic() < deadline, "a process of the engine survived stop()"
        time.sleep(0.1)


def test_a_server_that_does_not_start_tells_why(model, tmp_path):
    config = tiny_config(model, rollout={"extra_args": ("--no-such-option",)})
    fleet = EngineFleet(config, 256, tmp_path)
    fleet.start()
    with pytest.raises(EngineError, match="(?s)exited with code.*no-such-option"):
        fleet.wait_ready()
    fleet.stop()


def test_a_port_in_use_is_named(model, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        fleet = EngineFleet(tiny_config(model, rollout={"port": port}), 256, tmp_path)
        with pytest.raises(EngineError, match=f"port {port} .*in use"):
            fleet.start()


def test_start_timeout(model, tmp_path):
    config = tiny_config(model, rollout={"start_timeout_s": 1.0})
    fleet = EngineFleet(config, 256, tmp_path)
    fleet.start()
    try:
        os.kill(fleet.servers[0].process.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="not ready after 1 s"):
            fleet.wait_ready()
    finally:
        fleet.stop()
