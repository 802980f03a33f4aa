"""What the server logs while it works."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import httpx
import pytest

from benchmarks.server_process import parse_metrics
from pilotfish.errors import ConfigError
from pilotfish.server.logs import configure_logging, summarise
from pilotfish.server.protocol.token_bytes import TokenBytes
from pilotfish.server.stream import Job
from pilotfish.types import SamplingParams
from servers import letters_engine, make_host, with_client


def fields(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.message == message]  # type: ignore[attr-defined]


def test_one_line_a_request_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    async def work(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            await client.post("/v1/completions", json=body | {"stream": stream})

    with caplog.at_level(logging.INFO, "pilotfish.server"):
        with_client(work)
    whole, streamed = fields(caplog, "request")
    for line in (whole, streamed):
        assert line["status"] == 200 and line["prompt_tokens"] == 5 and line["tokens"] == 12
        assert line["finish"] == "length" and line["mean_accepted_length"] > 1 and line["ttft_ms"] > 0
        assert line["id"].startswith("cmpl-") and line["path"] == "/v1/completions"
    assert streamed["stream"] is True and streamed["cached"] == 4
    assert fields(caplog, "refused") == []


REFUSED: list[tuple[int, str, dict[str, Any]]] = [
    (400, "/v1/completions", {"json": {"prompt": "a", "nonsense": 1}}),
    (400, "/v1/completions", {"json": {"prompt": "a" * 500}}),
    (400, "/v1/completions", {"json": {"prompt": ["a", "a" * 500], "max_tokens": 2}}),
    (400, "/v1/completions", {"json": {"prompt": "a", "max_tokens": 500, "stream": True}}),
    (400, "/v1/completions", {"json": {"prompt": "a", "stop_token_ids": [99]}}),
    (400, "/v1/completions", {"json": {"prompt": ["a"] * 30, "n": 20}}),
    (400, "/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}),
    (401, "/v1/completions", {"json": {"prompt": "a"}, "headers": {"authorization": "Bearer wrong"}}),
    (404, "/v1/completions", {"json": {"prompt": "a", "model": "gpt"}}),
    (404, "/v1/nothing", {"json": {}}),
    (405, "/v1/models", {"json": {}}),
    (413, "/v1/completions", {"content": b"x" * 5_000, "headers": {"content-type": "application/json"}}),
    (503, "/v1/completions", {"json": {"prompt": "a"}}),
]


def test_what_the_engine_has_not_taken_is_refused_in_the_log_and_counts_as_an_http_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = make_host()

    async def work(client: httpx.AsyncClient) -> None:
        client.headers["authorization"] = "Bearer secret"
        for status, path, request in REFUSED:
            if status == 503:
                host.begin_drain()
            assert (await client.post(path, **request)).status_code == status
        values = parse_metrics((await client.get("/metrics")).text)
        for status, count in Counter(status for status, *_ in REFUSED).items():
            assert values[f'http_errors_total{{status="{status}"}}'] == count
        assert [value for name, value in values.items() if name.startswith("request_success_total")] == [0.0] * 4

    with caplog.at_level(logging.INFO, "pilotfish.server"):
        with_client(work, host, max_request_bytes=4_000, api_key="secret")
    lines = fields(caplog, "refused")
    assert [(line["status"], line["path"]) for line in lines] == [(status, path) for status, path, _ in REFUSED]
    assert fields(caplog, "request") == []


def test_what_fails_in_the_engine_is_a_request_and_an_http_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = letters_engine()

    def fail() -> Any:
        raise RuntimeError("a fault")

    engine.step = fail  # type: ignore[method-assign]

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 500
        values = parse_metrics((await client.get("/metrics")).text)
        assert values['request_success_total{finished_reason="error"}'] == 1
        assert values['http_errors_total{status="500"}'] == 1

    with caplog.at_level(logging.INFO, "pilotfish.server"):
        with_client(work, make_host(engine=engine))
    [line] = fields(caplog, "request")
    assert line["status"] == 500 and line["error"] == "engine_failed"
    assert fields(caplog, "refused") == []


def test_the_summary_is_silent_while_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        host = make_host()
        await host.start()
        task = asyncio.create_task(summarise(host, 0.01))
        await asyncio.sleep(0.1)
        assert not fields(caplog, "engine")
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
        group = host.submit(
            [Job(request_id="a", prompt_token_ids=[1, 2], params=params, token_bytes=TokenBytes(host.tokenizer))]
        )
        async for _ in group:
            pass
        while not fields(caplog, "engine"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        before = len(fields(caplog, "engine"))
        await asyncio.sleep(0.1)
        assert len(fields(caplog, "engine")) == before
        task.cancel()
        await host.stop()

    with caplog.at_level(logging.INFO, "pilotfish.server"):
        asyncio.run(main())
    lines = fields(caplog, "engine")
    assert sum(line["tokens_per_second"] > 0 for line in lines) >= 1
    assert all(line["acceptance"] is None or 0 <= line["acceptance"] <= 1 for line in lines)


@pytest.mark.parametrize(("level", "form"), [("loud", "text"), ("info", "xml")])
def test_wrong_settings(level: str, form: str) -> None:
    with pytest.raises(ConfigError):
        configure_logging(level, form)
