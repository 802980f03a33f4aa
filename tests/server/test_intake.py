"""Requests before the engine has them: their places, their slots, their time, and clients that go."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from fake_llm import Letters
from pilotfish.server import intake
from pilotfish.server.host import EngineHost
from servers import RunningServer, letters_engine, make_host, running, wait_for

LONG = 70_000
"""Letters of a prompt whose body counts as long."""


class Gated(Letters):
    """Encoding prompts that begin with x waits until the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.num_begun = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("x"):
            self.num_begun += 1
            assert self.gate.wait(60)
        return super().encode(text)


@pytest.fixture
def tokenizer() -> Iterator[Gated]:
    tokenizer = Gated()
    yield tokenizer
    tokenizer.gate.set()


def gated_host(tokenizer: Gated, **settings: Any) -> EngineHost:
    engine = letters_engine(max_num_seqs=2)
    engine.tokenizer = tokenizer  # type: ignore[assignment]
    return make_host(engine=engine, **settings)


def send(server: RunningServer, prompt: str, path: str = "/v1/completions") -> socket.socket:
    """A connection on which a request has been sent."""
    content = json.dumps({"prompt": prompt} | ({"max_tokens": 4} if "v1" in path else {})).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + content)
    return connection


def answer(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(4096), b""))


def ask(server: RunningServer, prompt: str = "a") -> int:
    return server.call("POST", "/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_short_requests_do_not_wait_behind_long_ones(tokenizer: Gated, path: str) -> None:
    with running(gated_host(tokenizer)) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(send(server, "x" * LONG, path)) for _ in range(6)]
        wait_for(lambda: server.host.load.num_waiting == 6)
        assert ask(server) == 200
        assert server.call("POST", "/tokenize", json={"prompt": "hello"}).json()["count"] == 5
        assert 0 < tokenizer.num_begun < 6, "all are prepared at once"
        assert server.call("GET", "/health").json()["waiting"] == 6
        tokenizer.gate.set()
        statuses = {answer(connection).split()[1] for connection in held}
        assert statuses == ({b"200"} if path == "/tokenize" else {b"400"})  # too long for the context


def test_requests_in_preparation_have_a_place_in_the_queue(tokenizer: Gated) -> None:
    with running(gated_host(tokenizer, max_queue=3)) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(send(server, "x")) for _ in range(5)]
        wait_for(lambda: server.host.load.num_waiting == 5)
        for path in ("/v1/completions", "/tokenize"):
            refused = server.call("POST", path, json={"prompt": "a"})
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            assert "5 sequences run or wait, and at most 5 may" in refused.json()["error"]["message"]
        assert server.call("GET", "/health").json()["waiting"] == 5
        tokenizer.gate.set()
        assert {answer(connection).split()[1] for connection in held} == {b"200"}
        assert ask(server) == 200 and server.host.load.num_waiting == 0


class Body(bytes):
    """One that is counted while it is kept."""

    num_kept = 0

    def __init__(self, _: bytes) -> None:
        Body.num_kept += 1

    def __del__(self) -> None:
        Body.num_kept -= 1


@pytest.mark.parametrize("way", ["close", "reset"])
def test_a_client_that_goes_gives_up_its_place_and_its_body(
    tokenizer: Gated, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def counted(request: Request) -> bytes:
        return Body(await read(request))

    read = intake._body
    monkeypatch.setattr(intake, "_body", counted)
    with running(gated_host(tokenizer, max_queue=20)) as server:
        connections = [send(server, "x" * LONG) for _ in range(12)]
        wait_for(lambda: server.host.load.num_waiting == 12)
        assert Body.num_kept == 12
        for connection in connections:
            if way == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        wait_for(lambda: server.host.load.num_waiting == 0)
        begun = tokenizer.num_begun
        assert 0 < begun < 12
        wait_for(lambda: Body.num_kept == begun)
        tokenizer.gate.set()
        assert ask(server, "x") == 200
        wait_for(lambda: Body.num_kept == 0)
        assert tokenizer.num_begun == begun + 1, "what nobody waits for was prepared"
        metrics = server.call("GET", "/metrics").text
        assert re.search(r'http_errors_total\{.*status="499".*\} 12\.0', metrics)


def test_the_time_of_a_request_begins_when_it_comes(tokenizer: Gated) -> None:
    with running(gated_host(tokenizer, request_timeout=0.2)) as server:
        refused = server.call("POST", "/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 504 and refused.json()["error"]["code"] == "request_timeout"
        assert server.host.load.num_waiting == 0


def test_stopping_ends_requests_in_preparation_and_unsent_ones_with_503(
    tokenizer: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    """The gate stays shut: what is in a thread is not waited for."""
    with running(gated_host(tokenizer, shutdown_timeout=0.1)) as server:
        held = [send(server, "x" * length) for length in [LONG] * 5 + [1] * 6]
        wait_for(lambda: server.host.load.num_waiting == 11)
        host, port = server.url.removeprefix("http://").split(":")
        unsent = socket.create_connection((host, int(port)), timeout=60)
        unsent.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        wait_for(lambda: len(server.server.server_state.tasks) == 12)
        server.server.should_exit = True
        for connection in [*held, unsent]:
            received = answer(connection)
            assert received.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in received
            assert b"retry-after: " in received
    assert server.host.state == "stopped" and not tokenizer.gate.is_set()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
