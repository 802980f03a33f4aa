"""What the exactness suites of speculation run on every model: parameters, unrelated requests, the comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pilotfish import LLM, RequestOutput, SamplingParams

TEMPERATURES = [0.0, 0.7, 1.5]


def parameters(num_tokens: int, up: int, down: int) -> list[SamplingParams]:
    """Every sampling parameter at every temperature, each with a seed, ``num_tokens`` tokens at most.

    Args:
        num_tokens: ``max_tokens``.
        up, down: tokens that logit_bias forces and forbids.
    """
    changes: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.4},
        {"logit_bias": {up: 100.0, down: -100.0}, "frequency_penalty": 2.0, "ignore_eos": True},
        {"logit_bias": {down: -100.0}},
        {"min_tokens": num_tokens - 2},
        {"logprobs": 3},
        {"logprobs": 0, "top_k": 8, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": -1.0, "n": 2},
    ]
    return [
        SamplingParams(**{"max_tokens": num_tokens, "temperature": temperature, "seed": 11 * i + 1} | change)
        for temperature in TEMPERATURES
        for i, change in enumerate(changes)
    ]


def with_drafts(params: Iterable[SamplingParams], k: int) -> list[SamplingParams]:
    """At most ``k`` drafts a step."""
    return [replace(p, num_drafts=k) for p in params]


def one_by_one(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return [llm.generate([prompt], [wanted])[0] for prompt, wanted in zip(prompts, params, strict=True)]


def assert_same(got: Sequence[RequestOutput], want: Sequence[RequestOutput]) -> None:
    """Token ids, text, reasons, and log-probabilities to 1e-4."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.error is None and b.error is None
        for c, d in zip(a.outputs, b.outputs, strict=True):
            assert c.token_ids == d.token_ids, f"request {i}"
            assert (c.text, c.finish_reason, c.stop_reason) == (d.text, d.finish_reason, d.stop_reason), f"request {i}"
            assert (c.logprobs is None) == (d.logprobs is None)
            for x, y in zip(c.logprobs or [], d.logprobs or [], strict=True):
                assert {t: e.logprob for t, e in x.items()} == pytest.approx(
                    {t: e.logprob for t, e in y.items()}, abs=1e-4
                )
                assert [(e.rank, e.decoded_token) for e in x.values()] == [
                    (e.rank, e.decoded_token) for e in y.values()
                ]
            assert len(c.is_draft) == len(c.token_ids) == len(c.text_ends)


def assert_all_pages_free(llm: LLM) -> None:
    pool = llm.engine.pool
    pool.check_integrity()
    assert pool.num_free == pool.num_pages and not llm.engine.has_unfinished
