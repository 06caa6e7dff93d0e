"""Training state as a megatron-core distributed checkpoint (`torch_dist`), loadable at any layout.

A checkpoint is written under a temporary name and renamed when it is complete; `latest` only ever
names a complete one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cgrpo.conversion.directories import copy_companions
from megatron_cgrpo.conversion.megatron_io import COMPANION_FOLDER
from megatron_cgrpo.policy import cpu
from megatron_cgrpo.policy.actor import MegatronActor
from megatron_cgrpo.policy.states import is_complete, publish
from megatron_cgrpo.policy.weights import sharding_metadata


def save_state(actor: MegatronActor, root: Path, step: int, run_state: dict[str, Any], keep: int):
    """Write `root`/step_N and point `latest` at it. Collective.

    Args:
        run_state: what rank 0 wants back besides the actor's state (JSON).
        keep: number of newest checkpoints that stay.

    Raises:
        OSError: on every rank when the disk is full or not writable; what was complete stays.
    """
    target = root / f"step_{step:06d}"
    partial = root / f".{target.name}.partial"
    error: OSError | None = None
    if dist.get_rank() == 0:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as e:
            error = e
    _together(error)
    try:
        with cpu.cuda_names():
            dist_checkpointing.save(_sharded_state(actor, loading=False), str(partial))
    except CheckpointException as e:
        # Raised on every rank.
        raise OSError(f"cannot write {partial}: {e}") from e
    except OSError as e:
        # One rank's alone, while the others are in the strategy's collectives: it must end the
        # job (the older checkpoints are complete), not wait for them.
        raise RuntimeError(f"cannot write {partial}: {e}") from e
    if dist.get_rank() == 0:
        try:
            # So that the tools and other runs can read it by itself.
            (partial / COMPANION_FOLDER).mkdir()
            model = Path(actor.config.model.path)
            sources = [model, Path(actor.config.model.tokenizer or model)]
            copy_companions(sources, partial / COMPANION_FOLDER)
            publish(partial, target, run_state, keep)
        except OSError as e:
            error = e
    _together(error)


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


def _together(error: OSError | None) -> None:
    """Any rank's error on every rank."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else str(error))
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise OSError(first)
