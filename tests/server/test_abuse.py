"""A running server under clients that vanish, dawdle, and send nonsense; a normal request afterwards always works."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotfish.engine.engine import Engine
from pilotfish.server.errors import ApiError
from pilotfish.server.stream import RequestStream
from servers import RunningServer, letters_engine, make_host, running, wait_for

BODY: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def slow_engine(**settings: Any) -> Engine:
    """Each step takes a while, so that clients can go at any point of it."""
    engine = letters_engine(**{"max_num_seqs": 4, "max_num_batched_tokens": 8} | settings)
    step, pause = engine.step, threading.Event()

    def slow() -> Any:
        pause.wait(0.004)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    return engine


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_host(slow_engine), max_request_bytes=100_000) as server:
        yield server


@pytest.fixture(autouse=True)
def _works_afterwards(server: RunningServer) -> Iterator[None]:
    """Whatever a test did: all pages come free, the engine is the same, and a normal request gets its answer."""
    yield
    server.wait_idle()
    assert server.free_pages() == 256 and server.host.num_restarts == 0 and server.host.state == "ready"
    engine = server.host.engine
    assert engine is not None
    engine.pool.check_integrity()
    answer = server.call("POST", "/v1/completions", json=BODY)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 12


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
def test_a_client_that_goes_takes_its_request_with_it(server: RunningServer, way: str, stream: bool) -> None:
    closed: list[RequestStream] = []
    server.host.on_close.append(closed.append)
    for delay in (0, 1, 6):  # in the queue or in prefill; in prefill; in decoding
        engine = server.host.engine
        assert engine is not None
        before = engine.stats.num_steps
        connection = connect(server)
        # More than there is room for at once, so that some wait.
        body = BODY | {"prompt": "ab" * 30, "n": 6, "max_tokens": 60, "stream": stream}
        connection.sendall(request_bytes(body))
        wait_for(lambda: server.host.num_open == 1)
        wait_for(lambda engine=engine, end=before + delay: engine.stats.num_steps >= end)
        if way == "half-close":
            connection.shutdown(socket.SHUT_WR)
            server.wait_idle()
            connection.close()
        elif way == "reset":
            reset(connection)
        else:
            connection.close()
        server.wait_idle()
        error = closed.pop().error
        assert isinstance(error, ApiError) and error.status == 499, "it ran to its end"
    server.host.on_close.remove(closed.append)


def test_64_clients_of_which_half_vanish(server: RunningServer) -> None:
    expected = server.call("POST", "/v1/completions", json=BODY | {"max_tokens": 30}).json()["choices"][0]["text"]
    results: list[str] = []

    def stay() -> None:
        answer = server.call("POST", "/v1/completions", json=BODY | {"max_tokens": 30})
        results.append(answer.json()["choices"][0]["text"])

    def vanish(seed: int) -> None:
        rng = random.Random(seed)
        content = request_bytes(BODY | {"max_tokens": 100, "stream": seed % 4 < 2, "seed": seed})
        with connect(server) as connection:
            connection.sendall(content[: rng.choice([10, len(content) - 5, len(content)])])
            threading.Event().wait(rng.random() * 0.4)
            if seed % 2:
                reset(connection)
            else:
                connection.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=vanish, args=(seed,)) for seed in range(32)]
    threads += [threading.Thread(target=stay) for _ in range(32)]
    random.Random(0).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 32


def test_a_body_that_is_too_long(server: RunningServer) -> None:
    for headers in ({"content-type": "application/json"}, {}):
        answer = server.call("POST", "/v1/completions", content=b"x" * 10_000_000, headers=headers)
        assert answer.status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 50_000

    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        answer = client.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("length", "max_tokens", "status"), [(127, 1, 200), (128, 1, 400), (129, None, 400), (100, 28, 200), (100, 29, 400)]
)
def test_prompts_at_the_end_of_the_context(
    server: RunningServer, length: int, max_tokens: int | None, status: int
) -> None:
    answer = server.call("POST", "/v1/completions", json=BODY | {"prompt": "a" * length, "max_tokens": max_tokens})
    assert answer.status_code == status
    if status == 400:
        message = answer.json()["error"]["message"]
        assert str(length) in message and "128" in message
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_reader_that_dawdles_gets_all_of_it(server: RunningServer) -> None:
    body = BODY | {"stream": True, "max_tokens": 100, "include_speculation_stats": True}
    expected = server.call("POST", "/v1/completions", json=body | {"stream": False}).json()["choices"][0]["text"]
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(request_bytes(body))
        wait_for(lambda: server.host.num_open == 1)
        server.wait_idle()  # the engine does not wait for the reader
        received = b""
        while b"data: [DONE]" not in received:
            piece = connection.recv(512)
            assert piece
            received += piece
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
    | st.sampled_from([0, 1, -1, 1e308, 1e-308, "", "a", "hello", [], {}, [0, 1, 2], ["ab", "c"], {"0": 1.5}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)

FIELDS = [
    "model", "prompt", "messages", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "max_tokens", "max_completion_tokens", "min_tokens",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "seed", "stream",
    "stream_options", "response_format", "guided_regex", "guided_choice", "speculation", "include_speculation_stats",
    "logprobs", "top_logprobs", "best_of", "echo", "tools", "user", "tokens", "nonsense",
]  # fmt: skip

PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.sampled_from(["hello", "a" * 127, [1, 2, 3], ["a", "b"], [[1], [2, 3]]]),
    "messages": st.just([{"role": "user", "content": "hi"}]),
    "n": st.integers(1, 4),
    "temperature": st.sampled_from([0, 0.5, 1, 1e-300, 1e300, 1.7e308]),
    "top_p": st.sampled_from([1e-300, 1e-9, 0.5, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 31, 32, 10**30]),
    "min_p": st.sampled_from([0, 1e-300, 0.5, 1]),
    "presence_penalty": st.sampled_from([-2, 2, 1e-300]),
    "frequency_penalty": st.sampled_from([-2, 2, 0.5]),
    "repetition_penalty": st.sampled_from([1e-300, 1e-30, 0.5, 1, 2, 1e30, 1e300]),
    "logit_bias": st.dictionaries(st.integers(0, 31).map(str), st.sampled_from([-100, 100, 1e-300]), max_size=32),
    "max_tokens": st.integers(1, 20),
    "min_tokens": st.integers(0, 12),
    "stop": st.sampled_from(["a", ["b", "cc"], ["é"]]),
    "stop_token_ids": st.sampled_from([[1], [*range(32)], []]),
    "ignore_eos": st.booleans(),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stream": st.booleans(),
    "logprobs": st.sampled_from([True, 0, 1, 32, 100]),
    "speculation": st.sampled_from([{"enabled": False}, {"num_drafts": 0}, {"num_drafts": 10**9}]),
}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
)
def test_malformed_bodies_are_the_clients_errors(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body)  # with NaN and lone surrogates, as Python writes them
    answer = server.call("POST", path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    body=st.fixed_dictionaries({}, optional=PLAUSIBLE),
)
def test_extreme_values_do_not_stop_the_engine(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    needed = "messages" if "chat" in path else "prompt"
    other = "prompt" if "chat" in path else "messages"
    body = {needed: [{"role": "user", "content": "hi"}] if "chat" in path else "hi"} | body
    body.pop(other, None)
    body.setdefault("max_tokens", 8)
    answer = server.call("POST", path, json=body)
    assert answer.status_code in (200, 400), answer.text
    assert server.host.num_restarts == 0 and server.host.state == "ready"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize"]))
def test_bytes_that_are_no_json(server: RunningServer, content: bytes, path: str) -> None:
    answer = server.call("POST", path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_raw_nonsense_on_the_wire(server: RunningServer) -> None:
    for content in (
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"\xff",
    ):
        with connect(server) as connection:
            connection.sendall(content)
            received = b"".join(iter(lambda connection=connection: connection.recv(4096), b""))  # to the end
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == "invalid_http"
    assert server.call("GET", "/health").status_code == 200
