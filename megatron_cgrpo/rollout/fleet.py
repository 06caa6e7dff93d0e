"""The fleet of vLLM servers: start, share out requests, restart the dead, control routes."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import requests

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.endings import end_token_ids
from megatron_cgrpo.rollout.nodes import Meeting, RemoteServer, servers_of, trainer_nodes
from megatron_cgrpo.rollout.server import SERVED_NAME, EngineError, EngineServer, ask, own_server
from megatron_cgrpo.types import Completion

POLICY = "engine"
"""Name of the fleet whose weights are trained; others keep those that they start with."""


class PromptTooLong(ValueError):
    """Prompt and response would not fit into the engine's context."""


class EngineFleet:
    """Servers that all serve the current policy. Used from one asyncio loop and one thread.

    `version` is the weight version that the servers in rotation hold. A server out of rotation is
    down, or its weights are unknown (`_stale`); it comes back when it answers and holds `version`:
    through `resync`, or with the next push. `lost` and `restarts` count requests without an answer
    and servers started again.

    Args:
        context: longest sequence in tokens.
        log_dir: where the servers' logs go.
        meeting: where servers of other nodes are found; without one all are of this node.
    """

    def __init__(
        self,
        config: Config,
        context: int,
        log_dir: Path,
        name: str = POLICY,
        meeting: Meeting | None = None,
    ) -> None:
        r = config.rollout
        self.config, self.context, self.name = config, context, name
        self.version = 0
        self.lost = self.restarts = 0
        self.resync: Callable[[EngineServer], None] | None = None
        if r.urls:
            if r.token_file is None:
                raise ConfigError("rollout.urls needs rollout.token_file with the servers' token")
            token = Path(r.token_file).read_text().strip()
            self.servers = [EngineServer(u.rstrip("/"), token) for u in r.urls]
        else:
            token = secrets.token_urlsafe(32)
            mine = range(r.servers)
            if meeting is not None:
                mine = range(0) if r.own_nodes else servers_of(0, r.servers, trainer_nodes()[1])
            self.servers = []
            for i in range(r.servers):
                log = log_dir / f"{name}-{i}.log"
                self.servers.append(
                    own_server(config, context, token, i, i, log)
                    if i in mine
                    else RemoteServer(f"server {i}", token, log=log, meeting=meeting, index=i)
                )
        self._token, self._meeting = token, meeting
        self._ends = end_token_ids(config)
        self._ready = [False] * len(self.servers)
        self._stale = [False] * len(self.servers)
        self._pushed = False
        self._load = [0] * len(self.servers)
        # Servers die with the thread that started them (PR_SET_PDEATHSIG): one that lives on.
        self._starter = ThreadPoolExecutor(1)
        self._session: aiohttp.ClientSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._probes: list[asyncio.Task | None] = [None] * len(self.servers)
        self._repairing: asyncio.Task | None = None
        self._repair_lock = threading.Lock()

    # ---------------------------------------------------------------- processes

    def start(self) -> None:
        """Start all processes of this node, let the others start theirs; returns at once.

        Raises:
            EngineError: when a port is in use.
        """
        if self._meeting is not None and not self.config.rollout.urls:
            self._meeting.open(self._token)
        for server in self.servers:
            if server.command is not None:
                self._starter.submit(server.start).result()

    def wait_ready(self) -> None:
        """Block until every server answers.

        Raises:
            EngineError: one exited or took too long; its last log lines are in the message.
        """
        for i, server in enumerate(self.servers):
            server.wait_ready(self.config.rollout.start_timeout_s)
            self._ready[i] = True

    def stop(self) -> None:
        """End all processes that are ours."""
        for server in self.servers:
            server.stop()
        self._starter.shutdown()

    def repair(self, before_push: bool = False) -> None:
        """Bring every server out of rotation back: restarted if it is dead, then up to date.

        Args:
            before_push: a push of all weights follows, so that weights need not be replayed.

        Raises:
            EngineError: when it is not ours, restarts are used up, or its weights cannot be
                replayed here.
        """
        # A repair may still run in the background of a rollout when the next push begins.
        with self._repair_lock:
            self._repair(before_push)

    def _repair(self, before_push: bool) -> None:
        for i, server in enumerate(self.servers):
            if self._ready[i] and server.alive():
                continue
            self._ready[i] = False
            if self._stale[i] or not _answers(server):
                self._restart(i)
            if self._stale[i] and not before_push:
                if self.resync is None:
                    raise EngineError(
                        f"{server.url} was restarted with the initial weights, and this placement "
                        "can bring it up to date only with the next push"
                    )
                self.resync(server)
                self._stale[i] = False
            self._ready[i] = True

    def _restart(self, index: int) -> None:
        server = self.servers[index]
        if server.command is None:
            raise EngineError(
                f"{server.url} is gone and cannot be restarted from here; {server.tail()}"
            )
        if self.config.rollout.placement == "split" and self.name == POLICY:
            # A new process cannot join the NCCL group of the trainer and the other engines.
            raise EngineError(f"{server.url} died; {server.tail()}")
        if self.restarts >= self.config.rollout.max_restarts:
            raise EngineError(
                f"{server.url} died and rollout.max_restarts={self.restarts} are used up; "
                + server.tail()
            )
        self.restarts += 1
        server.stop(grace_s=1.0)
        self._starter.submit(server.start).result()
        server.wait_ready(self.config.rollout.start_timeout_s)
        self._stale[index] = self._pushed

    def set_aside(self, servers: list[EngineServer]) -> None:
        """Take servers out of rotation whose weights are unknown after a failed update."""
        for server in servers:
            i = self.servers.index(server)
            self._ready[i], self._stale[i] = False, True

    def updated(self, version: int, servers: list[EngineServer]) -> None:
        """These servers hold `version` now."""
        self.version, self._pushed = version, True
        for server in servers:
            self._stale[self.servers.index(server)] = False

    # ----------------------------------------------------------------- requests

    def _open(self) -> None:
        """Prepare for requests on the running asyncio loop."""
        self._session = aiohttp.ClientSession(
            headers=self.servers[0].headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.config.rollout.request_timeout_s),
        )
        self._slots = asyncio.Semaphore(self.config.rollout.concurrency * len(self.servers))

    async def close(self) -> None:
        """Leave the connections of this asyncio loop; the next request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, prompt_ids: tuple[int, ...], *, n: int, temperature: float, seed: int, max_tokens: int
    ) -> list[Completion]:
        """Sample n responses to one prompt.

        A request that fails or times out is sent again, to another server where there is one, and
        a dead server is restarted meanwhile.

        Raises:
            PromptTooLong: before anything is sent.
            EngineError: when the retries are used up or no server can be brought back.
        """
        if len(prompt_ids) + max_tokens > self.context:
            raise PromptTooLong(
                f"a prompt of {len(prompt_ids)} tokens and {max_tokens} new ones exceed the "
                f"engine's context of {self.context}"
            )
        body = {
            "model": SERVED_NAME,
            "prompt": list(prompt_ids),
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stop": list(self.config.rollout.stop),
            # Ours alone decide: vLLM knows one of the ids by itself.
            "stop_token_ids": list(self._ends),
            "ignore_eos": True,
        }
        if self._session is None:
            self._open()
        error = "no server is ready"
        async with self._slots:
            for _ in range(self.config.rollout.request_retries + 1):
                index = await self._pick()
                self._load[index] += 1
                try:
                    return self._parse(await self._post(index, body), prompt_ids)
                except (aiohttp.ClientError, TimeoutError, EngineError) as e:
                    error = f"{type(e).__name__}: {e}"
                    self.lost += 1
                    await asyncio.sleep(0.5)
                    if self._ready[index] and not await self._probe(index):
                        self._ready[index] = False
                        self._start_repair()
                finally:
                    self._load[index] -= 1
        raise EngineError(f"a request failed {self.config.rollout.request_retries + 1}×: {error}")

    async def _pick(self) -> int:
        """The ready server with the least to do; waits for a repair when there is none.

        Raises:
            EngineError: when no server can be brought back.
        """
        while True:
            ready = [i for i, ok in enumerate(self._ready) if ok]
            if ready:
                return min(ready, key=lambda i: self._load[i])
            # A request that is cancelled must not end the repair that others wait for.
            await asyncio.shield(self._start_repair())

    async def _probe(self, index: int) -> bool:
        """Whether a server still answers; one question at a time for each server."""
        if self._probes[index] is None or self._probes[index].done():
            self._probes[index] = asyncio.create_task(
                asyncio.to_thread(_answers, self.servers[index])
            )
        return await asyncio.shield(self._probes[index])

    def _start_repair(self) -> asyncio.Task:
        """Bring servers back in the background; the others go on meanwhile."""
        if self._repairing is None or self._repairing.done():
            self._repairing = asyncio.create_task(asyncio.to_thread(self.repair))
            # Its error is told to whoever waits for a server; with others left, nobody does.
            self._repairing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._repairing

    async def _post(self, index: int, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.servers[index].url}/v1/completions"
        async with self._session.post(url, json=body) as answer:
            if answer.status != 200:
                text = (await answer.text())[:500]
                raise EngineError(f"{url} answered {answer.status}: {text}")
            return await answer.json()

    def _parse(self, answer: dict[str, Any], prompt_ids: tuple[int, ...]) -> list[Completion]:
        out = []
        for choice in sorted(answer["choices"], key=lambda c: c["index"]):
            if choice["finish_reason"] not in ("stop", "length"):
                raise EngineError(f"a response ended with {choice['finish_reason']!r}")
            out.append(
                Completion(
                    tuple(prompt_ids),
                    tuple(choice["token_ids"]),
                    tuple(choice["logprobs"]["token_logprobs"]),
                    choice["text"],
                    choice["finish_reason"],
                    (self.version,),
                )
            )
        return out

    # ------------------------------------------------------------ control routes

    def control(
        self, path: str, body: Any = None, servers: list[EngineServer] | None = None
    ) -> None:
        """POST to a control route of all servers (or the given ones) at the same time.

        Args:
            body: JSON, or a function of the server's index that gives it.

        Raises:
            ControlError: naming each server that failed and its answer.
        """
        targets = self.servers if servers is None else servers
        if not targets:
            return
        with ThreadPoolExecutor(len(targets)) as pool:
            answers = list(pool.map(lambda s: self._control(s, path, body), targets))
        failed = [(s, e) for s, e in zip(targets, answers) if e is not None]
        if failed:
            raise ControlError(
                "; ".join(f"{s.url}/{path} {e}; {s.tail()}" for s, e in failed),
                [s for s, _ in failed],
            )

    def _control(self, server: EngineServer, path: str, body: Any) -> str | None:
        if callable(body):
            body = body(self.servers.index(server))
        try:
            answer = ask(
                "POST",
                f"{server.url}/{path}",
                json=body,
                headers=server.headers,
                timeout=self.config.rollout.request_timeout_s,
            )
        except requests.RequestException as e:
            return f"failed: {e}"
        if answer.status_code != 200:
            return f"answered {answer.status_code}: {answer.text[:500]}"
        return None

    def sleep(self) -> None:
        """Engines give up the GPU's memory, weights included; the next push wakes them."""
        self.control("sleep?level=2")


class ControlError(EngineError):
    """A control route failed on some servers."""

    def __init__(self, message: str, servers: list[EngineServer]) -> None:
        super().__init__(message)
        self.servers = servers


def _answers(server: EngineServer) -> bool:
    """Whether the process lives and serves requests."""
    if not server.alive():
        return False
    try:
        answer = ask("GET", f"{server.url}/health", headers=server.headers, timeout=30)
    except requests.RequestException:
        return False
    return answer.status_code == 200
