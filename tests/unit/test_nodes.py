"""Servers on several nodes without any: who runs which, what the nodes tell each other."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.config import ConfigError, parse_config
from megatron_cgrpo.rollout.nodes import Meeting, RemoteServer, check_nodes, servers_of
from megatron_cgrpo.rollout.server import EngineError
from megatron_cgrpo.training.directory import prepare_run_directory
from tests.unit.test_config import BASE


@given(servers=st.integers(1, 70), nodes=st.integers(1, 20))
def test_every_server_has_one_node(servers, nodes):
    dealt = [servers_of(n, servers, nodes) for n in range(nodes)]
    assert [i for mine in dealt for i in mine] == list(range(servers))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1 and dealt[0]


def config(**sections):
    return parse_config({**BASE, **sections})


def test_what_does_not_fit_the_nodes():
    colocated = {"placement": "colocated", "servers": 4, "tensor": 2}
    wide = config(parallel={"world_size": 8, "tensor": 2}, rollout=colocated)
    check_nodes(wide, 1)
    check_nodes(wide, 2)
    with pytest.raises(ConfigError, match="cannot be dealt out evenly over 8 nodes of 1 ranks"):
        check_nodes(wide, 8)
    split = {"placement": "split", "servers": 1, "gpus": [7]}
    apart = config(parallel={"world_size": 4}, rollout=split)
    check_nodes(apart, 1)
    with pytest.raises(ConfigError, match="nodes of their own"):
        check_nodes(apart, 2)
    check_nodes(config(rollout={"placement": "split", "servers": 4, "own_nodes": 2}), 1)
    critic = {"refiner": {"path": "p", "gpus": [4]}}
    beside = config(parallel={"world_size": 8}, rollout=colocated, feedback=critic)
    check_nodes(beside, 2)
    with pytest.raises(ConfigError, match=r"feedback.refiner.gpus \[4\] belong to the trainer"):
        check_nodes(beside, 1)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"placement": "colocated", "own_nodes": 1}, "do not share the trainer's GPUs"),
        ({"servers": 3, "own_nodes": 2}, "servers=3 does not divide over"),
        (
            {"placement": "split", "servers": 4, "own_nodes": 2, "gpus": [0]},
            "needs 2 GPU indices",
        ),
    ],
)
def test_settings_of_own_nodes(rollout, message):
    with pytest.raises(ConfigError, match=message):
        config(rollout=rollout)


def test_a_meeting_belongs_to_one_attempt(tmp_path):
    first, second = Meeting(tmp_path, "7-0"), Meeting(tmp_path, "7-1")
    assert first.token() is None and not first.closed and first.first_death() is None
    with pytest.raises(EngineError, match="not seen on this node"):
        first.wait_token(0.0)
    first.open("secret")
    first.announce(3, "http://a:1")
    first.mourn(3, "killed")
    first.close()
    assert (first.directory / "token").stat().st_mode & 0o777 == 0o600
    assert second.token() is None and second.url(3) is None and not second.closed
    second.open("other")
    assert second.wait_token(0.0) == "other" and first.token() is None
    assert second.url(3) is None and second.first_death() is None


def test_a_server_of_another_node(tmp_path):
    meeting = Meeting(tmp_path, "1-0")
    meeting.open("t")
    server = RemoteServer("server 0", "t", meeting=meeting, index=0)
    with pytest.raises(EngineError, match="was not started by its node within 0 s"):
        server.wait_ready(0.3)

    def node():
        time.sleep(0.3)
        meeting.announce(0, "http://127.0.0.2:9")
        time.sleep(0.3)
        meeting.mourn(0, "out of memory")

    thread = threading.Thread(target=node)
    thread.start()
    with pytest.raises(EngineError, match="out of memory"):
        server.wait_ready(30)
    thread.join()
    assert server.host == "127.0.0.2" and not server.alive()
    assert meeting.first_death() == "out of memory"


def test_overwriting_happens_once_and_spares_the_launcher(tmp_path):
    root = tmp_path / "r"
    (root / "slurm").mkdir(parents=True)
    for name in ("metrics.jsonl", "submitted.yaml", "config.yaml", "samples.jsonl"):
        (root / name).write_text("old")
    (root / "state").mkdir()
    run = {"directory": str(tmp_path), "name": "r", "overwrite": True}
    prepare_run_directory(config(run=run))
    left = {p.name for p in root.iterdir()}
    assert left == {"slurm", "submitted.yaml", "config.yaml"}
    assert (root / "config.yaml").read_text() != "old"
    (root / "state").mkdir()
    prepare_run_directory(config(run=run), again=True)
    assert (root / "state").exists()
