"""Weight transfer without GPUs: vLLM's protocol with files as its data plane.

The trainer writes buckets of whole tensors to files (in /dev/shm where there is one; in the run
directory for servers on several nodes) and names them in `update_weights`; the worker maps them and
loads. A bucket file is never written twice: vLLM's layerwise reload may hold on to mapped tensors
until a layer is complete. The files of the last push stay until the next one, so that a restarted
server can be brought up to date without the trainer's other ranks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_cgrpo.rollout.server import EngineError
from megatron_cgrpo.rollout.vllm_plugin import BACKEND


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the files are named in each update."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: a file and, per tensor, name, dtype, shape and byte offset."""

    path: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """The worker's side."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        self.model.load_weights(_read(update_info))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _repack(self.model)

    def shutdown(self) -> None:
        pass


def _read(info: ShmUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
    # A private mapping: the worker cannot change what other servers read.
    data = torch.from_file(
        info.path, shared=False, size=os.path.getsize(info.path), dtype=torch.uint8
    )
    for name, dtype_name, shape, offset in zip(
        info.names, info.dtype_names, info.shapes, info.offsets
    ):
        dtype = getattr(torch, dtype_name)
        count = int(torch.Size(shape).numel())
        view = data[offset : offset + count * dtype.itemsize].view(dtype)
        yield name, view.view(shape)


def _repack(model: torch.nn.Module) -> None:
    """vLLM 0.32 on the CPU: a tied lm_head keeps a packed copy of the old weights otherwise, and
    experts are packed at their first load only."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """The trainer's side; `bucket_bytes` bounds one file (or is exceeded by a single tensor),
    `directory` is for the files where shared memory is not shared enough."""

    backend: ClassVar[str] = BACKEND

    bucket_bytes: int
    directory: str | None = None


class ShmTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Rank 0 writes and announces buckets; every rank takes part in gathering the tensors."""

    init_info_cls = ShmTrainerInitInfo

    def __init__(
        self, *, client, source, is_sender: bool, bucket_bytes: int, directory: str | None = None
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._bucket_bytes, self._parent = bucket_bytes, directory
        self._directory: str | None = None
        self.sent: list[dict[str, Any]] = []
        """The update payloads of the last push, for replaying to a restarted server."""

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        engine = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            bucket_bytes=init_info.bucket_bytes,
            directory=init_info.directory,
        )
        if engine.is_sender:
            client.init_weight_transfer_engine(asdict(ShmInitInfo()))
        return engine

    def send_weights(self) -> None:
        """Gather, write and announce all weights.

        Whatever fails, the iteration goes on to its end: the other ranks are in its collectives.

        Raises:
            EngineError: at the end, when a bucket could not be written.
        """
        tensors = iter(self.source)
        try:
            if self.is_sender:
                self._send(tensors)
        except OSError as e:
            raise EngineError(f"cannot write weights to {self._directory}: {e}") from e
        finally:
            for _ in tensors:
                pass

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.shutdown()
        size = sum(nbytes(m) for m in self.source.metadata())
        self._directory = _new_directory(size, self._parent)
        self.client.start_weight_update()
        pending: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in tensors:
            if pending and size + tensor.nbytes > self._bucket_bytes:
                self.client.update_weights(self._write(pending))
                pending, size = [], 0
            pending.append((name, tensor))
            size += tensor.nbytes
        if pending:
            self.client.update_weights(self._write(pending))
        self.client.finish_weight_update()

    def _write(self, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        path = os.path.join(self._directory, f"bucket-{len(self.sent):04d}")
        offsets, at = [], 0
        with open(path, "wb") as f:
            for _, tensor in tensors:
                offsets.append(at)
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                f.write(data.numpy().data)
                # Views of any dtype need aligned offsets.
                padding = -data.numel() % 16
                f.write(b"\0" * padding)
                at += data.numel() + padding
        info = ShmUpdateInfo(
            path=path,
            names=[n for n, _ in tensors],
            dtype_names=[str(t.dtype).removeprefix("torch.") for _, t in tensors],
            shapes=[list(t.shape) for _, t in tensors],
            offsets=offsets,
        )
        self.sent.append(asdict(info))
        return self.sent[-1]

    def shutdown(self) -> None:
        """Delete the files of the last push."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory, self.sent = None, []


PREFIX = "cgrpo-weights-"


def _new_directory(size: int, parent: str | None) -> str:
    """An empty folder for one push: in `parent`, else in shared memory where there is room, else on
    disk.

    Folders of processes that are gone (killed before they could delete them) are removed.
    """
    if parent is not None:
        return tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    shm = "/dev/shm"
    root = tempfile.gettempdir()
    if os.path.isdir(shm):
        for name in os.listdir(shm):
            owner = name.removeprefix(PREFIX).partition("-")[0]
            if name.startswith(PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
                shutil.rmtree(os.path.join(shm, name), ignore_errors=True)
        if shutil.disk_usage(shm).free > size:
            root = shm
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root)


def nbytes(meta: ParamMeta) -> int:
    """Bytes of one tensor."""
    return meta.dtype.itemsize * torch.Size(meta.shape).numel()
