"""A server's start, its guard, and its last words."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import psutil
import pytest
import requests

from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.rollout.server import EngineError
from megatron_cgrpo.worlds import chain
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


def test_every_route_needs_the_token(fleet):
    server = fleet.servers[0]
    for method, route in ROUTES:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = requests.request(method, server.url + route, headers=headers, timeout=10)
            assert answer.status_code == 401, route
    good = requests.get(f"{server.url}/v1/models", headers=server.headers, timeout=10)
    assert good.status_code == 200 and good.json()["data"][0]["id"] == "policy"
    assert server.token not in " ".join(psutil.Process(server.process.pid).cmdline())


def test_each_end_token_ends_a_response(fleet, policy, tmp_path):
    """The same server, asked by runs that end their responses at other tokens."""
    (tmp_path / "token").write_text(fleet.servers[0].token)
    there = {"urls": [fleet.servers[0].url], "token_file": str(tmp_path / "token")}
    prompt = tuple(chain.TOKENS.index(t) for t in ("<user>", "3", "+", "4", "<assistant>"))

    async def responses(**rollout):
        asked = EngineFleet(tiny_config(policy, rollout=there | rollout), chain.CONTEXT, tmp_path)
        try:
            options = {"n": 8, "temperature": 1.0, "seed": 1, "max_tokens": 40}
            return await asked.generate(prompt, **options)
        finally:
            await asked.close()

    end, equals, three = (chain.TOKENS.index(t) for t in ("<end>", "=", "3"))
    for ends in ([end], [equals], [three, equals]):
        given = {} if ends == [end] else {"stop_token_ids": ends}
        for c in asyncio.run(responses(**given)):
            assert c.finish_reason in ("stop", "length")
            stopped = [i for i in c.token_ids if i in ends]
            # Once, as the last token, which is trained but no part of the text.
            if c.finish_reason == "stop":
                assert stopped == [c.token_ids[-1]]
                assert chain.TOKENS[c.token_ids[-1]] not in c.text
            else:
                assert not stopped and len(c.token_ids) == 40


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
        os.kill(fleet.servers[0].process.pid, signal.SIGCONT)
        fleet.stop()
