"""Bodies spoiled from the server's own description: all are refused or served, and nothing is left of them."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest

from benchmarks.abuse_bodies import Bodies
from benchmarks.server_process import ServerProcess
from helpers_grammar import json_tokenizer
from pilotfish.engine import Engine
from pilotfish.server import ServerSettings, create_app
from servers import DEFAULTS, letters_engine, make_host, running, with_client

NUM_BODIES = 600
NORMAL = {"prompt": "a", "max_tokens": 1}


def json_engine() -> Engine:
    """An engine that compiles grammars and answers chats."""
    tokenizer = json_tokenizer()
    tokenizer._hf.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = letters_engine(tokenizer=tokenizer)
    engine.tokenizer = tokenizer  # type: ignore[assignment]
    return engine


def description() -> dict[str, Any]:
    return create_app(make_host(), ServerSettings(model_names=("letters",))).openapi()


def test_600_spoiled_bodies_each_followed_by_a_normal_request() -> None:
    engine, statuses = json_engine(), Counter[int]()

    async def work(client: httpx.AsyncClient) -> None:
        bodies = Bodies((await client.get("/openapi.json")).json(), 0)
        headers = {"content-type": "application/json"}
        for _ in range(NUM_BODIES):
            body = bodies.next()
            answer = await client.post(body.path, content=body.content, headers=headers)
            statuses[answer.status_code] += 1
            assert answer.status_code in (200, 400, 404, 413), (body.how, body.content[:500], answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert len(answer.content) < 10_000
            assert (await client.post("/v1/completions", json=NORMAL)).status_code == 200

    host = make_host(engine=engine)
    with_client(work, host)
    assert statuses[400] > NUM_BODIES * 0.6 and statuses[200] > 10, statuses
    assert engine.pool.num_free == DEFAULTS["num_pages"] and host.num_restarts == 0
    engine.pool.check_integrity()


def test_a_seed_draws_the_same_bodies_in_every_way_for_every_endpoint() -> None:
    api = description()

    def draw(seed: int) -> list[tuple[str, str, bytes]]:
        bodies = Bodies(api, seed)
        return [(body.path, body.how, body.content) for body in (bodies.next() for _ in range(300))]

    drawn = draw(1)
    assert drawn == draw(1) != draw(2)
    assert {path for path, *_ in drawn} == {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}
    assert len({how for _, how, _ in drawn}) == 9
    for path, _, content in drawn:
        if path.startswith("/v1/"):  # none may run to the context's end
            try:
                body = json.loads(content)
            except (ValueError, RecursionError):
                continue
            assert not isinstance(body, dict) or body["max_tokens"] is not None


def test_the_description_leads_to_bodies_that_are_served() -> None:
    api = description()
    schema = api["components"]["schemas"]["CompletionRequest"]

    async def work(client: httpx.AsyncClient) -> None:
        bodies, served = Bodies(api, 3), 0
        for _ in range(100):
            served += (await client.post("/v1/completions", json=bodies.valid(schema))).status_code == 200
        assert served > 5

    with_client(work, make_host(engine=json_engine()))


# The benchmark is a program whose folder is on the path when it runs.


@pytest.fixture
def abuse_module(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Any:
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "benchmarks")
    import server_abuse

    return server_abuse


ARGS = argparse.Namespace(bodies=10, clients=8, max_model_len=DEFAULTS["max_model_len"])


def test_all_groups_end_well_and_leave_nothing_behind(abuse_module: Any) -> None:
    with running(make_host(json_engine)) as server:
        groups = asyncio.run(abuse_module.Abuse(ServerProcess(server.url), ARGS, "0").run())
        server.wait_idle()
        assert server.free_pages() == DEFAULTS["num_pages"]
        assert abuse_module.drained(ServerProcess(server.url))["num_requests_running"] == 0
    assert [problem for group in groups for problem in group.problems] == []
    counts = {group.name: dict(group.statuses) for group in groups}
    assert counts["clients of which half vanish"] == {200: 4, 0: 4} and counts["a body of 10 MB"] == {413: 1}
    assert counts["prompts at the context's end"] == {200: 1, 400: 3}
    assert counts["max_tokens at the limit"] == {200: 1, 400: 2} and counts["a slow reader"] == {200: 1}


def test_a_server_that_answers_otherwise_is_found_out(abuse_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abuse_module, "_LONG_BODY", 1_000)  # not too long: 400, not 413
    args = argparse.Namespace(bodies=0, clients=2, max_model_len=DEFAULTS["max_model_len"] - 1)
    with running(make_host(json_engine)) as server:
        groups = asyncio.run(abuse_module.Abuse(ServerProcess(server.url), args, "0").run())
    assert [group.name for group in groups if group.problems] == [
        "a body of 10 MB", "prompts at the context's end", "max_tokens at the limit"
    ]  # fmt: skip
