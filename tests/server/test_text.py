"""Characters of several tokens: the same text streamed and not, and never a part of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from pilotfish.models.checkpoint import resolve_model
from pilotfish.text import Tokenizer
from servers import events_of, make_host, script_engine, with_client

PROMPT = "Say it again: 🐟🌊 🐟🌊"

TEXTS = ["🐟🌊 🐟🌊 🐟", "日本語の文章です。", "a👩‍👩‍👧‍👦b", "naïve ﷽ ok", "plain text"]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    with closing(resolve_model("smollm2-135m", dtype="float32")) as checkpoint:
        yield checkpoint.load_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("steps", [False, True])
def test_a_cut_character_is_left_out_streamed_and_not(tokenizer: Tokenizer, text: str, steps: bool) -> None:
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))

    async def work(client: httpx.AsyncClient) -> None:
        for max_tokens in (1, 2, 3, 4, 5, 6, num_tokens - 1, num_tokens, num_tokens + 1):
            body = {
                "prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens, "include_speculation_stats": steps,
                "logprobs": 1,
            }  # fmt: skip
            [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
            response = await client.post("/v1/completions", json=body | {"stream": True})
            events = events_of(response.text)
            pieces = [event["choices"][0]["text"] for event in events]
            assert "".join(pieces) == choice["text"]
            assert text.startswith(choice["text"]) and "\ufffd" not in response.text
            assert choice["finish_reason"] == ("stop" if max_tokens > num_tokens else "length")
            if max_tokens >= num_tokens:
                assert choice["text"] == text
            tokens = [token for event in events for token in event.get("pilotfish", {}).get("tokens", [])]
            assert len(tokens) == (min(max_tokens, num_tokens + 1) if steps else 0)
            if steps:
                assert "".join(token["text"] for token in tokens) == choice["text"]

    with_client(work, make_host(engine=script_engine(tokenizer, text, len(tokenizer.encode(PROMPT)))))


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stop_token_or_eos_cuts_is_left_out_too(tokenizer: Tokenizer, stream: bool) -> None:
    first, *_, last = tokenizer.encode("🌊", add_special_tokens=False)
    [eos] = tokenizer.eos_token_ids
    fffd = tokenizer.encode("a\ufffd", add_special_tokens=False)
    cases: list[tuple[list[int], dict[str, Any], str, str]] = [
        ([*fffd, first, last], {"stop_token_ids": [last]}, "a\ufffd", "stop"),
        ([*fffd, first, last], {"stop_token_ids": [first]}, "a\ufffd", "stop"),
        ([*fffd, first], {"stop_token_ids": [first], "include_stop_str_in_output": True}, "a\ufffd", "stop"),
        ([*fffd, first], {}, "a\ufffd", "stop"),  # by EOS
        ([*fffd, first, eos, eos], {"ignore_eos": True, "max_tokens": len(fffd) + 3}, "a\ufffd", "length"),
        (fffd, {}, "a\ufffd", "stop"),
        (fffd, {"max_tokens": len(fffd)}, "a\ufffd", "length"),
        ([*fffd, first], {"stop": ["\ufffd"], "include_stop_str_in_output": True}, "a\ufffd", "stop"),
        ([*fffd, first], {"stop": ["\ufffd"]}, "a", "stop"),
        ([last] * 14, {"max_tokens": 12}, "\ufffd" * 12, "length"),  # none of them begins a character
        ([first] * 14, {"max_tokens": 12}, "\ufffd" * 11, "length"),
    ]

    found: list[tuple[str, str]] = []
    for script, fields, text, reason in cases:

        async def work(client: httpx.AsyncClient, fields: dict[str, Any] = fields) -> None:
            body = {"prompt": [1, 2, 3], "temperature": 0, "stream": stream} | fields
            response = await client.post("/v1/completions", json=body)
            events = events_of(response.text) if stream else [response.json()]
            choices = [event["choices"][0] for event in events]
            found.append(("".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]))

        with_client(work, make_host(engine=script_engine(tokenizer, script, 3)))
        assert found[-1] == (text, reason), (script, fields)


def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = TEXTS[0]

    async def work(client: httpx.AsyncClient) -> None:
        chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "logprobs": True, "top_logprobs": 1}
        prompt = tokenizer.apply_chat_template(chat["messages"])  # type: ignore[arg-type]
        content = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]
        assert len(prompt) == num_prompt
        tokens = content["logprobs"]["content"][:-1]  # EOS is the last
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == text == content["message"]["content"]
        assert any(token["token"].startswith("\\x") for token in tokens)
        completion = {"prompt": prompt, "temperature": 0, "max_tokens": 40, "logprobs": 1}
        [choice] = (await client.post("/v1/completions", json=completion)).json()["choices"]
        assert any(token.startswith("bytes:\\x") for token in choice["logprobs"]["tokens"])

    num_prompt = len(tokenizer.apply_chat_template([{"role": "user", "content": "x"}]))
    with_client(work, make_host(engine=script_engine(tokenizer, text, num_prompt)))


def test_prompts_that_cannot_fit_are_refused_by_their_length(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host(engine=script_engine(tokenizer, "ok", 1))
    long = "a " * 20_000
    bodies = {
        "/v1/completions": [{"prompt": long}, {"prompt": ["a", long]}],
        "/v1/chat/completions": [{"messages": [{"role": "user", "content": "a " * 200}] * 100}],
    }

    async def work(client: httpx.AsyncClient) -> None:
        for path, some in bodies.items():
            for body in some:
                response = await client.post(path, json=body)
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded" and error["param"] in body
                assert "at least" in error["message"] and "max_model_len) is 256" in error["message"]
        count = (await client.post("/tokenize", json={"prompt": long})).json()["count"]
        assert count > 20_000  # what has no context to fit into has no such limit

    with_client(work, host)
