"""What the server logs while it works."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from pilotfish.errors import ConfigError
from pilotfish.server.logs import configure_logging, summarise
from pilotfish.server.stream import Job
from pilotfish.types import SamplingParams
from servers import make_host, with_client


def fields(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.message == message]  # type: ignore[attr-defined]


def test_one_line_a_request_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    async def work(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            await client.post("/v1/completions", json=body | {"stream": stream})
        await client.post("/v1/completions", json=body | {"prompt": "a" * 500})
        await client.post("/v1/completions", json=body | {"nonsense": 1})

    with caplog.at_level(logging.INFO, "pilotfish.server"):
        with_client(work)
    whole, streamed, refused = fields(caplog, "request")
    for line in (whole, streamed):
        assert line["status"] == 200 and line["prompt_tokens"] == 5 and line["tokens"] == 12
        assert line["finish"] == "length" and line["mean_accepted_length"] > 1 and line["ttft_ms"] > 0
        assert line["id"].startswith("cmpl-") and line["path"] == "/v1/completions"
    assert streamed["stream"] is True and streamed["cached"] == 4
    assert refused["status"] == 400 and refused["param"] == "prompt"
    [early] = fields(caplog, "refused")
    assert early["status"] == 400 and early["param"] == "nonsense"


def test_the_summary_is_silent_while_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        host = make_host()
        await host.start()
        task = asyncio.create_task(summarise(host, 0.01))
        await asyncio.sleep(0.1)
        assert not fields(caplog, "engine")
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
        group = host.submit([Job(request_id="a", prompt_token_ids=[1, 2], params=params)])
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
