"""A server in a process of its own for benchmarks, what the system says of it, and a client that costs next to nothing.

The client is plain asyncio. On a machine where client and server share the CPUs, a library's work for each chunk would
be a good part of what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_START_TIMEOUT = 600.0
"""Seconds for loading a model, which may be converted first."""

_STOP_TIMEOUT = 60.0


class ServerProcess:
    """A server that listens.

    Args:
        url: without ``/v1``.
        pid: of its process; None: not known, so that nothing can be said of its memory and threads.
        log: file of what it writes to stderr; None: not known.
    """

    def __init__(self, url: str, pid: int | None = None, log: Path | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.pid = pid
        self.log = log
        parts = urllib.parse.urlsplit(self.url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)

    def get(self, path: str) -> bytes:
        """The body of a GET that is answered with 200."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=60) as response:
            return bytes(response.read())

    def metrics(self) -> dict[str, float]:
        """What ``/metrics`` says, by name without prefix; labels other than the model's are part of the name."""
        return parse_metrics(self.get("/metrics").decode())

    def rss(self) -> int:
        """Bytes of memory that the process has in RAM; 0 if it is not known."""
        if self.pid is None:
            return 0
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        return 1024 * int(found[1]) if found else 0

    def loop_cpu(self) -> float:
        """CPU seconds that the event loop's thread, the process' first one, has used; NaN if it is not known."""
        if self.pid is None:
            return float("nan")
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def serving(model: str, options: Sequence[str], log: Path) -> Iterator[ServerProcess]:
    """``pilotfish serve`` on a free port of this machine, until the end of the block.

    Args:
        model: what it serves.
        options: of the command, without the port.
        log: file for its stderr.

    Raises:
        RuntimeError: it ended, or did not listen in time; with the end of its log.
    """
    program = "from pilotfish.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", model, "--port", "0", *options]
    # SIGTERM ends a program without its finally clauses, and the server would outlive it.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        yield ServerProcess(_url_of(process, log), process.pid, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def _url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text(errors="replace")
        found = re.search(r"^serving .* at (http://\S+)/v1", text, re.MULTILINE)
        if found:
            with contextlib.suppress(OSError), urllib.request.urlopen(found[1] + "/health", timeout=10):
                return found[1]
        time.sleep(0.1)
    process.kill()
    process.wait()
    raise RuntimeError(f"the server did not start; its log ends with:\n{log.read_text(errors='replace')[-2000:]}")


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format as {name: value}: without ``pilotfish:`` and the label ``model_name``."""
    values = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'model_name="[^"]*",?', "", name.removeprefix("pilotfish:")).replace(",}", "}")
            values[name.removesuffix("{}")] = float(value)
    return values


@dataclass(slots=True)
class Reply:
    """One response as it came.

    Attributes:
        parts: (when by ``time.perf_counter``, bytes) of each read.
        start: when the request was sent.
    """

    start: float = 0.0
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Of the response; 0 if there is none."""
        head = b"".join(data for _, data in self.parts)[:32]
        return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.") and head.count(b" ") > 1 else 0

    @property
    def body(self) -> bytes:
        """As the server wrote it, without the transfer's chunks."""
        head, _, rest = b"".join(data for _, data in self.parts).partition(b"\r\n\r\n")
        return dechunk(rest) if b"transfer-encoding: chunked" in head.lower() else rest

    @property
    def json(self) -> Any:
        """The body of a response that does not stream."""
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The objects of an event stream, in order.

        Raises:
            ValueError: it does not end in ``[DONE]``, or one is not JSON.
        """
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        if not lines or lines[-1] != b"[DONE]":
            raise ValueError(f"the stream ends with {lines[-1][:200] if lines else b''!r}, not with [DONE]")
        return [json.loads(line) for line in lines[:-1]]

    def span(self) -> tuple[float, float]:
        """When a stream's first and last text came."""
        times = [when for when, data in self.parts if b"data: " in data]
        return times[0], times[-1]


def dechunk(data: bytes) -> bytes:
    """The content of a chunked transfer, as far as it came."""
    parts = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size or b"0", 16)
        if length == 0:
            break
        parts.append(rest[:length])
        data = rest[length + 2 :]
    return b"".join(parts)


class _Reader(asyncio.Protocol):
    """Keeps what comes, and when."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reply.parts.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_bytes(path: str, body: Mapping[str, Any] | bytes, content_type: str = "application/json") -> bytes:
    """A POST after whose response the server closes the connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def post(address: tuple[str, int], path: str, body: Mapping[str, Any] | bytes, **more: str) -> Reply:
    """Send a request and read the response to its end."""
    reply = Reply()
    transport, reader = await asyncio.get_running_loop().create_connection(lambda: _Reader(reply), *address)
    try:
        reply.start = time.perf_counter()
        transport.write(request_bytes(path, body, **more))
        await reader.done
    finally:
        transport.close()
    return reply


async def leave(address: tuple[str, int], data: bytes, ending: str, rng: random.Random) -> None:
    """Send a request, or a part of it, and go at a random time: in the queue, in prefill, or while tokens come.

    Args:
        address: of the server.
        data: the request.
        ending: how: close, reset, half-close, or cut body.
        rng: when.
    """
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(data[: rng.randrange(1, len(data))] if ending == "cut body" else data)
        await writer.drain()
        await asyncio.sleep(rng.choice([0.0, 0.01, rng.uniform(0.0, 0.5), rng.uniform(0.0, 3.0)]))
        if ending == "half-close":
            writer.write_eof()  # the server must take this for the end, and close its side
            while await reader.read(65536):
                pass
        elif ending == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    finally:
        writer.close()


async def read_slowly(address: tuple[str, int], data: bytes) -> Reply:
    """Send a request and read the response a few bytes at a time."""
    reply = Reply(time.perf_counter())
    reader, writer = await asyncio.open_connection(*address, limit=256)
    try:
        writer.write(data)
        while part := await reader.read(512):
            reply.parts.append((time.perf_counter(), part))
            await asyncio.sleep(0.05)
    finally:
        writer.close()
    return reply
