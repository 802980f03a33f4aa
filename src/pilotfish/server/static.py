"""The playground's files, under a policy that lets a page load nothing from anywhere else."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

__all__ = ["add_page"]

_FOLDER = Path(__file__).parent / "page"

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    """Static files with the page's headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower().encode() for name in _HEADERS}
                kept = [item for item in message["headers"] if item[0] not in names]
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = kept + added
            await send(message)

        await super().__call__(scope, receive, send_with_headers)


def add_page(app: FastAPI, folder: Path = _FOLDER) -> None:
    """Serve the page at ``/`` and its files under ``/page``, if there are any."""
    index = folder / "index.html"
    if not index.is_file():
        return

    async def page() -> Response:
        return FileResponse(index, headers=_HEADERS)

    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.mount("/page", _Files(directory=folder), name="page")
