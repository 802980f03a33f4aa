"""The HTTP application: routes, errors, and what it starts and stops with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from pilotfish import __version__
from pilotfish.errors import RequestError
from pilotfish.server.errors import ApiError, from_request_error
from pilotfish.server.generation import Generation
from pilotfish.server.host import EngineHost
from pilotfish.server.intake import Intake
from pilotfish.server.logs import summarise
from pilotfish.server.metrics import Metrics
from pilotfish.server.middleware import BodyLimit, Cors, CountErrors, ErrorResponse, KeyCheck, Refusal, RequestId
from pilotfish.server.openapi import describe, takes
from pilotfish.server.prepare import Prepared, Preparer
from pilotfish.server.protocol.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pilotfish.server.settings import ServerSettings
from pilotfish.server.static import add_page
from pilotfish.server.tokens import Tokens

__all__ = ["create_app"]


def create_app(host: EngineHost, settings: ServerSettings) -> FastAPI:
    """The application. It starts the host with its lifespan and stops it at the end.

    Args:
        host: not started yet.
        settings: of the HTTP side.
    """
    # FastAPI's own documentation pages load scripts from elsewhere.
    app = FastAPI(
        title="Pilotfish",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a POST that is sent elsewhere loses its body with some clients
        lifespan=_lifespan(host, settings),
    )
    server = _Server(host, settings)
    _add_routes(app, server)
    if settings.page:
        add_page(app)
    _answer_head(app)
    describe(app)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(BodyLimit, max_bytes=settings.max_request_bytes)
    app.add_middleware(KeyCheck, api_key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            Cors,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestId)
    app.add_middleware(CountErrors, errors=server.metrics.http_errors)
    return app


class _Server:
    """What the routes need."""

    def __init__(self, host: EngineHost, settings: ServerSettings) -> None:
        self.host = host
        self.settings = settings
        self.created = int(time.time())
        self.preparer = Preparer(host, settings, _fingerprint(host, settings))
        self.tokens = Tokens(host, self.preparer.check_model)
        self.metrics = Metrics(host, settings.model_name)
        self._intake = Intake(host)

    async def generate(self, request: Request, prepare: Callable[[bytes], Prepared]) -> Response:
        call, arrived = await self._intake.prepared(request, prepare)
        return Generation(self.host, call, arrived)

    async def answer(self, request: Request, work: Callable[[bytes], dict[str, Any]]) -> Response:
        response, _ = await self._intake.prepared(request, lambda raw: JSONResponse(work(raw)))
        return response

    def model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "pilotfish",
            "root": self.settings.model_name,
            "max_model_len": self.host.max_model_len,
        }


def _add_routes(app: FastAPI, server: _Server) -> None:
    host, preparer, tokens = server.host, server.preparer, server.tokens

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await server.generate(request, preparer.chat)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Complete one or more prompts."""
        return await server.generate(request, preparer.completion)

    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        return await server.answer(request, tokens.tokenize)

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await server.answer(request, tokens.detokenize)

    @app.get("/v1/models")
    async def models() -> Response:
        """The names under which the model is served."""
        cards = [server.model_card(name) for name in server.settings.model_names]
        return JSONResponse({"object": "list", "data": cards})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One of them."""
        preparer.check_model(model)
        return JSONResponse(server.model_card(model))

    @app.get("/health")
    async def health() -> Response:
        """Whether requests are taken: 200 or 503."""
        load, ready = host.load, host.state == "ready"
        body = {
            "status": "ok" if ready else host.state,
            "reason": host.reason or None,
            "running": load.num_running,
            "waiting": load.num_waiting,
            "restarts": host.num_restarts,
        }
        return JSONResponse(body, 200 if ready else 503, None if ready else {"Retry-After": "1"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _answer_head(app: FastAPI) -> None:
    """Let HEAD go wherever GET goes; the HTTP server leaves the body out."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def _lifespan(
    host: EngineHost, settings: ServerSettings
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await host.start()
        summary = asyncio.create_task(summarise(host, settings.summary_interval)) if settings.summary_interval else None
        try:
            yield
        finally:
            if summary is not None:
                summary.cancel()
            await host.stop()

    return lifespan


def _fingerprint(host: EngineHost, settings: ServerSettings) -> str:
    """A name for all that decides which tokens a seed gives."""
    config = host.config
    facts = [__version__, settings.model_name, config.dtype, config.backend, config.isa, str(config.speculation)]
    return f"fp_{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:10]}"


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Refusal(error)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return await _on_api_error(request, from_request_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path[:200]}"
    messages = {404: f"{path}: there is no such path here.", 405: f"{path}: this path does not take the method."}
    message = messages.get(error.status_code, str(error.detail))
    codes = {404: "not_found", 405: "method_not_allowed"}
    return await _on_api_error(
        request, ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers)
    )


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client went away while it sent its request: nobody reads this."""
    return Response(status_code=400)


async def _on_bug(request: Request, error: Exception) -> Response:
    """An error that nobody foresaw; Starlette logs it with its traceback."""
    message = "The server made an error with this request. Its log has more."
    return ErrorResponse(ApiError(500, message, code="internal_error"))
