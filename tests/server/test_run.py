"""Starting and stopping: the program, signals, ports; and streams that an error ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pilotfish.cli.app import run
from pilotfish.errors import ConfigError
from pilotfish.server.run import bind, url_of
from servers import letters_engine, make_host, running, wait_for

BODY: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True}


def test_an_error_after_the_first_tokens_is_the_last_event_of_the_stream() -> None:
    engine = letters_engine(None)
    step, read = engine.step, threading.Event()

    def fail() -> Any:
        if engine.stats.num_steps == 4:
            assert read.wait(60)
            raise RuntimeError("a fault")
        return step()

    engine.step = fail  # type: ignore[method-assign]
    with running(make_host(engine=engine)) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        with client.stream("POST", "/v1/completions", json=BODY, timeout=60) as response:
            assert response.status_code == 200
            lines = []
            for line in response.iter_lines():
                read.set()
                lines += [line] if line else []
        assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_failed"
        wait_for(lambda: server.host.state == "ready")
        assert client.post("/v1/completions", json=BODY | {"stream": False}).status_code == 200


def test_stopping_lets_a_stream_finish_and_takes_no_more() -> None:
    engine = letters_engine(None)
    step, gate = engine.step, threading.Event()

    def wait() -> Any:
        if engine.stats.num_steps == 4:
            assert gate.wait(60)
        return step()

    engine.step = wait  # type: ignore[method-assign]
    with running(make_host(engine=engine)) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        with client.stream("POST", "/v1/completions", json=BODY, timeout=60) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.server.should_exit = True
            wait_for(lambda: server.host.state == "draining")
            with pytest.raises(httpx.ConnectError):
                server.call("GET", "/health")
            gate.set()
            rest = [line for line in lines if line]
        assert first.startswith("data: {") and rest[-1] == "data: [DONE]"
    assert server.host.state == "stopped" and not engine.has_unfinished


def test_a_request_that_is_still_being_sent_when_it_stops_is_503() -> None:
    engine = letters_engine(None)
    step, gate = engine.step, threading.Event()

    def wait() -> Any:
        assert gate.wait(60)
        return step()

    engine.step = wait  # type: ignore[method-assign]
    content = json.dumps(BODY).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    with running(make_host(engine=engine)) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=60) as first:
            first.sendall(f"{head}\r\n\r\n".encode() + content)
            wait_for(lambda: server.host.num_open == 1)
            with socket.create_connection((address[0], int(address[1])), timeout=60) as second:
                second.sendall(f"{head}\r\n\r\n".encode() + content[:5])
                wait_for(lambda: len(server.server.server_state.tasks) == 2)
                server.server.should_exit = True
                wait_for(lambda: server.host.state == "draining")
                second.sendall(content[5:])
                refused = b"".join(iter(lambda: second.recv(4096), b""))
            gate.set()
            answered = b"".join(iter(lambda: first.recv(4096), b""))
    assert refused.startswith(b"HTTP/1.1 503 ") and b"it is shutting down" in refused
    assert answered.startswith(b"HTTP/1.1 200 ") and answered.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_busy_port_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=rf"port={port}: 127.0.0.1 cannot be listened on"):
            bind("127.0.0.1", port)
        assert run(["serve", "no-such-model", "--port", str(port)]) == 2
    error = capfd.readouterr().err
    assert len(error.splitlines()) == 1 and f"port={port}" in error


@pytest.mark.parametrize(
    ("host", "port", "match"), [("127.0.0.1", 70_000, "port="), ("no.such.host.invalid", 0, "host=")]
)
def test_wrong_addresses(host: str, port: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        bind(host, port)


@pytest.mark.parametrize(
    "args",
    [
        ["--max-queue", "-1"],
        ["--max-request-bytes", "much"],
        ["--log-level", "loud"],
        ["--log-format", "xml"],
        ["--api-key", ""],
        ["--request-timeout", "-1"],
        ["--scheme", "magic"],
    ],
)
def test_wrong_options_are_one_line(args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "no-such-model", "--port", "0", *args]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.fixture(scope="module")
def program() -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """``pilotfish serve`` of the built-in model, its URL, and what it logs."""
    args = ["serve", "smollm2-135m", "--port", "0", "--max-model-len", "256", "--threads", "1", "--log-format", "json"]
    code = "import sys; from pilotfish.cli import main; main()"
    lines: list[str] = []
    with subprocess.Popen([sys.executable, "-c", code, *args], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr or ())))
        reader.start()
        try:
            wait_for(lambda: any(line.startswith("playground at ") for line in lines) or process.poll() is not None)
            found = re.search(r"serving smollm2-135m at (http://127\.0\.0\.1:\d+)/v1", "".join(lines))
            assert found, lines
            yield process, found[1], lines
        finally:
            process.kill()
            reader.join()


def test_the_program_answers_logs_and_drains_at_sigterm(
    program: tuple[subprocess.Popen[str], str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    process, url, lines = program
    question = "What is the capital of France?"
    assert run(["generate", question, "--max-tokens", "24", "--threads", "1", "--max-model-len", "256"]) == 0
    expected = capfd.readouterr().out.removesuffix("\n")
    with httpx.Client(base_url=url, trust_env=False, timeout=300) as client:
        chat = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
        answer = client.post("/v1/chat/completions", json=chat).json()
        assert answer["choices"][0]["message"]["content"] == expected
        schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
                  "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
        answer = client.post("/v1/chat/completions", json=chat | {"response_format": form}).json()
        assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")
        long = chat | {"max_tokens": 80, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=long) as response:
            events = (line for line in response.iter_lines() if line)
            next(events)
            process.send_signal(signal.SIGTERM)
            assert [*events][-1] == "data: [DONE]"
    assert process.wait(120) == 0
    wait_for(lambda: sum('"message": "request"' in line for line in lines) == 3)
    records = [json.loads(line) for line in lines if line.startswith("{")]
    requests = [record for record in records if record["message"] == "request"]
    assert [record["status"] for record in requests] == [200, 200, 200]
    assert requests[2]["tokens"] == 80 and requests[2]["finish"] == "length" and requests[2]["ttft_ms"] > 0
    assert requests[2]["mean_accepted_length"] > 1 and requests[2]["prompt_tokens"] > 10


def test_ipv6_addresses_are_written_in_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 address")
    with contextlib.closing(listener):
        assert re.fullmatch(r"http://\[::1\]:\d+", url_of(listener))
