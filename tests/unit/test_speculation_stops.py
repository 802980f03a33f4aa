"""Stops, EOS and max_tokens inside an accepted run: everything ends where plain decoding ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from engines import check_statistics, engine_with, one, params, plain, summary
from fakes import EOS
from pilotfish.llm import LLM
from pilotfish.types import RequestOutput, SamplingParams

PROMPT, NO_EOS = [3, 1, 4], {EOS: -100.0}


@cache
def long_plain() -> RequestOutput:
    """Twenty tokens, each one letter."""
    return plain(PROMPT, params(max_tokens=20, logit_bias=NO_EOS, temperature=1.0, seed=5))


@pytest.fixture(scope="module")
def plain_once() -> Callable[[SamplingParams], RequestOutput]:
    """Plain decoding of ``PROMPT``, once for each set of parameters."""
    known: dict[str, RequestOutput] = {}

    def get(wanted: SamplingParams) -> RequestOutput:
        key = repr(wanted)
        if key not in known:
            known[key] = plain(PROMPT, wanted)
        return known[key]

    return get


def declared_stops() -> list[dict[str, Any]]:
    """Tokens that plain decoding gives, and pieces of its text of unequal lengths."""
    c = long_plain().outputs[0]
    text = c.text
    assert len(text) == len(c.token_ids) == 20
    stops: list[dict[str, Any]] = [{"stop_token_ids": [token]} for token in c.token_ids[::2]]
    stops += [{"stop": text[at]} for at in range(1, 20, 6)]
    stops += [{"stop": [text[at : at + 4], text[at + 1 : at + 3]]} for at in range(0, 17, 5)]
    stops += [{"stop": ["#", text[7:12], text[9:11], text[15]]}, {"stop": [text[6:8], text[5:9]]}]
    return [stop | {"include_stop_str_in_output": i % 2 == 1} for i, stop in enumerate(stops)]


@pytest.mark.parametrize("scheme", ["equal", "guess"])
def test_stops_inside_an_accepted_run(scheme: str, plain_once: Callable[[SamplingParams], RequestOutput]) -> None:
    engine = engine_with(scheme, 8)
    reasons = set()
    for stop in declared_stops():
        for max_tokens in range(1, 21):
            wanted = params(
                max_tokens=max_tokens, logit_bias=NO_EOS, temperature=1.0, seed=5, logprobs=1, **stop
            )  # fmt: skip
            output = one(engine, PROMPT, wanted)
            assert summary(output) == summary(plain_once(wanted))
            check_statistics(output)
            reasons.add(output.outputs[0].finish_reason)
    assert reasons == {"stop", "length"}
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize("scheme", ["oracle", "equal"])
def test_streamed_pieces_are_the_output(scheme: str, plain_once: Callable[[SamplingParams], RequestOutput]) -> None:
    llm = LLM.from_engine(engine_with(scheme, 8))
    for stop in declared_stops():
        for max_tokens in (1, 2, 9, 10, 11, 20):
            wanted = params(max_tokens=max_tokens, logit_bias=NO_EOS, temperature=1.0, seed=5, logprobs=1, **stop)
            pieces = list(llm.stream(PROMPT, wanted))
            want = plain_once(wanted).outputs[0]
            assert "".join(piece.text for piece in pieces) == want.text
            assert [token for piece in pieces for token in piece.token_ids] == want.token_ids
            assert summary(pieces[-1].output) == summary(plain_once(wanted))
            assert len(want.token_ids) < 4 or len(pieces) < len(want.token_ids), "some steps brought more than one"


@pytest.mark.parametrize("scheme", ["oracle", "equal"])
def test_eos_inside_an_accepted_run_ends_it_unless_ignored(scheme: str) -> None:
    ended = 0
    for seed in range(30):
        for ignore in (False, True):
            wanted = params(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=ignore, logprobs=0)
            output = one(engine_with(scheme, 8, eos_bias=4.0), [1], wanted)
            c = output.outputs[0]
            assert summary(output) == summary(plain([1], wanted, eos_bias=4.0))
            check_statistics(output)
            assert not ignore or (len(c.token_ids) == 20 and c.finish_reason == "length")
            # The last token may be an accepted draft: then what the run had behind it is gone.
            ended += not ignore and c.token_ids[-1] == EOS and c.is_draft[-1]
    assert ended > 5
