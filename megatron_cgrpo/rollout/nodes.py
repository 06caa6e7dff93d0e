"""Servers on several nodes: who runs which, and how rank 0 finds those of the others.

Servers run beside the trainer's ranks (rank 0's fleet starts those of its node, the first rank of
every other node its own), or on nodes that belong to them (`rollout.own_nodes`: rollout/host.py).
They meet in the run directory, which all nodes share: rank 0 leaves the token there, the others the
addresses of their servers, and why one died. A server on another node cannot be restarted alone:
the job ends, and is tried again from its last checkpoint.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.rollout.server import EngineError, EngineServer

MEETINGS = "engines"
"""Folder of a run with a folder for each attempt of the job."""
POLL_S = 0.25


def trainer_nodes() -> tuple[int, int]:
    """(this rank's node, the trainer's nodes), as torchrun says."""
    return int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def servers_of(node: int, servers: int, nodes: int) -> range:
    """The servers that a node runs: neighbours stay together, the first nodes have one more."""
    each, more = divmod(servers, nodes)
    first = node * each + min(node, more)
    return range(first, first + each + (node < more))


def check_nodes(config: Config, nodes: int) -> None:
    """Refuse servers that cannot be dealt out over the trainer's nodes, and other engines on GPUs
    that rank 0's node needs for something else.

    Raises:
        ConfigError: saying which number does not fit.
    """
    r = config.rollout
    _check_others(config, config.parallel.world_size // nodes)
    if nodes == 1 or r.own_nodes or r.placement == "cpu" or r.urls:
        return
    if r.placement == "split":
        raise ConfigError(
            f"rollout.placement=split on {nodes} nodes of the trainer: give the servers nodes of "
            "their own (rollout.own_nodes)"
        )
    ranks = config.parallel.world_size // nodes
    if r.servers % nodes or r.servers // nodes * r.tensor > ranks:
        raise ConfigError(
            f"{r.servers} servers of {r.tensor} GPUs cannot be dealt out evenly over {nodes} nodes "
            f"of {ranks} ranks; change rollout.servers or rollout.tensor"
        )


def _check_others(config: Config, ranks: int) -> None:
    """Critic and refiner run on the node of rank 0."""
    taken = set(range(ranks))
    for name, engine in (
        ("feedback.critic.engine", config.feedback.critic.engine),
        ("feedback.refiner", config.feedback.refiner),
    ):
        if engine and config.rollout.placement != "cpu" and taken.intersection(engine.gpus):
            raise ConfigError(
                f"{name}.gpus {sorted(taken.intersection(engine.gpus))} belong to the trainer "
                f"(0 … {ranks - 1})"
            )


class Meeting:
    """What the nodes of one attempt of a job tell each other, in files.

    Args:
        root: the run directory.
        attempt: differs from those of earlier attempts, whose files are never read.
    """

    def __init__(self, root: Path, attempt: str) -> None:
        self.directory = root / MEETINGS / attempt

    def open(self, token: str) -> None:
        """Rank 0: the servers may start. What earlier attempts left is removed."""
        shutil.rmtree(self.directory.parent, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._write("token", token, mode=0o600)

    def token(self) -> str | None:
        """The access token of all servers; None before they may start."""
        return self._read("token")

    def wait_token(self, timeout_s: float) -> str:
        """The token, as soon as this node sees it.

        Raises:
            EngineError: when it does not.
        """
        deadline = time.monotonic() + timeout_s
        while (token := self.token()) is None:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.directory} is not seen on this node: is run.directory on a file system "
                    "that all nodes share?"
                )
            time.sleep(POLL_S)
        return token

    def announce(self, server: int, url: str) -> None:
        """This server is being started, and will answer there."""
        self._write(f"{server}.url", url)

    def url(self, server: int) -> str | None:
        return self._read(f"{server}.url")

    def mourn(self, server: int, reason: str) -> None:
        """This server died."""
        self._write(f"{server}.died", reason)

    def death(self, server: int) -> str | None:
        """Why this server died; None while it lives."""
        return self._read(f"{server}.died")

    def first_death(self) -> str | None:
        """Why a server died, if one did."""
        for path in sorted(self.directory.glob("*.died")):
            return path.read_text(encoding="utf-8")
        return None

    def close(self) -> None:
        """Rank 0: the servers are not needed any more, or never were."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write("closed", "")

    @property
    def closed(self) -> bool:
        return self._read("closed") is not None

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        partial = self.directory / f".{name}.partial"
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as f:
            f.write(text)
        os.replace(partial, self.directory / name)

    def _read(self, name: str) -> str | None:
        try:
            return (self.directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


def own_address(peer: str | None = None) -> str:
    """The address of this node on the way to another one; default: to the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        # Nothing is sent: the system chooses the interface.
        s.connect((peer or os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))
        return s.getsockname()[0]


@dataclass
class RemoteServer(EngineServer):
    """A server that another node runs; its `url` is known when it has been announced."""

    meeting: Meeting | None = None
    index: int = 0

    @property
    def host(self) -> str:
        """Of its node."""
        return urlsplit(self.url).hostname

    def alive(self) -> bool:
        return self.meeting.death(self.index) is None

    def wait_ready(self, timeout_s: float) -> None:
        """Block until the server answers.

        Raises:
            EngineError: when it dies or is not ready in time, with its last log lines.
        """
        start = time.monotonic()
        while (url := self.meeting.url(self.index)) is None:
            if time.monotonic() - start > timeout_s:
                raise EngineError(
                    f"server {self.index} was not started by its node within {timeout_s:.0f} s"
                )
            time.sleep(POLL_S)
        self.url = url
        super().wait_ready(timeout_s - (time.monotonic() - start))

    def last_words(self) -> str:
        return self.meeting.death(self.index) or self.tail()
