"""From Megatron shards to the running engines, by vLLM's weight-transfer protocol.

One `MegatronSource` feeds all backends: ours through shared memory (`cpu`), vLLM's CUDA-IPC
(`colocated`, engines asleep while training) and NCCL (`split`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.policy.export import stream_hf
from megatron_cgrpo.policy.model import PolicyModel
from megatron_cgrpo.rollout import vllm_plugin
from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.rollout.server import EngineError, EngineServer, free_port


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

    def nbytes(self) -> int:
        """Bytes of one push."""
        return sum(m.dtype.itemsize * torch.Size(m.shape).numel() for m in self.metadata())


class _FleetClient:
    """vLLM's `VLLMWeightSyncClient` for all servers of a fleet at once."""

    def __init__(self, fleet: EngineFleet | None) -> None:
        self._fleet = fleet

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        tensor = self._fleet.config.rollout.tensor

        def body(index: int) -> dict[str, Any]:
            # NCCL: the workers of server i stand behind those of the servers before it.
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * tensor
            return {"init_info": info}

        self._fleet.control("init_weight_transfer_engine", body)

    def start_weight_update(self) -> None:
        self._fleet.control("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self._fleet.control(
            "update_weights", {"update_info": _json_safe_update_payload(update_info)}
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._fleet.control(
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
        self.source = MegatronSource(model, everywhere=self._placement == "colocated")
        self._engine = WeightTransferTrainerFactory.trainer_init(
            self._init_info(config), client=_FleetClient(fleet), source=self.source
        )
        if fleet is not None and self._placement == "cpu":
            fleet.resync = self._replay

    def _init_info(self, config: Config) -> TrainerInitInfo:
        rank, r = dist.get_rank(), config.rollout
        if self._placement == "cpu":
            from megatron_cgrpo.rollout.shm_transfer import ShmTrainerInitInfo

            return ShmTrainerInitInfo(rank=rank, bucket_bytes=r.bucket_mib << 20)
        if self._placement == "colocated":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(
                rank=rank, packed=True, packed_buffer_size_bytes=r.bucket_mib << 20
            )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=rank,
            master_address=r.host,
            master_port=free_port(r.host) if rank == 0 else 0,
            world_size=1 + max(len(r.urls), r.servers) * r.tensor,
            packed_buffer_size_bytes=r.bucket_mib << 20,
        )

    def push(self, version: int) -> dict[str, float]:
        """Bring all engines to these weights; returns seconds, bytes and GiB/s.

        A server that fails the update is restarted and brought up to date before it serves.

        Raises:
            EngineError: on every rank, when that is not possible.
        """
        start = time.perf_counter()
        error: Exception | None = None
        if self._fleet is not None:
            error = _attempt(self._fleet.mark_lost) or _attempt(self._begin)
        try:
            self._engine.send_weights()
        except EngineError as e:
            error = error or e
        if self._fleet is not None:
            self._fleet.version = version
            if error is not None:
                error = _attempt(self._recover)
            error = error or _attempt(lambda: self._finish(version))
        _raise_together(error)
        seconds = time.perf_counter() - start
        size = self.source.nbytes()
        return {"seconds": seconds, "bytes": size, "gib_per_s": size / 2**30 / seconds}

    def _begin(self) -> None:
        # With colocated engines nothing runs here: they have just been woken without requests.
        self._fleet.control("pause?mode=keep")

    def _finish(self, version: int, servers: list[EngineServer] | None = None) -> None:
        fleet = self._fleet
        if self._placement == "colocated":
            fleet.control("wake_up?tags=kv_cache", servers=servers)
        # Cached prefixes were computed with the old weights.
        fleet.control("reset_prefix_cache?reset_running_requests=true", servers=servers)
        fleet.control("update_weight_version", {"new_version": str(version)}, servers)
        fleet.control("resume", servers=servers)

    def _recover(self) -> None:
        """A failed update leaves a server's weights undefined: all are restarted and replayed."""
        if self._fleet.resync is None:
            raise EngineError("the weight push failed and this placement cannot replay it")
        self._fleet.drop_all()
        self._fleet.repair()

    def _replay(self, server: EngineServer) -> None:
        fleet, only = self._fleet, [server]
        fleet.control("pause?mode=keep", servers=only)
        fleet.control("init_weight_transfer_engine", {"init_info": {}}, only)
        fleet.control("start_weight_update", servers=only)
        for update in self._engine.sent:
            fleet.control("update_weights", {"update_info": update}, only)
        fleet.control("finish_weight_update", servers=only)
        self._finish(fleet.version, only)

    def close(self) -> None:
        """Free what the backend holds (shared-memory files, communicators)."""
        self._engine.shutdown()


def _attempt(action) -> Exception | None:
    try:
        action()
    except EngineError as e:
        return e
    return None


def _raise_together(error: Exception | None) -> None:
    """Rank 0's error on all ranks, so that none waits for the others in a collective."""
    message = [None if error is None else str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise EngineError(message[0]) from error
