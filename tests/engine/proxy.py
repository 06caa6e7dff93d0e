"""A proxy in front of a real OpenAI-compatible server that misbehaves on order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

FAULTS = ("drop", "429", "500", "drip", "malformed", "truncated", "empty", "other shape")


class Proxy:
    """Passes requests on, but for those with a fault in `faults` (taken from the front).

    `always` is a fault for every request; `seen` counts them. "401" repeats the key, as careless
    servers do.
    """

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.faults: list[str] = []
        self.always: str | None = None
        self.seen = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen += 1
        fault = self.always or (self.faults.pop(0) if self.faults else None)
        body = await request.read()
        if fault == "drop":
            request.transport.close()
            return web.Response()
        if fault in ("429", "500"):
            return web.Response(status=int(fault), text="busy", headers={"Retry-After": "0.05"})
        if fault == "401":
            return web.json_response(
                {"error": {"message": f"bad key {request.headers['Authorization']}"}}, status=401
            )
        if fault == "drip":
            return await self._drip(request)
        if fault in ("malformed", "empty", "other shape"):
            text = {"malformed": '{"choices": [', "empty": '{"choices": []}'}.get(fault, "[1, 2]")
            return web.Response(text=text, content_type="application/json")
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.target + request.path, data=body, headers=_passed(request)) as answer,
        ):
            data = await answer.read()
            if fault == "truncated":
                out = web.StreamResponse(headers={"Content-Length": str(len(data))})
                await out.prepare(request)
                await out.write(data[: len(data) // 2])
                request.transport.close()
                return out
            return web.Response(status=answer.status, body=data, content_type=answer.content_type)

    async def _drip(self, request: web.Request) -> web.StreamResponse:
        """A byte now and then: no single read ever times out."""
        out = web.StreamResponse(headers={"Content-Type": "application/json"})
        await out.prepare(request)
        for _ in range(200):
            await out.write(b" ")
            await asyncio.sleep(0.1)
        return out


def _passed(request: web.Request) -> dict[str, str]:
    return {k: request.headers[k] for k in ("Authorization", "Content-Type")}


@contextmanager
def running(proxy: Proxy) -> Iterator[Proxy]:
    """The proxy on a loopback port, in a thread."""
    loop, started, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        started.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
