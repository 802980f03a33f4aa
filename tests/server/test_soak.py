"""The load of ``benchmarks/server_soak.py``: what it sends, that it tells right from wrong, and that it ends."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.server_process import Reply, ServerProcess, dechunk, parse_metrics, post
from benchmarks.soak_requests import CHAT, Call, Requests, WrongAnswer, joined, texts_of
from servers import running

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "pilot"}], "temperature": 0, "max_tokens": 12}


def send(server: ServerProcess, body: dict[str, Any] | bytes, path: str = CHAT) -> Reply:
    return asyncio.run(post(server.address, path, body))


def test_a_seed_draws_the_same_calls_of_every_kind() -> None:
    def draw(seed: int) -> list[Call]:
        requests = Requests(seed, 1024)
        return [requests.next() for _ in range(600)]

    calls = draw(5)
    plain = [(call.kind, call.path, call.body, call.ending) for call in calls]
    assert plain == [(call.kind, call.path, call.body, call.ending) for call in draw(5)]
    assert plain != [(call.kind, call.path, call.body, call.ending) for call in draw(6)]
    assert {"greedy", "seeded", "n=3", "schema, new", "schema, known", "too long", "malformed"} <= {
        c.kind for c in calls
    }
    assert {"read", "close", "reset", "half-close", "cut body", "slow"} == {call.ending for call in calls}
    # Nothing that is provoked may be right too, and the other way round.
    assert all((200 in call.statuses) == (call.statuses == (200,)) for call in calls)


def test_what_repeats_asks_for_the_same_output() -> None:
    requests, asked = Requests(1, 1024), dict[str, set[str]]()
    free = {"stream", "stream_options", "speculation", "include_speculation_stats"}  # change how it comes, not what
    for _ in range(2_000):
        call = requests.next()
        if call.repeats is not None:
            assert isinstance(call.body, dict)
            same = json.dumps({name: value for name, value in call.body.items() if name not in free})
            asked.setdefault(call.repeats, set()).add(same)
    assert len(asked) > 20 and all(len(bodies) == 1 for bodies in asked.values())


def answer(text: str, reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None, **more}]}


def check_of(kind: str, content: dict[str, Any], **wanted: Any) -> None:
    """Check an answer as that of the first call of this kind, whose body has what is wanted."""
    requests = Requests(0, 1024)
    for _ in range(10_000):
        call = requests.next()
        if call.kind == kind and isinstance(call.body, dict) and wanted.items() <= call.body.items():
            assert call.check is not None
            call.check(content)
            return
    raise AssertionError(f"no call of {kind} with {wanted}")


@pytest.mark.parametrize(
    ("kind", "content", "wanted"),
    [
        ("greedy", answer("text", ""), {}),
        ("greedy", {"choices": []}, {}),
        ("greedy", answer("half \ufffd", "length"), {}),
        ("logprobs", answer("a", logprobs={"token_logprobs": [-1.0, 0.5]}), {}),
        ("stop strings", answer("Why?"), {"stop": [".", "?"]}),
        ("regex", answer("maybe"), {"structured_outputs": {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}}),
        ("schema, known", answer("{}"), {}),
        ("schema, new", answer("no JSON"), {}),
        ("tokenise", {"count": 2, "tokens": [1]}, {}),
        ("wrong field", answer("text"), {}),
    ],
)
def test_a_wrong_answer_is_seen(kind: str, content: dict[str, Any], wanted: dict[str, Any]) -> None:
    with pytest.raises(WrongAnswer):
        check_of(kind, content, **wanted)


@pytest.mark.parametrize(
    ("kind", "content", "wanted"),
    [
        ("greedy", answer("text", "length"), {}),
        ("logprobs", answer("a", logprobs={"token_logprobs": [-1.0, 0.0]}), {}),
        ("regex", answer("2026-01-31"), {"structured_outputs": {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}}),
        ("regex", answer("2026-0", "length"), {"structured_outputs": {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}}),
        ("schema, new", answer('{"cut', "length"), {}),
        ("tokenise", {"count": 1, "tokens": [1]}, {}),
        ("too long", {"error": {"message": "m", "type": "t", "param": None, "code": None}}, {}),
    ],
)
def test_a_right_answer_passes(kind: str, content: dict[str, Any], wanted: dict[str, Any]) -> None:
    check_of(kind, content, **wanted)


def test_a_stream_gives_the_texts_of_the_whole() -> None:
    with running() as running_server:
        server = ServerProcess(running_server.url)
        whole = send(server, BODY | {"n": 2, "seed": 1, "temperature": 1})
        stream = send(server, BODY | {"n": 2, "seed": 1, "temperature": 1, "stream": True})
        refused = send(server, b"{")
        metrics = server.metrics()
    assert whole.status == stream.status == 200
    assert texts_of(whole.json) == texts_of(joined(stream.events)) and len(texts_of(whole.json)) == 2
    first, last = stream.span()
    assert stream.start <= first <= last
    assert refused.status == 400 and refused.json["error"]["message"]
    assert metrics['request_success_total{finished_reason="length"}'] == 4
    assert metrics["kv_cache_usage_perc"] == 0 and metrics["time_to_first_token_seconds_count"] == 2


def test_a_stream_that_ends_in_an_error_is_wrong() -> None:
    with pytest.raises(WrongAnswer, match="the engine failed"):
        joined([{"error": {"message": "the engine failed"}}])


@pytest.mark.parametrize(
    "data", [b"5\r\nhello\r\n3\r\n, w\r\n0\r\n\r\n", b"8\r\nhello, w\r\n", b"5\r\nhello\r\n3\r\n, w\r\n4\r\n"]
)
def test_chunks_of_a_transfer(data: bytes) -> None:
    assert dechunk(data) == b"hello, w"


def test_a_stream_without_an_end_is_not_taken_for_a_whole_one() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'data: {"choices": []}\n\n'
    reply = Reply(parts=[(0.0, head), (1.0, b"%x\r\n%s\r\n" % (len(body), body))])
    assert reply.status == 200
    with pytest.raises(ValueError, match="DONE"):
        _ = reply.events


def test_metrics_are_named_without_prefix_and_model() -> None:
    text = (
        "# HELP pilotfish:x_total X.\n"
        'pilotfish:x_total{model_name="m"} 3.0\n'
        'pilotfish:y_total{model_name="m",position="1"} 2.0\n'
        "process_open_fds 9.0\n"
    )
    assert parse_metrics(text) == {"x_total": 3.0, 'y_total{position="1"}': 2.0, "process_open_fds": 9.0}


@contextmanager
def silent() -> Iterator[tuple[str, int]]:
    """A listener that closes each connection without a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[:2]
        thread.join()


def test_no_response_is_status_zero() -> None:
    with silent() as address:
        assert asyncio.run(post(address, CHAT, BODY)).status == 0


# The benchmarks are programs whose folder is on the path when they run.


@pytest.fixture
def soak_module(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Any:
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "benchmarks")
    import server_soak

    return server_soak


def sample(module: Any, when: float, rss: int) -> Any:
    return module.Sample(when, rss, 0, 0, 0, 0)


def test_growth_is_from_the_end_of_the_warm_up_to_the_end(soak_module: Any) -> None:
    sizes = {**dict.fromkeys(range(20), 10), **dict.fromkeys(range(20, 60), 100), **dict.fromkeys(range(60, 101), 104)}
    samples = [sample(soak_module, when, rss) for when, rss in sizes.items()]
    assert soak_module.growth(samples) == (100, 104)
    assert soak_module.growth(samples[:1]) == (10, 10)


GOOD = {
    "num_requests_running": 0.0, "num_requests_waiting": 0.0, 'request_success_total{finished_reason="error"}': 0.0,
    "kv_cache_usage_perc": 0.0, "engine_restarts_total": 0.0, "num_preemptions_total": 3.0,
    "prefix_cache_hits_total": 9.0,
}  # fmt: skip


def failures(module: Any, *, log: str = "", sizes: tuple[int, int] = (100, 105), **changed: float) -> int:
    state = module.Soak(ServerProcess("http://127.0.0.1:1"), repeated=1)
    state.samples = [sample(module, when, sizes[when > 50]) for when in range(101)]
    checks = module.verdicts(state, GOOD | changed, {"status": "ok"}, log)
    return sum(not passed for *_, passed in checks)


def test_a_run_passes_only_if_everything_is_as_it_was(soak_module: Any) -> None:
    assert failures(soak_module) == 0
    assert failures(soak_module, sizes=(100, 106)) == 1
    assert failures(soak_module, log="2026-01-31T12:00:01.250Z ERROR the engine failed") == 1
    assert failures(soak_module, **{'request_success_total{finished_reason="error"}': 1}) == 1
    for name, value in [("kv_cache_usage_perc", 0.01), ("engine_restarts_total", 1), ("num_requests_running", 1)]:
        assert failures(soak_module, **{name: value}) == 1


def test_clients_end_and_leave_nothing_behind(soak_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short load of what an engine of letters can answer, in every way of going away."""
    kinds: list[Any] = ["read", "slow", "close", "reset", "half-close", "cut body"]

    def draw(self: Requests) -> Call:
        ending = kinds[self.counter % len(kinds)]  # type: ignore[attr-defined]
        self.counter += 1  # type: ignore[attr-defined]
        stream = ending == "slow" or self.counter % 4 < 2  # type: ignore[attr-defined]
        repeats = "greedy" if ending in ("read", "slow") else None
        return Call("greedy", CHAT, BODY | {"stream": stream}, repeats=repeats, ending=ending)

    monkeypatch.setattr(Requests, "next", draw)
    with running() as server:
        state = soak_module.Soak(ServerProcess(server.url))

        async def load(number: int) -> None:
            requests = Requests(number, 128)
            requests.counter = number  # type: ignore[attr-defined]
            calls = iter(range(12))
            # The clock says that time is up when the calls are.
            await state.client(requests, random.Random(number), lambda: next(calls, None) is None)

        async def main() -> None:
            await asyncio.gather(*(load(number) for number in range(4)))

        asyncio.run(main())
        server.wait_idle()
        assert server.free_pages() == 256
    assert state.problems == [] and state.repeated > 0
    tally = state.tallies["greedy"]
    assert tally.sent == 48 and tally.right + tally.left == 48 and min(tally.right, tally.left) > 10
