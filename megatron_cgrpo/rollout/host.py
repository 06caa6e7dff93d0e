"""The servers of a node other than rank 0's.

Beside the trainer, the first rank of the node has a `NodeServers`; a node that belongs to the
servers runs `python -m megatron_cgrpo.rollout.host CONFIG.yaml --attempt NAME --node N`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_cgrpo.config import ConfigError, load_config
from megatron_cgrpo.config.checks import context_of
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.rollout.fleet import POLICY
from megatron_cgrpo.rollout.nodes import POLL_S, Meeting, own_address, servers_of
from megatron_cgrpo.rollout.server import EngineError, own_server


class NodeServers:
    """Starts the servers of this node, tells their addresses, and their deaths.

    Args:
        indices: which of all servers; those of earlier nodes come first.
    """

    def __init__(self, config: Config, root: Path, meeting: Meeting, indices: range) -> None:
        host = config.rollout.host
        rollout = config.rollout.model_copy(
            update={"host": own_address() if host == "127.0.0.1" else host}
        )
        config = config.model_copy(update={"rollout": rollout})
        token, context = meeting.token(), context_of(config)
        self._meeting, self._timeout_s = meeting, rollout.start_timeout_s
        self._servers = {
            index: own_server(config, context, token, index, local, root / f"{POLICY}-{index}.log")
            for local, index in enumerate(indices)
        }
        # Servers die with the thread that started them (PR_SET_PDEATHSIG): one that lives on.
        self._starter = ThreadPoolExecutor(1)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="node-servers", daemon=True)
        self.died: str | None = None
        """The last words of the first server that died."""

    def start(self) -> None:
        """Start all processes; returns at once.

        Raises:
            EngineError: when a port is in use.
        """
        for index, server in self._servers.items():
            self._starter.submit(server.start).result()
            self._meeting.announce(index, server.url)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._stopping.wait(POLL_S):
            for index, server in self._servers.items():
                if not server.alive():
                    self.died = f"{server.url} on another node than rank 0's: {server.last_words()}"
                    self._meeting.mourn(index, self.died)
                    return

    def stop(self) -> None:
        """End all processes."""
        self._stopping.set()
        for server in self._servers.values():
            server.stop()
        self._starter.shutdown()


def servers_beside(config: Config, root: Path, meeting: Meeting, node: int, nodes: int):
    """The servers of a trainer's node; None where there are none to start."""
    r = config.rollout
    indices = servers_of(node, r.servers, nodes)
    if node == 0 or r.own_nodes or r.urls or not indices:
        return None
    return NodeServers(config, root, meeting, indices)


def serve(config: Config, root: Path, meeting: Meeting, node: int) -> int:
    """Run the servers of a node of their own until rank 0 closes the meeting; the exit code."""
    while meeting.token() is None:
        # Rank 0 checks the configuration first.
        if meeting.closed:
            return 0
        time.sleep(POLL_S)
    r = config.rollout
    servers = NodeServers(config, root, meeting, servers_of(node, r.servers, r.own_nodes))
    try:
        servers.start()
        while not meeting.closed:
            if servers.died is not None:
                raise EngineError(servers.died)
            time.sleep(POLL_S)
    finally:
        servers.stop()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; 0 when the job ended."""
    parser = argparse.ArgumentParser(prog="python -m megatron_cgrpo.rollout.host")
    parser.add_argument("config", help="the job's configuration")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--attempt", required=True, help="name of this attempt of the job")
    parser.add_argument("--node", type=int, required=True, help="of the servers' nodes, from 0")
    args = parser.parse_args(argv)
    # The warning before a time limit is for the ranks.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        config = load_config(args.config, args.overrides)
        root = Path(config.run.directory) / config.run.name
        return serve(config, root, Meeting(root, args.attempt), args.node)
    except (ConfigError, EngineError, OSError) as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
