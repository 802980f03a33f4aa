"""The application without a network: answers, streams, errors, keys, limits, metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pilotfish.engine.engine import Engine
from pilotfish.llm import LLM
from pilotfish.types import SamplingParams
from servers import DEFAULTS, events_of, letters_engine, make_host, with_client

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}
COMPLETION = {"prompt": "hello", "temperature": 0, "max_tokens": 12}


def check_error(response: httpx.Response, status: int, param: str | None = None, message: str = "") -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert re.search(message, error["message"])


@pytest.mark.parametrize("scheme", [None, "guess", "ngram", "near"])
def test_outputs_are_those_of_the_offline_api_whatever_runs_beside_them(scheme: str | None) -> None:
    cases = [
        {"prompt": prompt, "max_tokens": 10, "seed": seed, "temperature": temperature, "n": n}
        for seed, prompt in enumerate(["hello", "pilot", "fish", "a", "sea", "abab"])
        for temperature, n in ((0.0, 1), (1.0, 3))
    ]
    llm = LLM.from_engine(letters_engine(None))
    expected = []
    for case in cases:
        fields = {name: value for name, value in case.items() if name != "prompt"}
        [output] = llm.generate([case["prompt"]], SamplingParams(**fields))
        expected.append([(c.text, c.finish_reason) for c in output.outputs])

    async def work(client: httpx.AsyncClient) -> None:
        async def one(case: dict[str, Any], stream: bool) -> list[tuple[str, str]]:
            response = await client.post("/v1/completions", json=case | {"stream": stream})
            if not stream:
                return [(c["text"], c["finish_reason"]) for c in response.json()["choices"]]
            return collect(response.text, case["n"])

        for stream in (False, True):
            assert await asyncio.gather(*(one(case, stream) for case in cases)) == expected
            assert [await one(case, stream) for case in cases] == expected

    with_client(work, make_host(lambda: letters_engine(scheme)))


def collect(text: str, n: int) -> list[tuple[str, str]]:
    """Texts and reasons of a completion's stream."""
    texts, reasons = [""] * n, [""] * n
    for event in events_of(text):
        for choice in event["choices"]:
            assert not reasons[choice["index"]], "a choice goes on after its end"
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or ""
    return list(zip(texts, reasons, strict=True))


def test_a_chat_streamed_and_not() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        whole = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
        [choice] = whole["choices"]
        assert choice["message"]["role"] == "assistant"
        assert whole["usage"]["prompt_tokens"] == 7
        response = await client.post(
            "/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events}) == 1
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert text == choice["message"]["content"]
        assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert events[-1]["choices"] == []
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [events[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
        assert all(event["usage"] is None for event in events[:-1])

    with_client(work)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_tokens_and_statistics_of_speculation_when_asked(path: str, usage: bool) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | {"include_speculation_stats": True, "ignore_eos": True}

    async def work(client: httpx.AsyncClient) -> None:
        whole = (await client.post(path, json=body)).json()
        stats = whole["pilotfish"]["stats"]
        details = whole["usage"]["completion_tokens_details"]
        assert stats["num_accepted"] == details["accepted_prediction_tokens"] > 0
        assert stats["num_drafted"] - stats["num_accepted"] == details["rejected_prediction_tokens"] > 0
        options = {"stream": True, "stream_options": {"include_usage": usage}}
        events = events_of((await client.post(path, json=body | options)).text)
        tokens = [event["pilotfish"]["tokens"] for event in events if "tokens" in event.get("pilotfish", {})]
        assert sum(map(len, tokens)) == 12 and len(tokens) < 12
        for event in events:
            for step in [event.get("pilotfish", {}).get("tokens")]:
                if step is not None:
                    [choice] = event["choices"]
                    text = choice["delta"]["content"] if "chat" in path else choice["text"]
                    assert "".join(token["text"] for token in step) == text
                    assert [token["is_draft"] for token in step][-1:] == [False]
        last = events[-1]
        assert ("usage" in last and last["choices"] == []) == usage
        streamed = last["pilotfish"]["stats"]
        assert streamed["num_accepted"] == sum(token["is_draft"] for step in tokens for token in step)
        assert streamed["engine_steps"] == len(tokens)
        expected = {
            "scheme", "num_drafts", "exact", "num_steps", "num_drafted", "num_accepted", "num_emitted",
            "mean_accepted_length", "acceptance_by_position", "conditional_acceptance_by_position", "ttft_ms",
            "itl_ms_p50", "tokens_per_second", "num_cached_tokens", "num_preemptions", "engine_steps",
        }  # fmt: skip
        assert set(streamed) == set(stats) == expected
        plain = (await client.post(path, json=body | {"speculation": {"enabled": False}})).json()
        assert plain["pilotfish"]["stats"]["num_drafted"] == 0
        assert plain["choices"][0].get("text") == whole["choices"][0].get("text")
        assert plain["choices"][0].get("message") == whole["choices"][0].get("message")
        fewer = (await client.post(path, json=body | {"speculation": {"num_drafts": 1}})).json()
        assert len(fewer["pilotfish"]["stats"]["acceptance_by_position"]) == 1
        without = (await client.post(path, json=body | {"include_speculation_stats": False})).json()
        assert "pilotfish" not in without

    with_client(work, make_host(engine=letters_engine("near")))


def test_logprobs_of_a_completion_streamed_and_not() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = COMPLETION | {"logprobs": 3, "ignore_eos": True}
        [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
        whole = choice["logprobs"]
        assert len(whole["tokens"]) == len(whole["token_logprobs"]) == len(whole["top_logprobs"]) == 12
        assert "".join(token for token in whole["tokens"] if token != "</s>") == choice["text"]
        for token, value, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True):
            assert len(top) == 3 and top[token] == value == max(top.values())
        offsets = [len("".join(t for t in whole["tokens"][:i] if t != "</s>")) for i in range(12)]
        assert whole["text_offset"] == offsets
        events = events_of((await client.post("/v1/completions", json=body | {"stream": True})).text)
        parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        assert {name: [v for part in parts for v in part[name]] for name in whole} == whole

    with_client(work)


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = {"max_tokens": 5, "n": 2, "seed": 3, "ignore_eos": True}
        together = (await client.post("/v1/completions", json=body | {"prompt": ["hello", "sea"]})).json()
        single = [
            (await client.post("/v1/completions", json=body | {"prompt": p})).json() for p in ("hello", [18, 4, 0])
        ]
        texts = [choice["text"] for answer in single for choice in answer["choices"]]
        assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in together["choices"]] == texts
        assert together["usage"]["prompt_tokens"] == 8 and together["usage"]["completion_tokens"] == 20
        streamed = await client.post("/v1/completions", json=body | {"prompt": ["hello", "sea"], "stream": True})
        assert [text for text, _ in collect(streamed.text, 4)] == texts

    with_client(work)


def test_a_completion_has_16_tokens_by_default_and_less_at_the_end_of_the_context() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = {"ignore_eos": True, "temperature": 0}
        for length, expected in ((5, 16), (120, 8)):
            answer = (await client.post("/v1/completions", json=body | {"prompt": "a" * length})).json()
            assert answer["usage"]["completion_tokens"] == expected
        for stream in (False, True):
            prompts = {"prompt": [[0] * 125, [1, 2, 3]], "stream": stream, "stream_options": {"include_usage": True}}
            response = await client.post("/v1/completions", json=body | prompts)
            answer = events_of(response.text)[-1] if stream else response.json()
            assert answer["usage"]["completion_tokens"] == 3 + 16, "each has its own room"
        chat = {"messages": [{"role": "user", "content": "a" * 100}], "ignore_eos": True}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        assert answer["usage"]["total_tokens"] == 128

    with_client(work)


def test_cached_prompt_tokens_are_in_the_usage() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = COMPLETION | {"prompt": "a" * 40}
        cached = [
            (await client.post("/v1/completions", json=body)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for _ in range(2)
        ]
        assert cached[0] == 0 and cached[1] >= 32

    with_client(work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/completions", COMPLETION | {"prompt": "a" * 200}, "prompt", "200 tokens.*128"),
        ("/v1/completions", COMPLETION | {"max_tokens": 500}, "max_tokens", "500.*128"),
        ("/v1/completions", COMPLETION | {"stop_token_ids": [99]}, "stop_token_ids", "99"),
        ("/v1/completions", COMPLETION | {"logit_bias": {"99": 1}}, "logit_bias", "99"),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "a" * 200}]},
            "messages",
            "202 tokens.*128",
        ),
        ("/v1/chat/completions", CHAT | {"messages": []}, "messages", "at least one"),
        (
            "/v1/chat/completions",
            CHAT | {"max_completion_tokens": 500, "max_tokens": None},
            "max_completion_tokens",
            "",
        ),
    ],
)
def test_what_the_engine_refuses_is_a_400_streamed_or_not(
    path: str, body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        check_error(await client.post(path, json=body | {"stream": stream}), 400, param, message)
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    with_client(work)


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, b'{"prompt": "a"}'),
        ({}, b'{"prompt": "a"}'),
        ({"content-type": "application/json"}, b'{"prompt": "a"'),
        ({"content-type": "application/json"}, b'{"prompt": "\xff"}'),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"\x1f\x8b\x08"),
        ({"content-type": "application/json"}, b'{"prompt": "a", "temperature": NaN}'),
        ({"content-type": "application/json"}, b'{"prompt": "a", "temperature": 1e999}'),
        ({"content-type": "application/json"}, b'{"prompt": "a", "max_tokens": 1' + b"0" * 1000 + b"}"),
        ({"content-type": "application/json"}, b'{"prompt": "\\ud800"}'),
        ({"content-type": "application/json"}, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        ({"content-type": "application/json"}, b'{"prompt": ' + b"[" * 400 + b"]" * 400 + b"}"),
        ({"content-type": "application/json"}, b'{"prompt": [1' + b"0" * 1000 + b"]}"),
        ({"content-type": "application/json"}, b'{"prompt": "a", "stop": "\\ud800"}'),
        ({"content-type": "application/json"}, b'{"prompt": "a", "\\ud800": 1}'),
        ({"content-type": "application/json"}, b'{"prompt": "a", "guided_regex": "\\ud800"}'),
        ({"content-type": "application/json"}, b'{"prompt": "a", "guided_choice": ["\\ud800"]}'),
    ],
)
def test_malformed_bodies_are_400(headers: dict[str, str], content: bytes) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = await client.post(path, content=content, headers=headers)
            assert response.status_code == 400, response.text
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    with_client(work)


# Fields of a request that are wrong, by endpoint: what is sent, the error's param, code and message.
TEXT, TURNS = "/v1/completions", "/v1/chat/completions"
CONTEXT, INVALID, UNKNOWN, UNSUPPORTED = "context_length_exceeded", "invalid_value", "unknown_field", "unsupported"
WRONG: list[tuple[str, dict[str, Any], str, str, str]] = [
    (TEXT, {"temperature": "hot"}, "temperature", INVALID, '^temperature="hot": must be a number'),
    (TEXT, {"temperature": True}, "temperature", INVALID, "^temperature=true: must be a number"),
    (TEXT, {"temperature": -1}, "temperature", INVALID, "^temperature=-1.0: .*at least 0"),
    (TEXT, {"n": [None]}, "n", INVALID, r"^n=\[null\]: must be an integer"),
    (TEXT, {"n": 10**4000}, "n", INVALID, r"^n=10{70,79}\.\.\.: must be an integer from 1 to 64"),
    (TEXT, {"max_tokens": 10**4000}, "max_tokens", CONTEXT, r"^max_tokens=10{70,79}\.\.\. after.*at most 123"),
    (TEXT, {"top_k": -(10**4000)}, "top_k", INVALID, r"^top_k=-10+\.\.\.: must be"),
    (TEXT, {"temperature": 10**400}, "temperature", INVALID, r"^temperature=10+\.\.\.: must be"),
    (TEXT, {"logprobs": 101}, "logprobs", INVALID, "^logprobs=101: .*to 100"),
    (TEXT, {"max_tokens": 0}, "max_tokens", INVALID, "^max_tokens=0: must be an integer of at least 1$"),
    (TEXT, {"max_tokens": 500}, "max_tokens", CONTEXT, "Lower max_tokens to at most 123"),
    (TEXT, {"logit_bias": {"5": 200}}, "logit_bias", INVALID, r"^logit_bias\[5\]=200.0: .*at most 100"),
    (TEXT, {"logit_bias": {"5": None}}, "logit_bias", INVALID, r"^logit_bias\[5\]=null: must be a num"),
    (TEXT, {"logit_bias": {"x": 1}}, "logit_bias", INVALID, 'the key "x"'),
    (TEXT, {"logit_bias": {"99": 1}}, "logit_bias", INVALID, "token id 99"),
    (TEXT, {"stop": [None]}, "stop", INVALID, "^stop=null: must be a string"),
    (TEXT, {"stop": ["a", True]}, "stop", INVALID, "^stop=true: must be a string"),
    (TEXT, {"stop": {"a": None}}, "stop", INVALID, '^stop={"a": null}: must be a string'),
    (TEXT, {"stop_token_ids": ["a"]}, "stop_token_ids", INVALID, r'^stop_token_ids\[0\]="a": must be'),
    (TEXT, {"stop_token_ids": [1, 99]}, "stop_token_ids", INVALID, "token id 99"),
    (TEXT, {"prompt": [1, None]}, "prompt", INVALID, "the token id null"),
    (TEXT, {"prompt": [1, 10**4000]}, "prompt", INVALID, r"the token id 10+\.\.\.: "),
    (TEXT, {"prompt": "a" * 200}, "prompt", CONTEXT, "^The prompt has 200 tokens.*128"),
    (TEXT, {"prompt": None}, "prompt", "missing_field", "^prompt: is missing"),
    (TEXT, {"best_of": 2}, "best_of", INVALID, "^best_of=2: "),
    (TEXT, {"max_completion_tokens": 2}, "max_completion_tokens", UNKNOWN, "not a known field"),
    (TEXT, {"tools": [1]}, "tools", UNSUPPORTED, "not supported"),
    (TEXT, {"stream_options": {"x": 1}}, "stream_options.x", UNKNOWN, "not a known field"),
    (TEXT, {"stream_options": True}, "stream_options", INVALID, "^stream_options=true: must be an object"),
    (TEXT, {"speculation": {"enabled": 1}}, "speculation.enabled", INVALID, "=1: must be true or false"),
    (TEXT, {"speculation": {"num_drafts": -1}}, "speculation.num_drafts", INVALID,
     "^speculation.num_drafts=-1: "),
    (TEXT, {"guided_json": False}, "guided_json", INVALID, "^guided_json=false: must be a JSON schema"),
    (TEXT, {"guided_json": 3}, "guided_json", INVALID, "^guided_json=3: must be a JSON schema"),
    (TEXT, {"guided_regex": ""}, "guided_regex", INVALID, "^guided_regex='': must be a string"),
    (TEXT, {"guided_choice": []}, "guided_choice", INVALID, "^guided_choice has "),
    (TEXT, {"guided_choice": ["a", 1]}, "guided_choice", INVALID, r"^guided_choice\[1\]=1: must be a s"),
    (TEXT, {"structured_outputs": {"json": False}}, "structured_outputs.json", INVALID,
     "^structured_outputs.json=false: must be a JSON schema"),
    (TEXT, {"structured_outputs": {"regex": ""}}, "structured_outputs.regex", INVALID,
     "^structured_outputs.regex='': "),
    (TEXT, {"structured_outputs": {}}, "structured_outputs", INVALID, "exactly one of"),
    (TEXT, {"response_format": "json"}, "response_format", INVALID, '^response_format="json": must be an '),
    (TEXT, {"response_format": {"type": "xml"}}, "response_format.type", INVALID, "'json_schema'"),
    (TEXT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_field", "needs"),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
     "response_format.json_schema.schema", INVALID, "^response_format.json_schema.schema=true: must be an object"),
    (TURNS, {"logprobs": True, "top_logprobs": 101}, "top_logprobs", INVALID,
     "^top_logprobs=101: must be an integer from 0 to 100"),
    (TURNS, {"top_logprobs": 2}, "top_logprobs", INVALID, "^top_logprobs=2: needs"),
    (TURNS, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", INVALID,
     "^max_completion_tokens=0: must be"),
    (TURNS, {"max_tokens": None, "max_completion_tokens": 500}, "max_completion_tokens", CONTEXT,
     "^max_completion_tokens=500 .*Lower max_completion_tokens to at most"),
    (TURNS, {"best_of": 1}, "best_of", UNKNOWN, "not a known field"),
    (TURNS, {"messages": [1]}, "messages[0]", INVALID, r"^messages\[0\]=1: must be an object"),
    (TURNS, {"messages": [{"role": None}]}, "messages[0].role", INVALID, "=null: must be one of"),
    (TURNS, {"messages": [{"role": "user"}]}, "messages[0].content", INVALID, "=null: must be a str"),
    (TURNS, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", INVALID,
     "surrogate"),
    (TURNS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type", UNSUPPORTED, '^messages.*="image_url": '),
    (TURNS, {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls",
     UNSUPPORTED, "not supported"),
    (TURNS, {"messages": [{"role": "user", "content": "a" * 200}]}, "messages", CONTEXT, "202 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "fields", "param", "code", "message"), WRONG)
def test_a_400_names_the_field_as_the_client_wrote_it(
    endpoint: str, fields: dict[str, Any], param: str, code: str, message: str
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = (CHAT if endpoint == TURNS else COMPLETION) | fields
        response = await client.post(endpoint, content=json.dumps(body), headers={"content-type": "application/json"})
        check_error(response, 400, param, message)
        error = response.json()["error"]
        assert error["code"] == code and error["type"] == "invalid_request_error"
        assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|[Dd]ictionary", error["message"])
        assert len(error["message"]) < 400

    with_client(work)


def test_unknown_models_paths_and_methods() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json=COMPLETION | {"model": "gpt"})
        check_error(response, 404, "model", "gpt.*letters, fish")
        assert response.json()["error"]["code"] == "model_not_found"
        check_error(await client.get("/v1/models/gpt"), 404, "model")
        check_error(await client.get("/v1/nothing"), 404)
        check_error(await client.get("/v1/completions"), 405)
        for path in ("http://server//", "/v1/models//", "/health/", "/v1//models", "/page", "/v1/chat/completions/"):
            response = await client.post(path, json=CHAT) if "chat" in path else await client.get(path)
            assert response.status_code == 404 and set(response.json()["error"]) == {"message", "type", "param", "code"}
        cards = (await client.get("/v1/models")).json()
        assert [card["id"] for card in cards["data"]] == ["letters", "fish"]
        assert cards["data"][0]["owned_by"] == "pilotfish" and cards["data"][0]["max_model_len"] == 128
        assert (await client.get("/v1/models/fish")).json()["id"] == "fish"
        answer = (await client.post("/v1/completions", json=COMPLETION | {"model": "fish"})).json()
        assert answer["model"] == "fish"

    with_client(work, model_names=("letters", "fish"))


def test_the_key_guards_all_but_health_and_the_page() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
                response = await client.get(path, headers=headers)
                check_error(response, 401, None, "API key")
                assert response.json()["error"]["code"] == "invalid_api_key"
            check_error(await client.post("/v1/completions", json=COMPLETION, headers=headers), 401)
        twice = [("authorization", "Bearer secret"), ("authorization", "Bearer wrong")]
        check_error(await client.get("/v1/models", headers=twice), 401)
        assert (await client.get("/health")).status_code == 200
        right = {"authorization": "Bearer secret"}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=right)).status_code == 200

    with_client(work, api_key="secret")


def test_long_bodies_are_413_with_and_without_a_length() -> None:
    read: list[int] = []

    async def endless() -> Any:
        for _ in range(1000):
            read.append(1)
            yield b"x" * 100

    async def work(client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        check_error(await client.post("/v1/completions", content=b"x" * 3000, headers=headers), 413, None, "2000 bytes")
        check_error(await client.post("/v1/completions", content=endless(), headers=headers), 413, None, "2000 bytes")
        assert len(read) < 100, "the body was read on"
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    with_client(work, max_request_bytes=2000)


def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.server.intake._BODY_TIMEOUT", 0.05)

    async def dawdling() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    async def work(client: httpx.AsyncClient) -> None:
        headers = {"content-type": "application/json"}
        check_error(
            await client.post("/v1/completions", content=dawdling(), headers=headers), 408, None, "did not come"
        )

    with_client(work)


def test_tokenize_and_detokenize() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        answer = (await client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
        assert answer == {
            "count": 5, "max_model_len": 128, "tokens": [7, 4, 11, 11, 14], "token_strs": ["h", "e", "l", "l", "o"]
        }  # fmt: skip
        chat = {"messages": CHAT["messages"]}
        assert (await client.post("/tokenize", json=chat)).json()["count"] == 7
        assert (await client.post("/tokenize", json=chat | {"add_generation_prompt": False})).json()["count"] == 6
        check_error(await client.post("/tokenize", json={}), 400, "prompt")
        check_error(await client.post("/tokenize", json=chat | {"prompt": "a"}), 400, "prompt")
        answer = (await client.post("/detokenize", json={"tokens": [7, 4, 11, 11, 14]})).json()
        assert answer == {"prompt": "hello"}
        for tokens in ([-1], [99], [2**70]):
            check_error(await client.post("/detokenize", json={"tokens": tokens}), 400, "tokens")

    with_client(work)


def test_a_full_queue_is_503_with_retry_after() -> None:
    engine = letters_engine(max_num_seqs=1)

    async def work(client: httpx.AsyncClient) -> None:
        responses = await asyncio.gather(*(client.post("/v1/completions", json=COMPLETION) for _ in range(12)))
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 503} and statuses.count(200) >= 2
        refused = responses[statuses.index(503)]
        assert refused.headers["retry-after"] == "1"
        check_error(refused, 503, None, "queue is full")
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    with_client(work, make_host(engine=engine, max_queue=1))


def test_a_failing_engine_is_500_then_works_again_and_counters_go_on() -> None:
    engine = letters_engine()
    step, limit = engine.step, 4

    def fail() -> Any:
        if engine.stats.num_steps == limit:
            raise RuntimeError("a fault")
        return step()

    engine.step = fail  # type: ignore[method-assign]

    async def work(client: httpx.AsyncClient) -> None:
        whole = await client.post("/v1/completions", json=COMPLETION | {"speculation": {"enabled": False}})
        check_error(whole, 500, None, "engine failed")
        before = await metric(client, "generation_tokens_total")
        assert before > 0
        for _ in range(1000):
            if (await client.get("/health")).status_code == 200:
                break
            await asyncio.sleep(0.01)
        health = (await client.get("/health")).json()
        assert health["status"] == "ok" and health["restarts"] == 1
        answer = await client.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 200
        assert await metric(client, "engine_restarts_total") == 1
        tokens = answer.json()["usage"]["completion_tokens"]
        assert await metric(client, "generation_tokens_total") == before + tokens

    with_client(work, make_host(engine=engine))


def test_health_is_503_while_it_shuts_down() -> None:
    host = make_host()

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).json()["status"] == "ok"
        host.begin_drain()
        health = await client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "draining"
        check_error(await client.post("/v1/completions", json=COMPLETION), 503, None, "shutting down")

    with_client(work, host)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum of a metric over its labels."""
    text = (await client.get("/metrics")).text
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if re.match(rf"pilotfish:{name}[{{ ]", line)]
    assert values, f"no metric {name}"
    return sum(map(float, values))


def test_metrics_have_vllms_names_and_count_what_was_done() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        body = COMPLETION | {"ignore_eos": True}
        usages = [(await client.post("/v1/completions", json=body)).json()["usage"] for _ in range(3)]
        details = [usage["completion_tokens_details"] for usage in usages]
        accepted = sum(item["accepted_prediction_tokens"] for item in details)
        rejected = sum(item["rejected_prediction_tokens"] for item in details)
        expected = {
            "generation_tokens_total": 36,
            "spec_decode_num_accepted_tokens_total": accepted,
            "spec_decode_num_accepted_tokens_per_pos_total": accepted,
            "spec_decode_num_draft_tokens_total": accepted + rejected,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 33,
            "e2e_request_latency_seconds_count": 3,
            "request_success_total": 3,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "prefix_cache_queries_total": 15,
            "prefix_cache_hits_total": 8,
            "prompt_tokens_total": 7,
            "num_preemptions_total": 0,
            "kv_cache_usage_perc": 0,
        }
        assert {name: await metric(client, name) for name in expected} == expected
        assert await metric(client, "spec_decode_num_drafts_total") > 0
        text = (await client.get("/metrics")).text
        assert 'model_name="letters"' in text and 'finished_reason="length"' in text and 'position="0"' in text
        assert "process_resident_memory_bytes" in text

    with_client(work)


def test_pages_of_other_origins_may_call_only_if_they_are_named() -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}

    async def closed(client: httpx.AsyncClient) -> None:
        response = await client.options("/v1/completions", headers=headers)
        assert response.status_code == 405 and "access-control-allow-origin" not in response.headers
        got = await client.get("/v1/models", headers={"origin": "https://page.example"})
        assert "access-control-allow-origin" not in got.headers

    async def opened(client: httpx.AsyncClient) -> None:
        response = await client.options("/v1/completions", headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        other = await client.options("/v1/completions", headers=headers | {"origin": "https://other.example"})
        check_error(other, 400, None, "https://other.example.*https://page.example.*--cors-origin")
        assert "access-control-allow-origin" not in other.headers and other.json()["error"]["code"] == "cors_refused"

    with_client(closed)
    with_client(opened, cors_origins=("https://page.example",), api_key="secret")


def test_the_page_is_served_under_a_strict_policy_or_not_at_all() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        page = await client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        script = await client.get("/page/app.js")
        assert script.status_code == 200
        for response in (page, script):
            assert response.headers["content-security-policy"].startswith("default-src 'self'")
            assert response.headers["x-content-type-options"] == "nosniff"
        check_error(await client.get("/page/nothing.js"), 404)
        check_error(await client.get("/page/%2e%2e/app.py"), 404)

    async def without(client: httpx.AsyncClient) -> None:
        check_error(await client.get("/"), 404)
        check_error(await client.get("/page/app.js"), 404)

    with_client(work, api_key="secret")  # it asks a person for the key, so it needs none
    with_client(without, page=False)


def test_head_goes_where_get_goes() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for path in ("/", "/health", "/v1/models", "/v1/models/letters", "/metrics", "/page/app.js", "/openapi.json"):
            head, got = await client.head(path), await client.get(path)
            assert head.status_code == got.status_code == 200, path
            assert head.headers["content-type"] == got.headers["content-type"]
        assert (await client.head("/v1/completions")).status_code == 405
        assert (await client.head("/v1/models/gpt")).status_code == 404

    with_client(work)


def test_openapi_describes_the_bodies_and_loads_nothing_from_elsewhere() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        schema = (await client.get("/openapi.json")).json()
        body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].rsplit("/", 1)[1]
        fields = schema["components"]["schemas"][name]["properties"]
        assert {"messages", "temperature", "speculation", "structured_outputs"} <= set(fields)
        assert "422" not in json.dumps(schema["paths"])
        references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(schema)))
        assert references <= set(schema["components"]["schemas"])
        for path in ("/docs", "/redoc"):
            check_error(await client.get(path), 404)

    with_client(work)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine whose pages are all free again at the end."""
    engine = letters_engine("near")
    yield engine
    assert not engine.has_unfinished
    assert engine.pool.num_free == DEFAULTS["num_pages"]
    engine.pool.check_integrity()


def test_all_pages_are_free_after_traffic(engine: Engine) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        bodies = [
            COMPLETION | {"prompt": "ab" * (i % 20 + 1), "stream": i % 2 == 0, "n": i % 3 + 1, "seed": i}
            for i in range(20)
        ]
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        assert {response.status_code for response in responses} == {200}

    with_client(work, make_host(engine=engine))
