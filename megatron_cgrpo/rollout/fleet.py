"""The fleet of vLLM servers: start, share out requests, restart the dead, control routes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import requests

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.rollout.server import (
    SERVED_NAME,
    EngineError,
    EngineServer,
    free_port,
    server_command,
    server_environment,
)
from megatron_cgrpo.types import Completion


class PromptTooLong(ValueError):
    """Prompt and response would not fit into the engine's context."""


class EngineFleet:
    """Servers that all serve the current policy. Used from one asyncio loop and one thread.

    `version` is the weight version that the servers in rotation hold; a restarted server joins
    them only when `resync` has brought it up to date. `lost` and `restarts` count requests
    without an answer and servers started again.
    """

    def __init__(self, config: Config, context: int, log_dir: Path) -> None:
        r = config.rollout
        self.config, self.context = config, context
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
            self.servers = [self._own_server(i, token, log_dir) for i in range(r.servers)]
        self._ready = [False] * len(self.servers)
        self._load = [0] * len(self.servers)
        self._session: aiohttp.ClientSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._repair: asyncio.Lock | None = None

    def _own_server(self, index: int, token: str, log_dir: Path) -> EngineServer:
        r = self.config.rollout
        port = r.port + index if r.port else free_port(r.host)
        return EngineServer(
            f"http://{r.host}:{port}",
            token,
            server_command(self.config, self.context, port),
            server_environment(self.config, token, index),
            log_dir / f"engine-{index}.log",
        )

    # ---------------------------------------------------------------- processes

    def start(self) -> None:
        """Start all processes; returns at once."""
        for server in self.servers:
            if server.command is not None:
                server.start()

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

    # ----------------------------------------------------------------- requests

    async def open(self) -> None:
        """Prepare for requests on the running asyncio loop."""
        self._session = aiohttp.ClientSession(
            headers=self.servers[0].headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.config.rollout.request_timeout_s),
        )
        self._slots = asyncio.Semaphore(self.config.rollout.concurrency * len(self.servers))
        self._repair = asyncio.Lock()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

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
        }
        error = "no server is ready"
        async with self._slots:
            for _ in range(self.config.rollout.request_retries + 1):
                index = self._pick()
                if index is None:
                    await self._revive()
                    index = self._pick()
                    if index is None:
                        raise EngineError("no vLLM server is left to serve requests")
                self._load[index] += 1
                try:
                    return self._parse(await self._post(index, body), prompt_ids)
                except (aiohttp.ClientError, TimeoutError, EngineError) as e:
                    error = f"{type(e).__name__}: {e}"
                    self.lost += 1
                    await asyncio.sleep(0.5)
                    if not await self._healthy(index):
                        self._ready[index] = False
                finally:
                    self._load[index] -= 1
        raise EngineError(f"a request failed {self.config.rollout.request_retries + 1}×: {error}")

    def _pick(self) -> int | None:
        ready = [i for i, ok in enumerate(self._ready) if ok]
        return min(ready, key=lambda i: self._load[i]) if ready else None

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

    async def _healthy(self, index: int) -> bool:
        if not self.servers[index].alive():
            return False
        try:
            url = f"{self.servers[index].url}/health"
            timeout = aiohttp.ClientTimeout(total=10)
            async with self._session.get(url, timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _revive(self) -> None:
        """Restart the dead servers (one caller does it, the others wait)."""
        async with self._repair:
            if not any(self._ready):
                await asyncio.to_thread(self.repair)

    def repair(self) -> None:
        """Restart every server out of rotation and bring its weights up to date.

        Raises:
            EngineError: when it is not ours, restarts are used up, or it cannot be resynced.
        """
        for i, server in enumerate(self.servers):
            if self._ready[i] and server.alive():
                continue
            self._ready[i] = False
            if server.command is None:
                raise EngineError(f"{server.url} is gone and is not ours to restart")
            if self.restarts >= self.config.rollout.max_restarts:
                raise EngineError(
                    f"{server.url} died and rollout.max_restarts={self.restarts} are used up; "
                    + server.tail()
                )
            self.restarts += 1
            server.stop(grace_s=1.0)
            server.start()
            server.wait_ready(self.config.rollout.start_timeout_s)
            if self.version > 0:
                if self.resync is None:
                    raise EngineError(
                        f"{server.url} was restarted but holds the initial weights: this placement "
                        "cannot replay the last push"
                    )
                self.resync(server)
            self._ready[i] = True

    # ------------------------------------------------------------ control routes

    def control(
        self, path: str, body: Any = None, servers: list[EngineServer] | None = None
    ) -> None:
        """POST to a control route of all servers (or the given ones) at the same time.

        Raises:
            EngineError: naming the server and its answer.
        """
        targets = self.servers if servers is None else servers
        with ThreadPoolExecutor(len(targets)) as pool:
            list(pool.map(lambda s: self._control(s, path, body), targets))

    def _control(self, server: EngineServer, path: str, body: Any) -> None:
        if callable(body):
            body = body(self.servers.index(server))
        try:
            answer = requests.post(
                f"{server.url}/{path}",
                json=body,
                headers=server.headers,
                timeout=self.config.rollout.request_timeout_s,
            )
        except requests.RequestException as e:
            raise EngineError(f"{server.url}/{path} failed: {e}; {server.tail()}") from e
        if answer.status_code != 200:
            raise EngineError(
                f"{server.url}/{path} answered {answer.status_code}: {answer.text[:500]}; "
                + server.tail()
            )

    @contextlib.contextmanager
    def asleep(self):
        """Engines give up GPU memory inside (colocated placement; elsewhere nothing happens)."""
        if self.config.rollout.placement != "colocated":
            yield
            return
        self.control("sleep?level=2")
        yield
        self.control("wake_up?tags=weights")

    def drop_all(self) -> None:
        """Take every server out of rotation; `repair` brings them back."""
        self._ready = [False] * len(self.servers)

    def mark_lost(self) -> None:
        """Take servers whose process has died out of rotation."""
        for i, server in enumerate(self.servers):
            self._ready[i] = self._ready[i] and server.alive()
