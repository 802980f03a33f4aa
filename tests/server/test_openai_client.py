"""The official openai client against a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from helpers_grammar import json_tokenizer
from servers import RunningServer, letters_engine, make_host, running

PROMPT = "hello"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
KEY = "secret"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_host(lambda: letters_engine("near")), api_key=KEY) as server:
        yield server
        server.wait_idle()
        engine = server.host.engine
        assert engine is not None and not engine.has_unfinished
        assert engine.pool.num_free == engine.pool.num_pages
        assert server.host.num_restarts == 0


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, http_client=http) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "letters" and model.owned_by == "pilotfish"
    assert client.models.retrieve("letters").id == "letters"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="letters", messages=MESSAGES, temperature=0, max_completion_tokens=12)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.prompt_tokens == 7
    assert answer.usage.total_tokens == 7 + answer.usage.completion_tokens
    details = answer.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens and details.rejected_prediction_tokens is not None
    assert answer.system_fingerprint and answer.id.startswith("chatcmpl-") and answer.model == "letters"


def test_chat_stream_equals_the_whole(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "letters", "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 40}
    whole = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert not chunks[-1].choices and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.completion_tokens_details == whole.usage.completion_tokens_details


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    # EOS is likely: the helper takes an answer that was cut for an error.
    wanted: Any = {"seed": 3, "logit_bias": {"31": 4}, "extra_body": {"min_tokens": 3}}
    with client.chat.completions.stream(model="letters", messages=MESSAGES, **wanted) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert answer.choices[0].message.content


def test_completion_of_text_and_of_tokens(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "letters", "temperature": 0, "max_tokens": 10}
    text = client.completions.create(prompt=PROMPT, **wanted)
    tokens = client.completions.create(prompt=[7, 4, 11, 11, 14], **wanted)
    assert text.choices[0].text == tokens.choices[0].text != ""
    several = client.completions.create(prompt=[PROMPT, "sea"], **wanted)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == text.choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(prompt=PROMPT, stream=True, **wanted)]
    assert "".join(pieces) == text.choices[0].text


def test_three_choices_of_a_seed_differ_and_come_again(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "letters", "messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 12, "temperature": 1.0}
    texts = [[c.message.content for c in client.chat.completions.create(**wanted).choices] for _ in range(2)]
    assert len(set(texts[0])) == 3 and texts[0] == texts[1]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**wanted, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts[0]
    other = client.chat.completions.create(**wanted | {"seed": 8})
    assert [choice.message.content for choice in other.choices] != texts[0]


def test_logprobs(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "letters", "messages": MESSAGES, "temperature": 0, "max_tokens": 8, "logprobs": True}
    [choice] = client.chat.completions.create(**wanted, top_logprobs=4).choices
    assert choice.logprobs is not None and choice.logprobs.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 4
        assert token.token == token.top_logprobs[0].token and token.logprob == token.top_logprobs[0].logprob <= 0
        values = [item.logprob for item in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.bytes == list(token.token.encode())
    streamed = [
        token
        for chunk in client.chat.completions.create(**wanted, top_logprobs=4, stream=True)
        for token in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert streamed == choice.logprobs.content
    [none] = client.chat.completions.create(**wanted | {"logprobs": False}).choices
    assert none.logprobs is None
    more: Any = {"max_tokens": 4, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    [text] = client.completions.create(model="letters", prompt=PROMPT, **more).choices
    assert text.logprobs is not None and text.logprobs.tokens is not None and len(text.logprobs.tokens) == 4


def test_stop_strings(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "letters", "prompt": PROMPT, "temperature": 0, "max_tokens": 20}
    full = client.completions.create(**wanted, extra_body={"ignore_eos": True}).choices[0].text
    stop = full[4:6]
    answer = client.completions.create(**wanted, stop=[stop, "ABC"], extra_body={"ignore_eos": True})
    [choice] = answer.choices
    assert choice.text == full[: full.index(stop)] and choice.finish_reason == "stop"
    pieces = client.completions.create(**wanted, stop=stop, stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in pieces) == choice.text
    kept = client.completions.create(
        **wanted, stop=stop, extra_body={"ignore_eos": True, "include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == choice.text + stop


def test_extras_of_vllm_and_ours(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "letters", "messages": MESSAGES, "max_tokens": 10, "seed": 1}
    one = client.chat.completions.create(**wanted, extra_body={"top_k": 1, "ignore_eos": True})
    greedy = client.chat.completions.create(**wanted, temperature=0, extra_body={"ignore_eos": True})
    assert one.choices[0].message.content == greedy.choices[0].message.content
    plain = client.chat.completions.create(
        **wanted,
        temperature=0,
        extra_body={"ignore_eos": True, "speculation": {"enabled": False}, "include_speculation_stats": True},
    )
    assert plain.choices == greedy.choices
    assert plain.model_extra is not None and plain.model_extra["pilotfish"]["stats"]["num_drafted"] == 0
    biased = client.chat.completions.create(**wanted, logit_bias={"3": 100})
    assert set(biased.choices[0].message.content or "") == {"d"}


def test_errors(client: openai.OpenAI, server: RunningServer) -> None:
    create: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="letters", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature" and "at least 0" in bad.value.message
    with pytest.raises(openai.BadRequestError) as unknown:
        create(model="letters", messages=MESSAGES, extra_body={"tempertaure": 1})
    assert unknown.value.param == "tempertaure"
    with pytest.raises(openai.BadRequestError) as tools:
        create(model="letters", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    assert tools.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match=r"200.*128"):
        client.completions.create(model="letters", prompt="a" * 200)
    with pytest.raises(openai.BadRequestError, match=r"200.*128"):
        list(client.completions.create(model="letters", prompt="a" * 200, stream=True))
    with pytest.raises(openai.NotFoundError) as model:
        create(model="gpt", messages=MESSAGES)
    assert model.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as key:
        client.with_options(api_key="wrong").models.list()
    assert key.value.code == "invalid_api_key"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="text only"):
        create(model="letters", messages=image)
    assert create(model="letters", messages=MESSAGES, max_tokens=2).choices


def test_many_clients_get_what_one_gets(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        answer = await client.chat.completions.create(
            model="letters", messages=MESSAGES, seed=seed, max_tokens=24, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].message.content or ""

    async def main() -> None:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, http_client=http) as client:
            alone = [await one(client, seed) for seed in range(12)]
            assert await asyncio.gather(*(one(client, seed) for seed in range(12))) == alone
            assert len(set(alone)) == 12

    asyncio.run(main())


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["b", "c"]}, "x": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["a", "x"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def json_server() -> Iterator[RunningServer]:
    """Its vocabulary has what JSON needs; it has no chat template, so prompts are token ids."""
    tokenizer = json_tokenizer()

    def factory() -> Any:
        engine = letters_engine("near", eos_bias=1.0, tokenizer=tokenizer)
        engine.tokenizer = tokenizer  # type: ignore[assignment]
        return engine

    with running(make_host(factory)) as server:
        yield server


def test_json_schema_and_regex(json_server: RunningServer) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{json_server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        ended = 0
        for seed in range(8):
            wanted: Any = {"model": "letters", "prompt": [1, 2, 3], "max_tokens": 60, "seed": seed}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            texts = []
            for speculation in ({"enabled": True}, {"enabled": False}):
                more = {"response_format": form, "speculation": speculation}
                [choice] = client.completions.create(**wanted, extra_body=more).choices
                texts.append(choice.text)
                if choice.finish_reason == "stop":
                    ended += 1
                    jsonschema.validate(json.loads(choice.text), SCHEMA)
            assert texts[0] == texts[1]
            chosen = client.completions.create(**wanted, extra_body={"structured_outputs": {"choice": ["abc", "true"]}})
            assert chosen.choices[0].text in ("abc", "true")
            guided = client.completions.create(**wanted, extra_body={"guided_regex": "x[0-2]{3}"})
            assert guided.choices[0].text[0] == "x" and len(guided.choices[0].text) == 4
        assert ended >= 8
        for field, value, param in (
            (
                "response_format",
                {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
                "response_format.json_schema.schema",
            ),
            ("structured_outputs", {"regex": "(?=a)"}, "structured_outputs.regex"),
            ("guided_grammar", "no grammar", "guided_grammar"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="letters", prompt=[1], extra_body={field: value})
            assert caught.value.param == param and caught.value.body["message"].startswith(param)  # type: ignore[index]
