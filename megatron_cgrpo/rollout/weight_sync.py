"""From Megatron shards to the running engines, by vLLM's weight-transfer protocol.

One `MegatronSource` feeds all backends: ours through shared memory (`cpu`), vLLM's CUDA-IPC
(`colocated`, engines asleep while training) and NCCL (`split`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.policy.export import stream_hf
from megatron_cgrpo.policy.model import PolicyModel
from megatron_cgrpo.rollout import vllm_plugin
from megatron_cgrpo.rollout.fleet import ControlError, EngineFleet
from megatron_cgrpo.rollout.nodes import RemoteServer, own_address
from megatron_cgrpo.rollout.server import EngineError, EngineServer, free_port
from megatron_cgrpo.rollout.shm_transfer import ShmTrainerInitInfo, nbytes

# How long a broadcast may wait for an engine that has reported an error.
WATCHDOG_S = 60.0


class MegatronSource(WeightSource):
    """The policy's weights under Hugging Face names.

    Iteration is collective: tensors are gathered over the tensor-parallel group of their stage,
    one parameter at a time. Rank 0 gets every tensor; the other ranks yield None, or the tensor
    too with `everywhere` (CUDA-IPC needs a copy on each GPU).
    """

    def __init__(self, model: PolicyModel, everywhere: bool = False) -> None:
        self._model, self._everywhere = model, everywhere

    def metadata(self) -> list[ParamMeta]:
        dtype = self._model.config.params_dtype
        return [
            ParamMeta(name, dtype, tuple(dims))
            for entry in self._model.plan
            for name, dims in zip(entry.hf_names, entry.hf_shapes)
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return stream_hf(self._model, self._everywhere)


class _FleetClient:
    """vLLM's `VLLMWeightSyncClient` for all servers of a fleet at once.

    Never raises: vLLM's trainer engines would leave the collectives that the other ranks are in. A
    server that fails is left out of the rest of the push; `failed` and `error` tell afterwards.
    """

    def __init__(self, fleet: EngineFleet | None, on_error: Callable[[], None]) -> None:
        self._fleet, self._on_error = fleet, on_error
        self.begin()

    def begin(self) -> None:
        """Start a push with all servers."""
        self.targets = list(self._fleet.servers) if self._fleet else []
        self.failed: list[EngineServer] = []
        self.error: EngineError | None = None

    def call(self, path: str, body: Any = None) -> None:
        """A control route of the servers that have not failed yet."""
        try:
            self._fleet.control(path, body, self.targets)
        except ControlError as e:
            self.error = self.error or e
            self.failed += e.servers
            self.targets = [s for s in self.targets if s not in e.servers]
            self._on_error()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        tensor = self._fleet.config.rollout.tensor

        def body(index: int) -> dict[str, Any]:
            # NCCL: the workers of server i stand behind those of the servers before it.
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * tensor
            return {"init_info": info}

        self.call("init_weight_transfer_engine", body)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self.call("update_weights", {"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call(
            "finish_weight_update", {"weight_version": weight_version} if weight_version else None
        )


class WeightSync:
    """Pushes the policy's weights into the fleet. Built and called on every rank.

    Args:
        fleet: on rank 0, else None.
    """

    def __init__(self, config: Config, model: PolicyModel, fleet: EngineFleet | None) -> None:
        vllm_plugin.register()
        self._fleet, self._placement = fleet, config.rollout.placement
        self._watchdog: threading.Timer | None = None
        self.source = MegatronSource(model, everywhere=self._placement == "colocated")
        self._client = _FleetClient(fleet, self._watch)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            self._init_info(config), client=self._client, source=self.source
        )
        raise_together(self._client.error)
        if fleet is not None and self._placement == "cpu":
            fleet.resync = self._replay

    def _watch(self) -> None:
        """NCCL broadcasts have no time-out: one that waits for a failed engine ends the job."""
        if self._placement == "split" and self._watchdog is None:
            self._watchdog = threading.Timer(WATCHDOG_S, self._abort)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _abort(self) -> None:
        print(f"error: the weight push hangs on a failed engine: {self._client.error}", flush=True)
        os._exit(1)

    def _init_info(self, config: Config) -> TrainerInitInfo:
        rank, r = dist.get_rank(), config.rollout
        if self._placement == "cpu":
            remote = self._remote()
            shared = str(remote.meeting.directory) if remote else None
            return ShmTrainerInitInfo(rank=rank, bucket_bytes=r.bucket_mib << 20, directory=shared)
        if self._placement == "colocated":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            # vLLM refuses a tensor that is larger than its buffer.
            largest = max(nbytes(m) for m in self.source.metadata())
            size = max(r.bucket_mib << 20, largest)
            return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        remote = self._remote()
        address = own_address(remote.host) if remote else r.host
        return NCCLTrainerInitInfo(
            rank=rank,
            master_address=address,
            master_port=free_port(address) if rank == 0 else 0,
            world_size=1 + (len(r.urls) or r.servers) * r.tensor,
            packed_buffer_size_bytes=r.bucket_mib << 20,
        )

    def _remote(self) -> RemoteServer | None:
        """On rank 0: a server of another node, where there is one."""
        servers = self._fleet.servers if self._fleet else []
        return next((s for s in servers if isinstance(s, RemoteServer)), None)

    def push(self, version: int) -> dict[str, float]:
        """Bring all engines to these weights; returns seconds, bytes and GiB/s.

        A server that fails the update is restarted and brought up to date before it serves.

        Raises:
            EngineError: on every rank, when that is not possible.
        """
        start = time.perf_counter()
        if self._placement == "colocated":
            # What the trainer's allocator keeps cached stands in the engines' way.
            torch.cuda.empty_cache()
            dist.barrier()
        # Nobody enters the collectives of a push before all servers have answered.
        raise_together(self._attempt(self._begin))
        error: EngineError | None = None
        try:
            self._engine.send_weights()
        except EngineError as e:
            error = e
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        raise_together(self._attempt(lambda: self._settle(version, error)))
        seconds = time.perf_counter() - start
        size = sum(nbytes(m) for m in self.source.metadata())
        return {"seconds": seconds, "bytes": size, "gib_per_s": size / 2**30 / seconds}

    def _attempt(self, action: Callable[[], None]) -> EngineError | None:
        """Run on rank 0; its EngineError is returned."""
        if self._fleet is None:
            return None
        try:
            action()
        except EngineError as e:
            return e
        return None

    def _begin(self) -> None:
        self._fleet.repair(before_push=True)
        self._client.begin()
        if self._placement == "colocated":
            self._fleet.control("wake_up?tags=weights")
        else:
            self._fleet.control("pause?mode=keep")

    def _settle(self, version: int, error: EngineError | None) -> None:
        """Let updated servers serve again; restart the others and replay the push to them.

        A failed update leaves a server's weights undefined.
        """
        if error is not None:
            raise error
        self._release(version, self._client.call)
        self._fleet.updated(version, self._client.targets)
        if self._client.failed:
            self._fleet.set_aside(self._client.failed)
            self._fleet.repair()

    def _release(self, version: int, call: Callable[..., None]) -> None:
        if self._placement == "colocated":
            call("wake_up?tags=kv_cache")
        # Cached prefixes were computed with the old weights.
        call("reset_prefix_cache?reset_running_requests=true")
        call("update_weight_version", {"new_version": str(version)})
        if self._placement != "colocated":
            call("resume")

    def _replay(self, server: EngineServer) -> None:
        """The last push once more, to one server (shared memory only: its files are kept)."""

        def call(path: str, body: Any = None) -> None:
            self._fleet.control(path, body, [server])

        call("pause?mode=keep")
        call("init_weight_transfer_engine", {"init_info": {}})
        call("start_weight_update")
        for update in self._engine.sent:
            call("update_weights", {"update_info": update})
        call("finish_weight_update")
        self._release(self._fleet.version, call)

    def close(self) -> None:
        """Free what the backend holds (shared-memory files, communicators)."""
        self._engine.shutdown()


def raise_together(error: EngineError | None) -> None:
    """Rank 0's error on all ranks, so that none waits for the others in a collective."""
    message = [None if error is None else str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise EngineError(message[0]) from error
