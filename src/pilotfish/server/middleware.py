"""What every request passes before a route sees it: its id, its origin, the key, the size of its body. Plain ASGI.

Starlette's own base class for middleware would put a queue between a stream and its client.
"""

from __future__ import annotations

import hmac
import logging
import uuid
from collections import Counter

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.server.errors import ApiError

__all__ = ["BodyLimit", "Cors", "CountErrors", "ErrorResponse", "KeyCheck", "Refusal", "RequestId"]

logger = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/", "/health", "/favicon.ico"})
"""Served without a key: what load balancers ask, and the page that asks a person for the key."""

_OPEN_PREFIX = "/page/"


class ErrorResponse(Response):
    """A whole response with an error object.

    Args:
        error: whose.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.json(), error.status, error.headers, "application/json")
        self.error = error


class Refusal(ErrorResponse):
    """The response to a request that the engine has not taken, and its line of log."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.error
        fields = {"path": scope["path"], "status": error.status, "param": error.param, "error": error.message}
        logger.log(logging.WARNING if error.status >= 500 else logging.INFO, "refused", extra={"fields": fields})
        await super().__call__(scope, receive, send)


class CountErrors:
    """Counts responses with an error's status, whoever gives them.

    Args:
        app: what comes next.
        errors: responses by status.
    """

    def __init__(self, app: ASGIApp, errors: Counter[int]) -> None:
        self._app = app
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def counting(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if message["status"] >= 400:
                    self._errors[message["status"]] += 1
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:
            self._errors[500] += not started  # what nobody foresaw is answered outside all middleware
            raise


class Cors(CORSMiddleware):
    """Lets pages of named origins in; what it refuses gets an error object as everything does."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser's question whether a page may call."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        origin, method = request_headers["origin"], request_headers["access-control-request-method"]
        message = (
            f"A page of {origin[:99]!r} may not send {method[:20]!r} here: {bytes(response.body).decode()}. It must be "
            f"of {' or '.join(self.allow_origins)} (--cors-origin) and send {' or '.join(self.allow_methods)}."
        )
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return Refusal(ApiError(response.status_code, message, code="cors_refused", headers=headers))


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
            await Refusal(error)(scope, receive, send)
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
            await Refusal(self._too_long())(scope, receive, send)
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
