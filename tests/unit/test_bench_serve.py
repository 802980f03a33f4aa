"""``pilotfish bench-serve``: against a server within the process, whose tokens come at set times of a false clock."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotfish.bench import serve_client
from pilotfish.bench.serve import poisson_arrivals, request_settings, run_level, warm_up
from pilotfish.bench.serve_client import ServeClient, ServedModel
from pilotfish.bench.serve_prompts import ServePrompt, load_serve_prompts
from pilotfish.bench.serve_records import Latencies, Level, LevelSummary, Served
from pilotfish.cli.app import run
from pilotfish.errors import ConfigError

Output = pytest.CaptureFixture[str]
PROMPTS = [ServePrompt(f"p{i}", messages=[{"role": "user", "content": f"question {i}"}]) for i in range(5)]
STATS = {"num_steps": 2, "num_drafted": 6, "num_accepted": 3, "num_emitted": 5}


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    async def sleep_last(self, seconds: float) -> None:
        """Sleep when all that is ready to run has run, as time would."""
        for _ in range(100):
            await asyncio.sleep(0)
        self.now += seconds


@dataclass
class Timed(httpx.AsyncByteStream):
    """Bytes that come after so many seconds each."""

    clock: Clock
    parts: Sequence[tuple[float, bytes]]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, part in self.parts:
            await self.clock.sleep(seconds)
            yield part


def event(content: str | None = None, num_tokens: int | None = None, **more: Any) -> bytes:
    """A chunk of a chat; ``num_tokens`` is what a Pilotfish server says of it."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": content}}], **more}
    if num_tokens is not None:
        chunk["pilotfish"] = {"tokens": [{"id": 1, "text": "", "is_draft": False}] * num_tokens}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 5},
}
END = (0.0, event(finish_reason="length", usage=USAGE, pilotfish={"stats": STATS}) + DONE)
# Half a second to the first token, then 30 ms a step: 1 token, 3 tokens.
ANSWER = [(0.0, ROLE), (0.5, event("a", 1)), (0.03, event("bcd", 3)), END]


@dataclass
class Server:
    """Answers with ``answers`` in turn; keeps what was asked."""

    clock: Clock = field(default_factory=Clock)
    answers: list[Any] = field(default_factory=lambda: [ANSWER])
    owner: str = "pilotfish"
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    running: int = 0
    most: int = 0
    on_request: Callable[[int], None] = lambda number: None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            if request.headers.get("Authorization") == "Bearer wrong":
                return httpx.Response(401, json={"error": {"message": "wrong key"}})
            return httpx.Response(200, json={"data": [{"id": "tiny", "owned_by": self.owner}]})
        self.asked.append((request.url.path, json.loads(request.content)))
        self.at.append(self.clock.now)
        self.on_request(len(self.asked))
        answer = self.answers[(len(self.asked) - 1) % len(self.answers)]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, content=answer.content)
        return httpx.Response(200, stream=self._count(Timed(self.clock, answer)))

    def _count(self, stream: Timed) -> httpx.AsyncByteStream:
        outer = self

        class Counted(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                outer.running += 1
                outer.most = max(outer.most, outer.running)
                try:
                    async for part in stream:
                        yield part
                finally:
                    outer.running -= 1

        return Counted()

    def client(self, **more: Any) -> ServeClient:
        return ServeClient("http://test/v1/", transport=httpx.MockTransport(self), clock=self.clock, **more)


def ask(server: Server, prompt: ServePrompt = PROMPTS[0], **settings: Any) -> Served:
    return asyncio.run(server.client().request(prompt, settings))


# ---- one request ----


def test_times_of_a_request() -> None:
    served = ask(Server(), max_tokens=4)
    assert served.error is None
    assert served.ttft_ms == pytest.approx(500)
    assert served.itl_ms == pytest.approx([10, 10, 10])  # 30 ms shared by the chunk's three tokens
    assert served.e2e_ms == pytest.approx(530)
    assert (served.num_prompt_tokens, served.num_cached_tokens, served.num_tokens) == (10, 5, 4)
    assert served.stats == STATS


def test_what_is_sent() -> None:
    server = Server()
    ask(server, max_tokens=4, model="tiny")
    ask(server, ServePrompt("t", text="once"), model="tiny")
    stream = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    assert server.asked == [
        ("/v1/chat/completions", {**stream, "max_tokens": 4, "messages": [{"role": "user", "content": "question 0"}]}),
        ("/v1/completions", {**stream, "prompt": "once"}),
    ]


def test_another_server_s_chunks_count_as_one_token_each() -> None:
    text = b'data: {"choices": [{"index": 0, "text": "b"}], "usage": null}\r\n\r\n'
    served = ask(Server(answers=[[(0.1, event("a")), (0.2, text), (0.3, event("")), (0.0, DONE)]]))
    assert (served.ttft_ms, served.itl_ms, served.num_tokens) == (pytest.approx(100), pytest.approx([200]), 2)
    assert served.stats is None


def test_events_may_be_cut_anywhere_and_hold_any_line_separator() -> None:
    whole = b": a comment\n\n" + event("a\u2028b\x85c", 2, usage=USAGE) + DONE
    served = ask(Server(answers=[[(0.1, whole[i : i + 1]) for i in range(len(whole))]]))
    assert served.error is None
    assert served.num_tokens == 4 and served.ttft_ms is not None


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (httpx.Response(503, json={"error": {"message": "the queue is full"}}), "HTTP 503", "the queue is full"),
        (httpx.Response(502, text="<html>"), "HTTP 502", "Bad Gateway"),
        (httpx.ConnectError("refused"), "connection", "refused"),
        (httpx.ReadTimeout("too slow"), "timeout", "too slow"),
        ([(0.1, event("a", 1))], "broken stream", "ended without [DONE]"),
        ([(0.1, b"data: {\n\n")], "bad answer", "JSONDecodeError"),
        ([(0.1, b"data: []\n\n")], "bad answer", "AttributeError"),
        (
            [(0.1, event("a", 1)), (0.1, b'data: {"error": {"message": "the engine failed"}}\n\n'), (0, DONE)],
            "error event",
            "the engine failed",
        ),
    ],
)
def test_errors_by_kind(answer: Any, error: str, message: str) -> None:
    served = ask(Server(answers=[answer]))
    assert served.error == error
    assert message in served.message


# ---- the server's models, and what it is asked ----


def test_the_model_is_the_first_or_the_one_named() -> None:
    server = Server()
    assert asyncio.run(server.client().find_model(None)) == ServedModel("tiny", True)
    server.owner = "vllm"
    assert asyncio.run(server.client().find_model("tiny")) == ServedModel("tiny", False)
    with pytest.raises(ConfigError, match="model='large': the server has 'tiny'"):
        asyncio.run(server.client().find_model("large"))
    with pytest.raises(ConfigError, match="HTTP 401: wrong key Give a key with --api-key"):
        asyncio.run(server.client(api_key="wrong").find_model(None))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:y"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="url="):
        ServeClient(url)


def test_our_fields_go_to_our_servers_only() -> None:
    common: dict[str, Any] = {"max_tokens": 4, "temperature": 0.5, "seed": 1, "ignore_eos": False}
    ours = request_settings(ServedModel("m", True), speculate=False, **common)
    assert ours["include_speculation_stats"] is True and ours["speculation"] == {"enabled": False}
    assert "speculation" not in request_settings(ServedModel("m", True), speculate=True, **common)
    theirs = request_settings(ServedModel("m", False), speculate=True, **common)
    assert theirs == {"model": "m", "max_tokens": 4, "temperature": 0.5, "seed": 1}
    with pytest.raises(ConfigError, match="--no-speculation"):
        request_settings(ServedModel("m", False), speculate=False, **common)


# ---- load ----


def load(server: Server, level: Level, prompts: Sequence[ServePrompt] = PROMPTS, **more: Any) -> Level:
    asyncio.run(run_level(server.client(), level, prompts, {}, **more))
    return level


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (9, 5)])
def test_so_many_requests_at_once(concurrency: int, most: int) -> None:
    server = Server()
    level = load(server, Level(concurrency))
    assert server.most == most and server.running == 0
    assert sorted(served.name for served in level.requests) == [prompt.name for prompt in PROMPTS]
    assert level.complete


def test_one_after_the_other_takes_the_sum_of_their_times() -> None:
    level = load(Server(), Level(1))
    assert level.seconds == pytest.approx(5 * 0.53)
    summary = LevelSummary.of(level)
    assert summary.requests_per_second == pytest.approx(1 / 0.53)
    assert summary.tokens_per_second == pytest.approx(4 / 0.53)
    assert summary.num_tokens == 20 and summary.cached_share == 0.5
    assert summary.mean_accepted_length == 2.5 and summary.acceptance == 0.5


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    times = poisson_arrivals(4.0, 4000, seed=7)
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(1 / 4, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.03)  # exp(-1)
    assert times == poisson_arrivals(4.0, 4000, seed=7) != poisson_arrivals(4.0, 4000, seed=8)
    assert poisson_arrivals(4.0, 1, seed=7) == [0.0]


def test_requests_are_sent_when_they_arrive() -> None:
    server = Server(answers=[[(0.0, event("a", 1)), END]])  # at once, so that only arrivals move the clock
    level = load(server, Level(None, rate=2.0), seed=3, sleep=server.clock.sleep_last)
    assert server.at == pytest.approx([100 + t for t in poisson_arrivals(2.0, 5, seed=3)])
    assert level.label == "2/s"


def test_waiting_for_a_place_counts() -> None:
    """Five arrivals within no time, one place: each waits for all before it."""
    level = load(Server(), Level(1, rate=1e9))
    assert [served.ttft_ms for served in level.requests] == pytest.approx([500 + 530 * i for i in range(5)], rel=1e-6)
    assert level.label == "1e+09/s, at most 1"


def test_a_warm_up_that_fails_ends_it() -> None:
    server = Server()
    asyncio.run(warm_up(server.client(), PROMPTS, {"max_tokens": 99}, 7))
    assert [body["max_tokens"] for _, body in server.asked] == [8] * 7
    server.answers = [httpx.Response(400, json={"error": {"message": "no chat template"}})]
    with pytest.raises(ConfigError, match=r"url='http://test': prompt 'p0': HTTP 400: no chat template"):
        asyncio.run(warm_up(server.client(), PROMPTS, {}, 1))


def test_errors_count_for_nothing_else() -> None:
    server = Server(answers=[httpx.Response(503, json={"error": {"message": "full"}}), ANSWER])
    summary = LevelSummary.of(load(server, Level(1)))
    assert summary.errors == {"HTTP 503": 3}
    assert summary.num_requests == 2 and summary.num_tokens == 8
    assert summary.ttft_ms == Latencies(*[pytest.approx(500)] * 3)


def test_a_level_without_answers_has_no_figures() -> None:
    summary = LevelSummary.of(Level(4, requests=[Served("a", error="timeout")]))
    assert summary.ttft_ms == summary.itl_ms == Latencies(None, None, None)
    assert summary.mean_accepted_length is summary.acceptance is summary.cached_share is None
    assert summary.tokens_per_second == 0


# ---- prompts ----


def test_prompts_of_every_form(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    system = {"role": "system", "content": "be brief"}
    user, answer = {"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "no"}
    lines: list[Mapping[str, Any]] = [
        {"messages": [system, user, answer]},
        {"turns": ["first", "second"], "question_id": 7},
        {"text": "plain"},
        {"prompt": "also plain"},
    ]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    prompts = load_serve_prompts(path)
    assert [prompt.body for prompt in prompts] == [
        {"messages": [system, user]},
        {"messages": [{"role": "user", "content": "first"}]},
        {"prompt": "plain"},
        {"prompt": "also plain"},
    ]
    assert [prompt.name for prompt in prompts] == ["1", "7", "5", "7"]
    assert load_serve_prompts(path, as_text=True)[1].body == {"prompt": "first"}
    assert {prompt.endpoint for prompt in load_serve_prompts(None)} == {"v1/chat/completions"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", ":1: is not JSON"),
        (b"[1]", ":1: must be a JSON object, not list"),
        (b"{}", ":1: has none of messages, turns, text and prompt"),
        (b'{"text": ""}', ":1: has none of"),
        (b'{"turns": [3]}', ":1: turns="),
        (b'{"messages": ["a"]}', ":1: messages must be"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', ":1: messages holds nothing"),
        (b"\n", "has no prompts"),
    ],
)
def test_a_bad_line_of_prompts_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "data.jsonl").write_bytes(line)
    with pytest.raises(ConfigError, match=message):
        load_serve_prompts(tmp_path / "data.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_serve_prompts(tmp_path / "missing")


# ---- the command ----


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server that the command finds."""
    fake = Server()
    made = functools.partial(ServeClient, transport=httpx.MockTransport(fake), clock=fake.clock)
    monkeypatch.setattr(serve_client, "ServeClient", made)
    return fake


def bench(*flags: str) -> int:
    return run(["bench-serve", "--url", "http://test", "--max-tokens", "4", *flags])


def test_the_command_measures_every_level(server: Server, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    flags = ("--concurrency", "1,4", "--num-prompts", "6", "--json", str(out), "--plot", str(plot), "--api-key", "k3y")
    assert bench(*flags) == 0
    assert len(server.asked) == 1 + 6 + 6  # the warm-up is as wide as the first level
    content = json.loads(out.read_text())
    assert content["complete"] is True
    assert [level["concurrency"] for level in content["levels"]] == [1, 4]
    assert [item["num_requests"] for item in content["summary"]] == [6, 6]
    assert content["summary"][0]["itl_ms"]["p50"] == pytest.approx(10)
    assert content["settings"]["model"] == "tiny" and "k3y" not in out.read_text()
    assert plot.stat().st_size > 1000
    table = capsys.readouterr().out
    assert "500 / 500 / 500" in table and "10.0 / 10.0 / 10.0" in table and "tiny at http://test" in table


def test_levels_have_the_same_prompts_in_the_same_order(server: Server) -> None:
    assert bench("--concurrency", "1,2", "--num-prompts", "8") == 0
    asked = [body["messages"] for _, body in server.asked[1:]]
    assert len(asked) == 16 and asked[:8] == asked[8:]
    assert len({json.dumps(messages) for messages in asked}) == 8


def test_ctrl_c_keeps_what_is_done(server: Server, tmp_path: Path, capsys: Output) -> None:
    def interrupt(number: int) -> None:
        if number == 4:
            raise KeyboardInterrupt

    server.on_request = interrupt
    out = tmp_path / "out.json"
    assert bench("--concurrency", "1,2", "--num-prompts", "4", "--json", str(out)) == 130
    content = json.loads(out.read_text())
    assert content["complete"] is False
    assert [len(level["requests"]) for level in content["levels"]] == [2]
    captured = capsys.readouterr()
    assert "1 (stopped)" in captured.out
    assert "stopped: these are the figures so far" in captured.err


def test_another_make_of_server(server: Server, capsys: Output) -> None:
    server.owner = "vllm"
    assert bench("--concurrency", "2", "--num-prompts", "2") == 0
    assert all("include_speculation_stats" not in body for _, body in server.asked)
    assert "ITL is the wait between chunks" in capsys.readouterr().err
    assert bench("--no-speculation") == 2
    assert "only a Pilotfish server" in capsys.readouterr().err


def test_errors_are_shown_with_what_was_said(server: Server, capsys: Output) -> None:
    server.answers = [ANSWER, httpx.Response(503, json={"error": {"message": "the queue is full [5]"}})]
    assert bench("--concurrency", "1", "--num-prompts", "4") == 0
    captured = capsys.readouterr()
    assert "HTTP 503: 2" in captured.out
    assert "HTTP 503: the queue is full [5]" in captured.err


def test_arrivals_at_a_rate_have_one_level(server: Server, capsys: Output) -> None:
    assert bench("--rate", "1e6", "--num-prompts", "3") == 0
    assert "1e+06/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "1,x"], "concurrency='1,x'"),
        (["--concurrency", "4,4"], "concurrency='4,4'"),
        (["--rate", "0"], "rate=0.0: must be a finite number above 0"),
        (["--rate", "nan"], "rate=nan: must be a finite number above 0"),
        (["--rate", "inf"], "rate=inf: must be a finite number above 0"),
        (["--num-prompts", "0"], "num_prompts=0: must be a finite number above 0"),
        (["--json", "/missing/out.json"], "there is no folder '/missing'"),
        (["--model", "large"], "model='large'"),
        (["--data", "/missing.jsonl"], "cannot be read"),
    ],
)
def test_settings_that_cannot_work(server: Server, capsys: Output, flags: list[str], message: str) -> None:
    assert bench(*flags) == 2
    assert message in capsys.readouterr().err
    assert not server.asked


def test_a_server_that_is_not_there(capsys: Output) -> None:
    assert run(["bench-serve", "--url", "http://127.0.0.1:9", "--num-prompts", "1"]) == 2
    assert "url='http://127.0.0.1:9': cannot be reached" in capsys.readouterr().err
