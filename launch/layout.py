"""Which nodes of a job run what."""

from __future__ import annotations

from dataclasses import dataclass

from launch.settings import Cluster
from megatron_cgrpo.config import Config, ConfigError


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


def layout_of(config: Config, cluster: Cluster) -> Layout:
    """Nodes as asked for, else as many as the ranks need; with them those of the servers.

    Raises:
        ConfigError: when ranks or servers do not fit the nodes.
    """
    world, gpus = config.parallel.world_size, cluster.gpus_per_node
    own = config.rollout.own_nodes
    trainer = (cluster.nodes or -(-world // (gpus or world)) + own) - own
    if trainer < 1:
        raise ConfigError(
            f"of {cluster.nodes} nodes the servers have {own} (rollout.own_nodes), which leaves "
            "none for the trainer"
        )
    if world % trainer:
        raise ConfigError(f"parallel.world_size={world} does not divide over {trainer} nodes")
    ranks = world // trainer
    if gpus is not None and ranks > gpus:
        raise ConfigError(
            f"parallel.world_size={world} needs {ranks} GPUs on each of {trainer} nodes, which "
            f"have {gpus}"
        )
    layout = Layout(trainer, own, ranks)
    _check_servers(config, layout, gpus)
    _check_gpus(config, gpus)
    return layout


def _check_gpus(config: Config, gpus: int | None) -> None:
    """GPUs that the configuration names are those of a node."""
    engines = {
        "rollout": config.rollout,
        "feedback.critic.engine": config.feedback.critic.engine,
        "feedback.refiner": config.feedback.refiner,
    }
    for name, engine in engines.items():
        last = max(engine.gpus, default=0) if engine else 0
        if gpus is not None and last >= gpus:
            raise ConfigError(f"{name}.gpus names GPU {last}; a node has 0 … {gpus - 1}")


def _check_servers(config: Config, layout: Layout, gpus: int | None) -> None:
    """What the trainer, which knows the nodes, would refuse when the job starts."""
    r, own = config.rollout, layout.server_nodes
    if r.urls or (r.placement == "cpu" and not own):
        return
    if r.placement == "split" and not own:
        if layout.nodes > 1:
            raise ConfigError(
                "rollout.placement=split on several nodes needs rollout.own_nodes, the number of "
                "them that the servers have"
            )
        return
    nodes, room = (own, gpus) if own else (layout.trainer_nodes, layout.ranks)
    if r.servers % nodes:
        raise ConfigError(f"rollout.servers={r.servers} does not divide over {nodes} nodes")
    if r.placement != "cpu" and room is not None and r.servers // nodes * r.tensor > room:
        raise ConfigError(
            f"{r.servers // nodes} servers of {r.tensor} GPUs on each of {nodes} nodes do not fit "
            f"on {room}"
        )
