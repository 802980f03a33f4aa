"""Clients that offer another protocol with a request, on a socket: the server goes on in HTTP/1.1 (RFC 9110, 7.8)."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from servers import RunningServer, running, wait_for

OFFERS = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "websocket": "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n",
    "last": "Connection: Upgrade, close\r\nUpgrade: h2c\r\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def connection(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def head(length: int, offer: str = "") -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{offer}Content-Length: {length}\r\n\r\n"
    ).encode()


def body(prompt: str = "hello") -> bytes:
    return json.dumps({"prompt": prompt, "temperature": 0, "max_tokens": 4}).encode()


def chunked(content: bytes, offer: str) -> bytes:
    lines = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{offer}".encode()
    return b"%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (lines, len(content), content)


def answer(connection: socket.socket, method: str = "POST") -> dict[str, Any]:
    """The next one on the connection; it must be a 200."""
    response = HTTPResponse(connection, method=method)
    response.begin()
    content = response.read()
    assert response.status == 200, content
    result: dict[str, Any] = json.loads(content)
    return result


def num_prompt_tokens(connection: socket.socket) -> int:
    count: int = answer(connection)["usage"]["prompt_tokens"]
    return count


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("cut", ["whole", "head and body", "in the head", "in the body"])
def test_a_request_with_an_offer_is_answered_as_one_without(
    server: RunningServer, connection: socket.socket, offer: str, cut: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, before = body(), head(len(body()), OFFERS[offer])
    place = {"whole": 0, "head and body": len(before), "in the head": 60, "in the body": len(before) + 5}[cut]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if place:
        connection.sendall((before + content)[:place])
        if place >= len(before):  # the server has seen the head by then
            wait_for(lambda: len(server.server.server_state.tasks) == 1)
    connection.sendall((before + content)[place:])
    assert num_prompt_tokens(connection) == 5
    if offer == "last":
        assert connection.recv(1) == b""
    else:
        connection.sendall(head(len(content)) + content)
        assert num_prompt_tokens(connection) == 5
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_chunked_bodies_and_requests_without_one(connection: socket.socket) -> None:
    connection.sendall(chunked(body("sea"), OFFERS["h2c"]))
    assert num_prompt_tokens(connection) == 3
    connection.sendall(f"GET /health HTTP/1.1\r\nHost: x\r\n{OFFERS['h2c']}\r\n".encode())
    assert answer(connection, "GET")["status"] == "ok"


class Buffered:
    """A socket whose answers are read from one buffer, as pipelined ones must be."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def makefile(self, mode: str) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        """Each answer closes what it has read."""


def test_pipelined_requests_with_and_without_offers(connection: socket.socket) -> None:
    prompts = ["a" * length for length in range(1, 13)]
    data = b""
    for i, content in enumerate(map(body, prompts)):
        plain, offered = (head(len(content), offer) + content for offer in ("", OFFERS["h2c"]))
        data += (plain, offered, chunked(content, OFFERS["h2c"]))[i % 3]
    connection.sendall(data)
    pipelined: Any = Buffered(connection)
    assert [num_prompt_tokens(pipelined) for _ in prompts] == [*range(1, 13)]


@pytest.mark.parametrize("target", ["example.org:443", "/v1/completions"])
def test_connect_is_400_and_the_end(connection: socket.socket, target: str) -> None:
    connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\nsecret".encode())
    received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert received.startswith(b"HTTP/1.1 400 ") and b"CONNECT" in received and received.count(b"HTTP/1.1 400") == 1


def test_nonsense_after_an_offer_is_400(connection: socket.socket) -> None:
    connection.sendall(chunked(body(), OFFERS["h2c"]).replace(b"0\r\n\r\n", b"no length\r\n"))
    received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert received.startswith(b"HTTP/1.1 400 ") and b"invalid_http" in received
