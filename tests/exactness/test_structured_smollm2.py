"""Structured output on the real model: valid, and with speculation what it is without."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
import pytest

from benchmarks.structured_schemas import SCHEMAS
from pilotfish import LLM, RequestOutput, SamplingParams, StructuredOutputs
from pilotfish.config import DraftModel, Ngram, Speculation, SpeculationChoice
from speculation_matrix import assert_all_pages_free, assert_same, one_by_one

CHOSEN = ("enum", "numbers", "unicode enum", "unicode pattern", "escapes", "date", "objects")

ASKED = [
    *(StructuredOutputs(json=SCHEMAS[name][1]) for name in CHOSEN),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex=r"The (cat|dog) is [0-9]{1,2} years old\."),
    StructuredOutputs(choice=["positive", "negative", "<|im_end|>", "🐟"]),
    StructuredOutputs(grammar='start: NUMBER ("+" NUMBER)+ "=" NUMBER\nNUMBER: /[1-9][0-9]?/\n'),
]
PARAMS = [
    SamplingParams(temperature=temperature, seed=i, max_tokens=20, structured_outputs=asked, **change)
    for i, asked in enumerate(ASKED)
    for temperature, change in ((0.0, {}), (1.0, {"top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2}))
]
PROMPTS = [f"{i}. The answer, in the form that was asked for:" for i in range(len(PARAMS))]

SCHEMES: dict[str, SpeculationChoice] = {
    "auto": "auto",
    "ngram": Ngram(num_drafts=5, min_ngram=1),
    "layers": DraftModel(num_drafts=4, layers=12),
    "itself": DraftModel(num_drafts=6, model="smollm2-135m"),
}


def make_llm(speculation: SpeculationChoice) -> LLM:
    return LLM("smollm2-135m", speculation=speculation, max_model_len=256, kv_cache_memory=96 << 20, seed=0)


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return one_by_one(make_llm(None), PROMPTS, PARAMS)


def check_valid(outputs: Sequence[RequestOutput]) -> int:
    """How many are complete; these must be what was asked for."""
    complete = 0
    for params, output in zip(PARAMS, outputs, strict=True):
        asked, completion = params.structured_outputs, output.outputs[0]
        assert asked is not None and output.error is None
        if completion.finish_reason == "length":
            continue
        assert completion.finish_reason == "stop"
        complete += 1
        if asked.kind in ("json", "json_object"):
            jsonschema.validate(json.loads(completion.text), asked.json or {"type": "object"})
        elif asked.kind == "choice":
            assert asked.choice is not None and completion.text in asked.choice
        else:
            assert re.fullmatch(asked.regex or r"[1-9][0-9]?(\+[1-9][0-9]?)+=[1-9][0-9]?", completion.text)
    return complete


def test_plain_outputs_are_valid(plain: list[RequestOutput]) -> None:
    assert check_valid(plain) > len(PARAMS) / 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_speculation_in_a_batch(scheme: str, plain: list[RequestOutput]) -> None:
    llm = make_llm(SCHEMES[scheme])
    assert_same(llm.generate(PROMPTS, PARAMS), plain)
    stats = llm.engine.stats.speculation
    assert stats.num_accepted > 10
    assert (stats.num_accepted == stats.num_drafted) == (scheme == "itself")
    assert_all_pages_free(llm)


def test_rejection_is_valid_and_plain_at_temperature_0(plain: list[RequestOutput]) -> None:
    for speculation in (Ngram(num_drafts=4, min_ngram=1), DraftModel(num_drafts=4, layers=12)):
        choice: Speculation = replace(speculation, verify="rejection")
        outputs = make_llm(choice).generate(PROMPTS, PARAMS)
        check_valid(outputs)
        assert_same(outputs[::2], plain[::2])
