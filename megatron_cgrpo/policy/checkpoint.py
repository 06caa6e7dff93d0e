"""Training state as a megatron-core distributed checkpoint (`torch_dist`), loadable at any layout.

A checkpoint is written under a temporary name and renamed when it is complete; `latest` only ever
names a complete one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cgrpo.conversion.directories import copy_companions
from megatron_cgrpo.conversion.megatron_io import COMPANION_FOLDER
from megatron_cgrpo.policy import cpu
from megatron_cgrpo.policy.actor import MegatronActor
from megatron_cgrpo.policy.states import is_complete, partial_name, publish, sweep
from megatron_cgrpo.policy.weights import sharding_metadata
from megatron_cgrpo.process import forks_die_with_parent, stop_signals_held


class CheckpointError(OSError):
    """A checkpoint could not be written (full disk); the same on every rank."""


class StateSaver:
    """Writes training checkpoints of one actor. Every method is collective.

    Args:
        root: folder of the checkpoints.
        keep: number of newest checkpoints that stay, beside the best by validation.
        background: write in forked processes while training goes on (megatron-core's async save).
    """

    def __init__(self, actor: MegatronActor, root: Path, keep: int, background: bool = False):
        self._actor, self._root, self._keep = actor, root, keep
        # A persistent worker of megatron-core 0.16 crashes without CUDA.
        self._queue = AsyncCallsQueue(persistent=False) if background else None
        self._partial = root
        _on_rank_zero(lambda: sweep(root))

    def save(self, step: int, run_state: dict[str, Any]) -> None:
        """Write `root`/step_N and point `latest` at it; in the background, begin to.

        Args:
            run_state: what rank 0 wants back besides the actor's state (JSON).

        Raises:
            CheckpointError: on every rank when the disk is full or not writable, or when what was
                still being written failed; nothing of it is left and what was complete stays.
        """
        self.wait()
        target = self._root / f"step_{step:06d}"
        partial = self._partial = partial_name(target)
        with self._all_or_nothing(), cpu.cuda_names(), forks_die_with_parent(), stop_signals_held():
            _on_rank_zero(lambda: _make_anew(partial))
            request = dist_checkpointing.save(
                _sharded_state(self._actor, loading=False),
                str(partial),
                async_sharded_save=self._queue is not None,
            )
            if self._queue is None:
                self._publish(partial, target, run_state)
            else:
                request.add_finalize_fn(lambda: self._publish(partial, target, run_state))
                self._queue.schedule_async_request(request)

    def poll(self, blocking: bool = False) -> None:
        """Publish what has been written in the background meanwhile.

        Raises:
            CheckpointError: as `save`.
        """
        if self._queue is not None:
            with self._all_or_nothing():
                self._queue.maybe_finalize_async_calls(blocking=blocking)

    def wait(self) -> None:
        """`poll`, when everything has been written."""
        self.poll(blocking=True)

    def _publish(self, partial: Path, target: Path, run_state: dict[str, Any]) -> None:
        def publish_here() -> None:
            # So that the tools and other runs can read it by itself.
            (partial / COMPANION_FOLDER).mkdir()
            model = self._actor.config.model
            copy_companions(
                [Path(model.path), Path(model.tokenizer or model.path)],
                partial / COMPANION_FOLDER,
            )
            publish(partial, target, run_state, self._keep)

        _on_rank_zero(publish_here)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, CheckpointError) as e:
            # Raised on every rank. What was written would keep the disk full.
            if dist.get_rank() == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise CheckpointError(f"cannot write {self._partial}: {e}") from e
        except OSError as e:
            # One rank's alone, while the others are in the strategy's collectives: it must end the
            # job (the older checkpoints are complete), not wait for them.
            raise RuntimeError(f"cannot write {self._partial}: {e}") from e


def _make_anew(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def load_state(actor: MegatronActor, path: Path) -> None:
    """Load weights, optimizer, schedule and counters, also saved at another layout. Collective.

    Raises:
        ValueError: when `path` holds no complete checkpoint.
    """
    if not is_complete(path):
        raise ValueError(f"{path} is not a complete training checkpoint")
    with cpu.cuda_names():
        state = dist_checkpointing.load(_sharded_state(actor, loading=True), str(path))
        for i, chunk in enumerate(actor.model.chunks):
            chunk.load_state_dict(state[_chunk_key(actor, i)])
        actor.optimizer.load_state_dict(state["optimizer"])
    _unshare_adam_steps(actor)
    actor.scheduler.load_state_dict(state["scheduler"])
    actor.updates = state["updates"]
    actor.skipped_in_a_row = state["skipped_in_a_row"]


def _chunk_key(actor: MegatronActor, index: int) -> str:
    return "model" if len(actor.model.chunks) == 1 else f"model{index}"


def _sharded_state(actor: MegatronActor, loading: bool) -> dict[str, Any]:
    metadata = sharding_metadata()
    state = {
        _chunk_key(actor, i): chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(actor.model.chunks)
    }
    _fill_adam_state(actor)
    state["optimizer"] = actor.optimizer.sharded_state_dict(state, loading, metadata=metadata)
    return state | {
        "scheduler": actor.scheduler.state_dict(),
        "updates": actor.updates,
        "skipped_in_a_row": actor.skipped_in_a_row,
    }


def _torch_adams(actor: MegatronActor) -> list[torch.optim.Optimizer]:
    """torch's own Adam, which megatron-core falls back to without TransformerEngine and apex."""
    inner = [o.optimizer for o in actor.optimizer.chained_optimizers]
    return [o for o in inner if isinstance(o, (torch.optim.Adam, torch.optim.AdamW))]


def _fill_adam_state(actor: MegatronActor) -> None:
    """megatron-core 0.16 needs moments to save and to load into; torch makes them at the first
    step."""
    for adam in _torch_adams(actor):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _unshare_adam_steps(actor: MegatronActor) -> None:
    """megatron-core 0.16 loads one step tensor for all parameters; each update would advance it
    once per parameter."""
    for adam in _torch_adams(actor):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _on_rank_zero(action: Callable[[], None]) -> None:
    """Run `action` on rank 0; its error is raised on every rank.

    Raises:
        CheckpointError: the action raised an OSError.
        RuntimeError: it raised anything else.
    """
    outcome: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as e:
            outcome = [CheckpointError(str(e))]
        except Exception as e:
            outcome = [RuntimeError(f"{type(e).__name__}: {e}")]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
