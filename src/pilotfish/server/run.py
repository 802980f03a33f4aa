"""Runs the application under uvicorn until it is told to stop, and lets requests under way finish."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pilotfish.errors import ConfigError
from pilotfish.server.errors import bad_request
from pilotfish.server.host import EngineHost

__all__ = ["Server", "bind", "url_of"]

_GRACE = 5.0
"""Seconds beyond the host's ``shutdown_timeout`` for clients to read what the end of their request was."""

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before a model is loaded, so that a busy port shows at once.

    Raises:
        ConfigError: no such address, or the port is in use or not allowed.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port={port}: must be from 0 (any free port) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={host!r}: is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port={port}: {host} cannot be listened on: {error.strerror or error}. Choose another with --port or "
            "--host."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    name, port = listener.getsockname()[:2]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP, with an error object for what is none, and deaf to offers of another protocol.

    A client may offer an upgrade with any request (curl and Java do, to h2c), and a server that does not know the
    protocol goes on as if it had not (RFC 9110, 7.8). The parser ends such a request with its head, and uvicorn then
    loses its body (its issue 2722). Here the head is parsed again without the offer.
    """

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self.send_400_response("CONNECT is for proxies, and this is none")
                    return
                data = self._head_without_offer() + data[offer.args[0] :]
                # Not the old one, which takes no more after the head of a connection's last request.
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            except HttpParserError as error:
                self.send_400_response(str(error))
                return

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head will come again."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End its body, unless its head will come again."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that cannot be parsed, and close."""
        self.logger.warning("invalid HTTP: %s", msg)
        body = bad_request(f"This is not HTTP/1.1 as it should be: {msg}", code="invalid_http").json()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class Server(uvicorn.Server):
    """uvicorn, with the engine's host told to drain as soon as the server has to stop.

    Args:
        app: the application.
        host: its engine's.
    """

    def __init__(self, app: FastAPI, host: EngineHost) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=int(host.settings.shutdown_timeout + _GRACE) + 1,
        )
        super().__init__(config)
        self._host = host

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let those under way finish, then stop."""
        self._host.begin_drain()
        await super().shutdown(sockets)
