"""What every request passes before a route sees it: the key, the size of its body, its id. Plain ASGI.

Starlette's own base class for middleware would put a queue between a stream and its client.
"""

from __future__ import annotations

import hmac
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.server.errors import ApiError

__all__ = ["BodyLimit", "KeyCheck", "RequestId", "send_error"]

_OPEN_PATHS = frozenset({"/", "/health", "/favicon.ico"})
"""Served without a key: what load balancers ask, and the page that asks a person for the key."""

_OPEN_PREFIX = "/page/"


class RequestId:
    """Gives each request an id, which its response carries as ``x-request-id``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


class KeyCheck:
    """Refuses requests without the key.

    Args:
        app: what comes next.
        api_key: the key. None: every request passes.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key is not None and not self._passes(scope, self._key):
            message = "The API key is missing or wrong: send the header 'Authorization: Bearer KEY'."
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await send_error(error, send)
            return
        await self._app(scope, receive, send)

    def _passes(self, scope: Scope, key: bytes) -> bool:
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        # In constant time: how far a guess is right must not show.
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key)


class BodyLimit:
    """Refuses bodies that are too long, by what they say and by what comes, without keeping them.

    Args:
        app: what comes next.
        max_bytes: longest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_bytes):
            await send_error(self._too_long(), send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_long()
            return message

        await self._app(scope, limited, send)

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"The request body has more than {self._max_bytes} bytes. Send less, or start the server with a larger "
            "--max-request-bytes.",
            code="request_too_large",
        )


async def send_error(error: ApiError, send: Send) -> None:
    """A whole response with an error object."""
    body = error.json()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
