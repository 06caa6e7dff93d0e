"""The engines of a run: servers of this node, rank 0's fleets, and the weights in them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_cgrpo.config.checks import context_of
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.rollout.fleet import POLICY, EngineFleet
from megatron_cgrpo.rollout.host import NodeServers, servers_beside
from megatron_cgrpo.rollout.nodes import Meeting, trainer_nodes
from megatron_cgrpo.rollout.others import other_fleets
from megatron_cgrpo.training.exchange import StopSignal, on_rank_zero

if TYPE_CHECKING:
    from megatron_cgrpo.policy.model import PolicyModel
    from megatron_cgrpo.rollout.weight_sync import WeightSync


class Engines:
    """Starts the engines, parks them, brings them new weights. Every method is collective.

    `fleets`, by name, has the policy's (POLICY) and those of a critic and a refiner; only rank 0
    has any. `version` is that of the policy's weights.

    Args:
        meeting: of the nodes, where servers run on several.
        stop: asked for, servers may die.
    """

    def __init__(
        self, config: Config, root: Path, meeting: Meeting | None, version: int, stop: StopSignal
    ) -> None:
        self.version = version
        self._config, self._root, self._meeting, self._stop = config, root, meeting, stop
        self._colocated = config.rollout.placement == "colocated"
        self.fleets: dict[str, EngineFleet] = on_rank_zero(self._all_fleets) or {}
        self._beside: NodeServers | None = None
        self._sync: WeightSync | None = None
        self._pushed: dict[str, float] = {}

    def _all_fleets(self) -> dict[str, EngineFleet]:
        policy = EngineFleet(
            self._config, context_of(self._config), self._root, meeting=self._meeting
        )
        return {POLICY: policy, **other_fleets(self._config, self._root)}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        # The last one first; one that fails to close does not keep the others.
        with contextlib.ExitStack() as stack:
            if self._beside is not None:
                stack.callback(self._beside.stop)
            for fleet in self.fleets.values():
                stack.callback(fleet.stop)
            if self._sync is not None:
                stack.callback(self._sync.close)

    def start(self) -> None:
        """Start the servers; `connect` waits for them, so that the model is built meanwhile.

        Colocated ones are waited for, and leave the GPUs before the model is built there.
        """
        on_rank_zero(lambda: [fleet.start() for fleet in self.fleets.values()])
        if self._meeting is not None and os.environ["LOCAL_RANK"] == "0":
            self._beside = servers_beside(
                self._config, self._root, self._meeting, trainer_nodes(), lambda: self._stop.asked
            )
            if self._beside is not None:
                self._beside.start()
        if self._colocated:
            on_rank_zero(self._wait_ready)
            self.park()

    def _wait_ready(self) -> None:
        for fleet in self.fleets.values():
            fleet.wait_ready()

    def connect(self, model: PolicyModel) -> None:
        """Wait for the servers, and have them serve the weights of `model`."""
        # Imported now: vLLM loads while the servers start.
        from megatron_cgrpo.rollout.weight_sync import WeightSync

        if not self._colocated:
            on_rank_zero(self._wait_ready)
        self._sync = WeightSync(self._config, model, self.fleets.get(POLICY))
        elsewhere = self._config.model.weights or self._config.rollout.urls
        if self.version > 0 or self._colocated or elsewhere:
            # Resumed: the engines have the initial weights. Colocated: they sleep without any.
            # Weights from elsewhere, engines given by URL: they hold others, or unknown ones.
            self._sync.push(self.version)

    def park(self) -> None:
        """Colocated engines give their GPU memory to training; the next push wakes them."""
        if self._colocated:
            # Every rank waits here until the engines of all GPUs sleep.
            on_rank_zero(lambda: self.fleets[POLICY].sleep())

    def push(self, changed: bool) -> None:
        """Bring the engines to the new weights; sleeping ones get theirs back in any case."""
        self.version += changed
        if changed or self._colocated:
            self._pushed = self._sync.push(self.version)

    def metrics(self) -> dict[str, float]:
        """Of the last push and of the policy's servers; on rank 0."""
        policy = self.fleets[POLICY]
        return {
            "push/gib_per_s": self._pushed.get("gib_per_s", 0.0),
            "push/mib": self._pushed.get("bytes", 0) / 2**20,
            "weight_version": self.version,
            "engine/lost_requests": policy.lost,
            "engine/restarts": policy.restarts,
        }
