"""Which nodes of a job run what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.settings import Cluster
from launch.trainer_config import LaunchError, option


@dataclass(frozen=True)
class Layout:
    """The trainer has the first nodes of a job; the last may belong to the servers.

    `ranks`: trainer ranks of each of its nodes.
    """

    trainer_nodes: int
    server_nodes: int
    ranks: int

    @property
    def nodes(self) -> int:
        return self.trainer_nodes + self.server_nodes


def layout_of(config: dict[str, Any], cluster: Cluster) -> Layout:
    """Nodes as asked for, else as many as the ranks need; with them those of the servers.

    Raises:
        LaunchError: when ranks or servers do not fit the nodes.
    """
    world, gpus = int(option(config, "parallel.world_size", 1)), cluster.gpus_per_node
    own = int(option(config, "rollout.own_nodes", 0))
    trainer = (cluster.nodes or -(-world // (gpus or world)) + own) - own
    if trainer < 1:
        raise LaunchError(
            f"of {cluster.nodes} nodes the servers have {own} (rollout.own_nodes), which leaves "
            "none for the trainer"
        )
    if world % trainer:
        raise LaunchError(f"parallel.world_size={world} does not divide over {trainer} nodes")
    ranks = world // trainer
    if gpus is not None and ranks > gpus:
        raise LaunchError(
            f"parallel.world_size={world} needs {ranks} GPUs on each of {trainer} nodes, which "
            f"have {gpus}"
        )
    layout = Layout(trainer, own, ranks)
    _check_servers(config, layout, gpus)
    _check_gpus(config, gpus)
    return layout


def _check_gpus(config: dict[str, Any], gpus: int | None) -> None:
    """GPUs that the configuration names are those of a node."""
    feedback = config.get("feedback") or {}
    engines = {
        "rollout": config.get("rollout"),
        "feedback.critic.engine": (feedback.get("critic") or {}).get("engine"),
        "feedback.refiner": feedback.get("refiner"),
    }
    for name, engine in engines.items():
        named = (engine or {}).get("gpus") or [0]
        if gpus is not None and max(named) >= gpus:
            raise LaunchError(f"{name}.gpus names GPU {max(named)}; a node has 0 … {gpus - 1}")


def _check_servers(config: dict[str, Any], layout: Layout, gpus: int | None) -> None:
    """What the trainer would refuse when the job starts, hours later perhaps."""
    servers = int(option(config, "rollout.servers", 1))
    tensor = int(option(config, "rollout.tensor", 1))
    kind = option(config, "rollout.placement", "cpu")
    own = layout.server_nodes
    if option(config, "rollout.urls", ()) or (kind == "cpu" and not own):
        return
    if kind == "colocated" and own:
        raise LaunchError("rollout.placement=colocated has no use for rollout.own_nodes")
    if kind == "split" and not own and layout.nodes > 1:
        raise LaunchError(
            "rollout.placement=split on several nodes needs rollout.own_nodes, the number of them "
            "that the servers have"
        )
    nodes, room = (own, gpus) if own else (layout.trainer_nodes, layout.ranks)
    if kind == "split" and not own:
        return  # one node, which the trainer checks
    if servers % nodes:
        raise LaunchError(f"rollout.servers={servers} does not divide over {nodes} nodes")
    if kind != "cpu" and room is not None and servers // nodes * tensor > room:
        raise LaunchError(
            f"{servers // nodes} servers of {tensor} GPUs on each of {nodes} nodes do not fit on "
            f"{room}"
        )
