"""Access control of the engine servers: every route needs the run's token.

vLLM's own --api-key leaves the weight, pause and RPC routes open; this ASGI middleware
(`--middleware megatron_cgrpo.rollout.middleware.TokenGuard`) stands before all of them.
"""

from __future__ import annotations

import hmac
import os

TOKEN_VARIABLE = "CGRPO_ENGINE_TOKEN"


class TokenGuard:
    """Answers 401 unless the request carries `Authorization: Bearer <token>`.

    Raises:
        RuntimeError: at server start, when no token is set.
    """

    def __init__(self, app) -> None:
        self._app = app
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: refusing to serve without a token")
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "http" and hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "missing or wrong token"}'})
