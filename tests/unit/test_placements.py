"""What can be checked of the GPU placements without a GPU: who is told what, in which order."""

from __future__ import annotations

import json
import threading
import time

import pytest

from megatron_cgrpo.config import parse_config
from megatron_cgrpo.rollout.fleet import POLICY, ControlError, EngineFleet
from megatron_cgrpo.rollout.server import EngineError, EngineServer, server_command
from megatron_cgrpo.rollout.server import server_environment as environment


def config(placement, **rollout):
    return parse_config(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "parallel": {"world_size": 4},
            "rollout": {"placement": placement, "servers": 2, "tensor": 2, **rollout},
        }
    )


class RecordingFleet(EngineFleet):
    """Control calls are written down; servers in `broken` fail on the routes given there."""

    def __init__(self, placement: str, broken: dict[str, set[int]] | None = None) -> None:
        rollout = {"gpus": (4, 5, 6, 7)} if placement == "split" else {}
        self.config = config(placement, **rollout)
        self.servers = [
            EngineServer(f"http://127.0.0.1:{9000 + i}", "t", command=["vllm"]) for i in range(2)
        ]
        self._ready, self._stale = [True, True], [False, False]
        self.version, self.restarts, self.resync = 0, 0, None
        self.name, self._pushed = POLICY, False
        self._repair_lock = threading.Lock()
        self.calls: list[tuple] = []
        self._broken = broken or {}

    def _control(self, server, path, body):
        index = self.servers.index(server)
        self.calls.append((path, index, body(index) if callable(body) else body))
        return "answered 500" if index in self._broken.get(path, ()) else None


@pytest.fixture
def client():
    from megatron_cgrpo.rollout.weight_sync import _FleetClient

    return lambda fleet, seen=None: _FleetClient(fleet, lambda: seen is not None and seen.append(1))


def test_nccl_workers_get_disjoint_ranks(client):
    fleet = RecordingFleet("split")
    client(fleet).init_weight_transfer_engine({"rank_offset": 1, "world_size": 5})
    offsets = {i: body["init_info"]["rank_offset"] for _, i, body in fleet.calls}
    assert offsets == {0: 1, 1: 3}


def test_a_failing_server_is_left_out_and_nothing_is_raised(client):
    seen = []
    fleet = RecordingFleet("split", {"update_weights": {1}})
    c = client(fleet, seen)
    c.start_weight_update()
    c.update_weights({"names": []})
    c.update_weights({"names": []})
    c.finish_weight_update()
    assert [(p, i) for p, i, _ in fleet.calls if i == 1] == [
        ("start_weight_update", 1),
        ("update_weights", 1),
    ]
    assert c.failed == [fleet.servers[1]] and c.targets == [fleet.servers[0]]
    assert isinstance(c.error, EngineError) and seen == [1]
    c.begin()
    assert c.targets == fleet.servers and c.error is None


def test_control_names_every_server_that_failed():
    fleet = RecordingFleet("cpu", {"pause": {0, 1}})
    with pytest.raises(ControlError, match=r"9000/pause.*9001/pause") as e:
        fleet.control("pause")
    assert e.value.servers == fleet.servers


@pytest.mark.parametrize(
    ("placement", "before", "after"),
    [
        (
            "colocated",
            ["wake_up?tags=weights"],
            ["wake_up?tags=kv_cache", "reset_prefix_cache", "update_weight_version"],
        ),
        ("split", ["pause"], ["reset_prefix_cache", "update_weight_version", "resume"]),
        ("cpu", ["pause"], ["reset_prefix_cache", "update_weight_version", "resume"]),
    ],
)
def test_order_around_a_push(placement, before, after, client):
    from megatron_cgrpo.rollout.weight_sync import WeightSync

    fleet = RecordingFleet(placement)
    sync = WeightSync.__new__(WeightSync)
    sync._fleet, sync._placement, sync._client = fleet, placement, client(fleet)
    sync._begin()
    began = len(fleet.calls)
    sync._settle(7, None)
    told = [p.split("?mode")[0].split("?reset")[0] for p, i, _ in fleet.calls if i == 0]
    assert told == before + after and began == 2 * len(before)
    assert fleet.version == 7
    assert {"new_version": "7"} in [body for _, _, body in fleet.calls]


def test_engines_get_their_own_gpus_of_those_given(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    split = config("split", gpus=(4, 5, 6, 7))
    assert [environment(split, "t", i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    assert environment(split, "t", 1)["CUDA_VISIBLE_DEVICES"] == "14,15"
    together = config("colocated")
    assert environment(together, "t", 0)["CUDA_VISIBLE_DEVICES"] == "8,9"
    assert environment(together, "t", 0)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "WORLD_SIZE" not in environment(together, "t", 0)


@pytest.mark.parametrize(("placement", "backend"), [("cpu", "cgrpo_shm"), ("colocated", "ipc")])
def test_commands_choose_the_backend(placement, backend):
    command = server_command(config(placement), 1024, 9000)
    chosen = command[command.index("--weight-transfer-config") + 1]
    assert json.loads(chosen) == {"backend": backend}
    assert ("--enable-sleep-mode" in command) == (placement == "colocated")
    assert "processed_logprobs" in command


def test_a_repair_and_a_push_do_not_meet():
    """The push waits for a repair that still runs in the background."""
    fleet = RecordingFleet("cpu")
    order = []

    def slow(before_push):
        order.append(("begin", before_push))
        time.sleep(0.2)
        order.append(("end", before_push))

    fleet._repair = slow
    background = threading.Thread(target=fleet.repair)
    background.start()
    time.sleep(0.05)
    fleet.repair(before_push=True)
    background.join()
    assert order == [("begin", False), ("end", False), ("begin", True), ("end", True)]


def test_a_dead_engine_of_a_split_job_ends_it():
    fleet = RecordingFleet("split")
    fleet._ready = [True, False]
    with pytest.raises(EngineError, match="9001 died"):
        fleet.repair(before_push=True)
