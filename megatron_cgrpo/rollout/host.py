"""The servers of a node other than rank 0's.

Beside the trainer, the first rank of the node has a `NodeServers`; a node that belongs to the
servers runs `python -m megatron_cgrpo.rollout.host RUN_DIRECTORY --attempt NAME --node N`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_cgrpo.config import load_config
from megatron_cgrpo.config.checks import context_of
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.rollout.fleet import POLICY
from megatron_cgrpo.rollout.nodes import POLL_S, Meeting, own_address, servers_of
from megatron_cgrpo.rollout.server import EngineError, own_server

# A signal to the whole job may reach the servers before it reaches whoever watches them.
SIGNAL_S = 2.0


class NodeServers:
    """Starts the servers of this node, tells their addresses, and their deaths.

    Args:
        indices: which of all servers; those of earlier nodes come first.
        stopping: whether the job was asked to stop: servers then die of the same signal.

    Raises:
        EngineError: when the run directory of rank 0 is not seen here.
    """

    def __init__(
        self,
        config: Config,
        root: Path,
        meeting: Meeting,
        indices: range,
        stopping: Callable[[], bool],
    ) -> None:
        rollout = config.rollout.model_copy(update={"host": own_address()})
        config = config.model_copy(update={"rollout": rollout})
        token, context = meeting.wait_token(rollout.start_timeout_s), context_of(config)
        self._meeting, self._stopping = meeting, stopping
        self._servers = {
            index: own_server(config, context, token, index, local, root / f"{POLICY}-{index}.log")
            for local, index in enumerate(indices)
        }
        # Servers die with the thread that started them (PR_SET_PDEATHSIG): one that lives on.
        self._starter = ThreadPoolExecutor(1)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="node-servers", daemon=True)
        self.died = False
        """A server died that should not have."""

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
        while not self._ended.wait(POLL_S):
            for index, server in self._servers.items():
                if server.alive():
                    continue
                if self._ended.wait(SIGNAL_S) or self._stopping():
                    return
                words = f"{server.url}: {server.last_words()}"
                print(f"error: {words}", file=sys.stderr, flush=True)
                self._meeting.mourn(index, words)
                self.died = True
                return

    def stop(self) -> None:
        """End all processes."""
        self._ended.set()
        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(lambda server: server.stop(), self._servers.values()))
        self._starter.shutdown()


def servers_beside(
    config: Config,
    root: Path,
    meeting: Meeting,
    place: tuple[int, int],
    stopping: Callable[[], bool],
) -> NodeServers | None:
    """The servers of a trainer's node; None where there are none to start.

    Args:
        place: this node, and how many the trainer has.
    """
    r, (node, nodes) = config.rollout, place
    indices = servers_of(node, r.servers, nodes)
    if node == 0 or r.own_nodes or r.urls or not indices:
        return None
    return NodeServers(config, root, meeting, indices, stopping)


def serve(root: Path, meeting: Meeting, node: int, stopping: Callable[[], bool]) -> int:
    """Run the servers of a node of their own until rank 0 closes the meeting; the exit code."""
    while meeting.token() is None:
        # Rank 0 checks the configuration first.
        if meeting.closed:
            return 0
        time.sleep(POLL_S)
    config = load_config(root / "config.yaml")
    mine = servers_of(node, config.rollout.servers, config.rollout.own_nodes)
    servers = NodeServers(config, root, meeting, mine, stopping)
    try:
        servers.start()
        while not (meeting.closed or servers.died):
            time.sleep(POLL_S)
    finally:
        servers.stop()
    return int(servers.died)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; 0 when the job ended."""
    parser = argparse.ArgumentParser(prog="python -m megatron_cgrpo.rollout.host")
    parser.add_argument("root", type=Path, help="the run directory")
    parser.add_argument("--attempt", required=True, help="name of this attempt of the job")
    parser.add_argument("--node", type=int, required=True, help="of the servers' nodes, from 0")
    args = parser.parse_args(argv)
    # The ranks decide when a job that is asked to stop ends, and need the servers until then.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.set())
    try:
        return serve(args.root, Meeting(args.root, args.attempt), args.node, asked.is_set)
    except (EngineError, OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
