"""The state of a run on disk: training checkpoints to continue from, and exports to use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.conversion.shape import ModelShape
from megatron_cgrpo.data.endings import end_token_ids
from megatron_cgrpo.policy.actor import MegatronActor
from megatron_cgrpo.policy.checkpoint import StateSaver, load_state
from megatron_cgrpo.policy.export import drain, stream_hf
from megatron_cgrpo.policy.states import STATES
from megatron_cgrpo.policy.weights import non_finite
from megatron_cgrpo.training.directory import Progress
from megatron_cgrpo.training.exchange import on_rank_zero
from megatron_cgrpo.training.exporter import Exporter

EXPORTS = "checkpoints"
"""Folder of the exports in a run directory."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""


def due(every: int, step: int) -> bool:
    """Whether something that is done every so many steps (0: never) is done after this one."""
    return bool(every) and step % every == 0


def build_actor(config: Config, shape: ModelShape, progress: Progress) -> MegatronActor:
    """The actor with the weights, and the optimizer, that the run begins with. Collective.

    Raises:
        ConfigError: when the weights hold NaN or infinite values.
    """
    actor = MegatronActor(config, shape, HFCheckpoint(config.model.path))
    source: str | Path = config.model.weights or config.model.path
    if progress.checkpoint is not None:
        load_state(actor, progress.checkpoint)
        source = progress.checkpoint
    bad = non_finite(actor.model)
    on_rank_zero(lambda: _refuse_non_finite(bad, source))
    return actor


def _refuse_non_finite(tensors: list[str], source: str | Path) -> None:
    if tensors:
        more = f" and {len(tensors) - 1} more tensors" if len(tensors) > 1 else ""
        raise ConfigError(f"{source} holds NaN or infinite values in {tensors[0]}{more}")


class RunState:
    """Writes checkpoints and exports. Every method is collective.

    What fails in mid-run (full disk) is reported and the run goes on; at the end it raises.

    Args:
        parts: on rank 0, whose state is saved beside the actor's.
        warn: on rank 0, told what failed.
    """

    def __init__(
        self,
        config: Config,
        root: Path,
        actor: MegatronActor,
        parts: tuple[Stateful, ...] = (),
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        t, model = config.training, config.model
        self._config, self._actor, self._parts, self._warn = config, actor, parts, warn
        self._saver = StateSaver(actor, root / STATES, t.keep_checkpoints, t.background_checkpoints)
        companions = [Path(model.path), Path(model.tokenizer or model.path)]
        ends = on_rank_zero(lambda: end_token_ids(config)) or ()
        self._exporter = Exporter(root / EXPORTS, companions, warn, ends)

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, *error: object) -> None:
        self._exporter.wait()

    def checkpoint(self, step: int, version: int, last: bool) -> None:
        """Write the training state every N steps and at the end.

        Args:
            version: of the policy's weights.
            last: no other will follow; nothing is being written any more on return.
        """
        now = last or due(self._config.training.checkpoint_every, step)
        try:
            self._saver.poll(blocking=now)
        except OSError as e:
            self._warn(f"an earlier checkpoint failed: {e}")
        try:
            if now:
                self._saver.save(step, self._run_state(step, version))
            if last:
                self._saver.wait()
        except OSError as e:
            if last:
                raise
            self._warn(f"checkpoint of step {step} failed: {e}")

    def _run_state(self, step: int, version: int) -> dict[str, Any]:
        state = {"step": step, "version": version, "config": self._config.model_dump(mode="json")}
        for part in self._parts:
            state |= part.state_dict()
        return state

    def export(self, step: int, last: bool) -> None:
        """Export the policy as a Hugging Face directory every N steps and at the end.

        Training waits for the gathering of the weights; they are written in the background. A
        failed export leaves nothing that looks complete.
        """
        if not (last or due(self._config.training.save_every, step)):
            return
        tensors = stream_hf(self._actor.model)
        if dist.get_rank() == 0:
            self._exporter.start(step, tensors)
        else:
            drain(tensors)
        if last:
            on_rank_zero(self._exporter.finish)
