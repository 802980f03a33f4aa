"""Requests from JSON, and answers to it, without an engine at work."""

from __future__ import annotations

import json
import logging
import re
from typing import Any, ClassVar

import pytest

from fake_llm import Letters
from pilotfish.server.errors import ApiError
from pilotfish.server.logs import JsonFormatter, TextFormatter
from pilotfish.server.metrics import token_gaps
from pilotfish.server.protocol.body import parse_json, validated
from pilotfish.server.protocol.prompts import chat_tokens, completion_prompts
from pilotfish.server.protocol.requests import ChatRequest, CompletionRequest
from pilotfish.server.protocol.sampling import parameter_names, sampling_params
from pilotfish.server.protocol.token_bytes import TokenBytes
from pilotfish.server.stream import Job, Mark, RequestStream, StreamGroup
from pilotfish.types import (
    MAX_LOGPROBS,
    CompletionOutput,
    RequestOutput,
    RequestStats,
    SamplingParams,
    StructuredOutputs,
)

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatRequest:
    return validated(ChatRequest, {"messages": MESSAGES} | fields)


def completion(**fields: Any) -> CompletionRequest:
    return validated(CompletionRequest, {"prompt": "hello"} | fields)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not an array"),
        (b"null", "not null"),
        (b"3", "not a number"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not"),
        (b'\xff{"a": 1}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "more than 4300 digits"),
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse_json(raw)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tempertaure": 1}, "tempertaure", "Did you mean temperature"),
        ({"prompt": None}, "prompt", "is missing"),
        ({"temperature": "1"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"n": 1.5}, "n", "must be an integer"),
        ({"n": "1"}, "n", "must be an integer"),
        ({"stream": "yes"}, "stream", "must be true or false"),
        ({"seed": 1.5}, "seed", "must be an integer"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"logit_bias": {"a": "b"}}, "logit_bias", r"^logit_bias\[a\]=\"b\": must be a number"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"speculation": {"enabled": 1}}, "speculation.enabled", "must be true or false"),
        ({"speculation": {"drafts": 1}}, "speculation.drafts", "not a known field"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "not a known field"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        completion(**fields)
    assert caught.value.status == 400 and caught.value.param == param
    json.loads(caught.value.json())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 5_000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5_000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"+5": 1}}, "logit_bias"),
        ({"logit_bias": {" 5": 1}}, "logit_bias"),
        ({"logit_bias": {"5_0": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ({"logprobs": 101}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"seed": 2**70}, "seed"),
        ({"speculation": {"num_drafts": -1}}, "speculation.num_drafts"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(completion(**fields))
    assert caught.value.status == 400 and caught.value.param == param


def test_two_keys_for_one_token_are_both_named() -> None:
    with pytest.raises(ApiError, match='the keys "5" and "05": both are the token 5') as caught:
        sampling_params(completion(logit_bias={"5": 100, "4": 1, "05": -100}))
    assert caught.value.param == "logit_bias"
    assert sampling_params(completion(logit_bias={"05": 1})).logit_bias == {5: 1}


def test_limits_beyond_openais_are_the_engines() -> None:
    params = sampling_params(chat(temperature=5.0, logprobs=True, top_logprobs=100, stop=["a"] * 64))
    assert params.temperature == 5.0 and params.logprobs == MAX_LOGPROBS == 100 and len(params.stop_strings) == 64
    assert sampling_params(completion(logprobs=100)).logprobs == 100


def test_the_documentation_says_which_endpoint_takes_which_field(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs" / "server.md").read_text()
    [table] = re.findall(r"\| Field \| Chat \| Completions \|.*?\n\n", text, re.DOTALL)
    documented: dict[str, set[str]] = {"chat": set(), "completion": set()}
    for line in table.strip().split("\n")[2:]:
        names, *columns = line.strip("|").split("|")[:3]
        for kind, column in zip(documented, columns, strict=True):
            documented[kind] |= set(re.findall(r"`(\w+)`", names)) if column.strip() else set()
    assert documented == {"chat": set(ChatRequest.model_fields), "completion": set(CompletionRequest.model_fields)}


def test_every_parameter_reaches_the_engine() -> None:
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 1, "max_tokens": 9, "stop": ["x"],
        "stop_token_ids": [3], "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
        "seed": 7, "logprobs": 2,
    }  # fmt: skip
    got = sampling_params(completion(**fields, logit_bias={"4": -1.5}, speculation={"enabled": False, "num_drafts": 3}))
    assert got == SamplingParams(**fields, logit_bias={4: -1.5}, speculate=False, num_drafts=3)


def test_defaults_are_openais() -> None:
    assert sampling_params(chat()) == SamplingParams(max_tokens=None)
    assert sampling_params(chat(temperature=None, n=None, stop=None)) == SamplingParams(max_tokens=None)


def test_both_names_of_max_tokens() -> None:
    assert sampling_params(chat(max_completion_tokens=3)).max_tokens == 3
    assert sampling_params(chat(max_tokens=3, max_completion_tokens=3)).max_tokens == 3
    with pytest.raises(ApiError, match="both mean the same"):
        sampling_params(chat(max_tokens=4, max_completion_tokens=3))
    with pytest.raises(ApiError) as caught:
        sampling_params(chat(max_completion_tokens=0))
    assert caught.value.param == "max_completion_tokens"


def test_logprobs_of_a_chat() -> None:
    assert sampling_params(chat(logprobs=True)).logprobs == 0
    assert sampling_params(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert sampling_params(chat(logprobs=False)).logprobs is None
    with pytest.raises(ApiError, match="needs logprobs"):
        sampling_params(chat(top_logprobs=3))
    with pytest.raises(ApiError) as caught:
        sampling_params(chat(logprobs=True, top_logprobs=101))
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"tools": [], "tool_choice": "none", "modalities": ["text"], "functions": None, "audio": None},
    ],
)
def test_fields_that_say_nothing_about_the_output_are_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields).messages == MESSAGES


@pytest.mark.parametrize(
    "name", ["tools", "functions", "audio", "modalities", "web_search_options", "reasoning_effort", "use_beam_search"]
)
def test_fields_that_would_change_the_output_are_refused(name: str) -> None:
    with pytest.raises(ApiError, match="not supported") as caught:
        chat(**{name: [{"x": 1}]})
    assert caught.value.param == name


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            StructuredOutputs(json=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=["a", "b"])),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_grammar": "start: /a/"}, StructuredOutputs(grammar="start: /a/")),
    ],
)
def test_forms_of_output(fields: dict[str, Any], expected: StructuredOutputs | None) -> None:
    request = chat(**fields)
    assert sampling_params(request).structured_outputs == expected
    names = parameter_names(request)
    assert names["prompt"] == "messages"
    assert expected is None or names["structured_outputs"].startswith(next(iter(fields)))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", [[0, 1, 2]]),
        ([0, 1, 2], [[0, 1, 2]]),
        (["ab", "c"], [[0, 1], [2]]),
        ([[0, 1], [2]], [[0, 1], [2]]),
    ],
)
def test_forms_of_a_prompt(prompt: object, expected: list[list[int]]) -> None:
    assert completion_prompts(Letters(), prompt, 32) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [[], "", [[]], ["a", 1], [1, "a"], [[1], 2], [True], [-1], [32], [1.5], 7, {}, ["a", ""], [[1], ["a"]]]
)
def test_wrong_prompts(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        completion_prompts(Letters(), prompt, 32)  # type: ignore[arg-type]
    assert caught.value.status == 400 and caught.value.param == "prompt"


def test_messages_of_text_parts_and_developers() -> None:
    messages = [{"role": "developer", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
    assert chat_tokens(Letters(), messages) == Letters().encode("sbuca")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"role": "pirate", "content": "a"}, "messages[0].role"),
        ({"role": ["user"], "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls"),
    ],
)
def test_wrong_messages(message: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_tokens(Letters(), [message])  # type: ignore[arg-type]
    assert caught.value.status == 400 and caught.value.param == param


class Vocabulary:
    """Byte-level, SentencePiece's byte tokens, and whole text."""

    def tokens(self) -> list[str | None]:
        return ["a", "ðŁ", "<0xE2>", "Ġx", None]


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    token_bytes = TokenBytes(Vocabulary())  # type: ignore[arg-type]
    assert token_bytes.of(0, "a") == b"a"
    assert token_bytes.of(1, "\ufffd") == b"\xf0\x9f"
    assert token_bytes.of(2, "\ufffd") == b"\xe2"
    assert token_bytes.of(3, " x") == b" x"
    assert token_bytes.of(4, "\ufffd") == "\ufffd".encode()
    assert token_bytes.of(99, "é") == "é".encode()


class Bytes:
    """SentencePiece's byte tokens, then ``é`` in bytes of a byte-level vocabulary, letters and a special token."""

    spelled: ClassVar = ["<0xF0>", "<0x9F>", "<0x90>", "<0xEF>", "<0xBF>", "<0xBD>", "Ã", "©", "a", "</s>"]
    texts: ClassVar = [*["\ufffd"] * 8, "a", "</s>"]

    def tokens(self) -> list[str]:
        return self.spelled

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        [token_id] = token_ids
        return "" if token_id == 9 and skip_special_tokens else self.texts[token_id]


@pytest.mark.parametrize(
    ("text", "token_ids", "left"),
    [
        ("a\ufffd", [8, 6], "a"),
        ("a\ufffd\ufffd", [8, 6, 6], "a\ufffd"),  # no byte makes the first a character
        ("a\ufffd", [8, 7], "a\ufffd"),  # nor this one
        ("\ufffd\ufffd", [0, 1], ""),
        ("\ufffd\ufffd\ufffd", [0, 1, 2], ""),
        ("\ufffd", [3, 4, 5], "\ufffd"),  # the character U+FFFD
        ("\ufffd\ufffd", [0, 1, 9], ""),
        ("a", [8], "a"),
    ],
)
def test_a_part_of_a_character_is_told_from_other_broken_bytes(text: str, token_ids: list[int], left: str) -> None:
    token_bytes = TokenBytes(Bytes())  # type: ignore[arg-type]
    assert token_bytes.without_part(text, token_ids, skip_special_tokens=True) == left


@pytest.mark.parametrize("streams", [False, True])
def test_u_fffd_that_earlier_tokens_wrote_stays_before_a_cut_character(streams: bool) -> None:
    """The character U+FFFD in three of SentencePiece's byte tokens, then a part of another."""
    params = SamplingParams()
    token_bytes = TokenBytes(Bytes())  # type: ignore[arg-type]
    job = Job(request_id="a", prompt_token_ids=[8], params=params, token_bytes=token_bytes, keep_steps=streams)
    stream = RequestStream(job, 0.0, StreamGroup())
    token_ids, ends = [8, 3, 4, 5, 0, 1], [1, 1, 1, 2, 2, 4]
    c = CompletionOutput(0, text="a" + "\ufffd" * 3, token_ids=token_ids, is_draft=[False] * 6, text_ends=ends)
    c.finish_reason = "length"
    output = RequestOutput("a", None, [8], [c], RequestStats())
    for mark in ([Mark(0, 4, finished=False)] if streams else []) + [Mark(0, 6, finished=True)]:
        stream.push(output, [mark])
    assert "".join(delta.text for delta in stream.take()) == "a\ufffd"


def test_gaps_between_tokens_share_a_step() -> None:
    stats = RequestStats(token_times=[1.0, 3.0, 3.0, 4.0])
    assert list(token_gaps(stats)) == [(1.0, 2), (1.0, 1)]
    assert list(token_gaps(RequestStats(token_times=[1.0, 1.0]))) == []
    assert list(token_gaps(RequestStats())) == []


def test_long_messages_are_cut() -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(completion(stop=["a", ["b" * 100_000]]))
    assert len(caught.value.message) < 2_000


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("pilotfish", logging.INFO, "x.py", 1, message, (), None)
    made.fields = fields
    return made


def test_log_lines_are_one_line_each_whatever_is_in_them() -> None:
    line = TextFormatter().format(
        record("request\nforged", id="a b", tokens=3, rate=1.23456, none=None, path='/x\n="é')
    )
    assert "\n" not in line
    assert 'request forged id="a b" tokens=3 rate=1.235 path="/x\\n=\\"\\u00e9"' in line
    body = json.loads(JsonFormatter().format(record("request\nforged", id="a b", none=None)))
    assert body["message"] == "request\nforged" and body["id"] == "a b" and "none" not in body
