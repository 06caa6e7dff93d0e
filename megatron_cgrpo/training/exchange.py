"""What rank 0 tells the other ranks: batches, errors, and whether to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_cgrpo.algorithm.batch import Batch
from megatron_cgrpo.policy.parallel import device
from megatron_cgrpo.process import STOP_SIGNALS

T = TypeVar("T")


class RankZeroFailed(RuntimeError):
    """Rank 0 failed between two collectives; its message is repeated on the other ranks."""


def share_batch(batch: Batch | None) -> Batch | None:
    """Rank 0's batch, or that it has none, on every rank. Collective."""
    columns = [f.name for f in fields(Batch)]
    header = [None]
    if batch is not None:
        header = [[(getattr(batch, c).dtype, getattr(batch, c).numel()) for c in columns]]
    dist.broadcast_object_list(header, src=0)
    if header[0] is None:
        return None
    received = {}
    for name, (dtype, size) in zip(columns, header[0]):
        # gloo and NCCL broadcast no booleans on every release: one byte each.
        wire = torch.uint8 if dtype == torch.bool else dtype
        tensor = torch.empty(size, dtype=wire, device=device())
        if batch is not None:
            tensor.copy_(getattr(batch, name))
        dist.broadcast(tensor, src=0)
        received[name] = tensor.to("cpu", dtype)
    return Batch(**received)


def on_rank_zero(action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 and return what it gives there, None elsewhere; its error is raised
    on every rank. Collective."""
    value, error = None, None
    if dist.get_rank() == 0:
        try:
            value = action()
        except Exception as e:
            error = e
    share_error(error)
    return value


def from_rank_zero(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; its error is raised everywhere. Collective."""
    value = [on_rank_zero(make)]
    dist.broadcast_object_list(value, src=0)
    return value[0]


def share_error(error: BaseException | None) -> None:
    """Raise rank 0's error everywhere, so that no rank waits for one that is gone."""
    message = [None if error is None else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(message, src=0)
    if error is not None:
        raise error
    if message[0] is not None:
        raise RankZeroFailed(message[0])


class StopSignal:
    """SIGINT, SIGTERM and SIGUSR1 ask for a stop after the current step; all ranks agree on it."""

    def __init__(self) -> None:
        self.asked = False
        for sig in STOP_SIGNALS:
            signal.signal(sig, lambda signum, frame: self.ask())

    def ask(self) -> None:
        """Ask all ranks to stop after the current step."""
        self.asked = True

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective."""
        flag = torch.tensor([int(self.asked)], device=device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
