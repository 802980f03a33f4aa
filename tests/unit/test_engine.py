"""The engine's promises, without a model: no page leaks, none is shared wrongly, batches change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import params, plain, run, summary
from fakes import EOS, LetterTokenizer, make_engine
from pilotfish.errors import RequestError
from pilotfish.types import RequestOutput, SamplingParams

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=30),  # few distinct tokens: prefixes are shared
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1.0]),
            max_tokens=st.integers(1, 16),
            n=st.sampled_from([1, 1, 3]),
            seed=st.integers(0, 3),
            logprobs=st.sampled_from([None, 2]),
            repetition_penalty=st.sampled_from([1.0, 1.5]),
        ),
        st.integers(0, 12),  # the step before which it arrives
        st.sampled_from([None, None, None, 0, 3, 7]),  # steps after its arrival until it is aborted
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    num_pages=st.sampled_from([12, 16, 40]),
    max_num_seqs=st.integers(1, 4),
    budget=st.sampled_from([4, 7, 16]),
    prefix_caching=st.booleans(),
)
def test_random_traffic_leaks_nothing_and_equals_one_by_one(
    requests: list[tuple[list[int], SamplingParams, int, int | None]],
    num_pages: int,
    max_num_seqs: int,
    budget: int,
    prefix_caching: bool,
) -> None:
    engine = make_engine(
        num_pages=num_pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching, eos_bias=3.0,
    )  # fmt: skip
    outputs: dict[str, RequestOutput] = {}
    for step in range(10_000):
        for i, (prompt, sampling, arrival, abort) in enumerate(requests):
            if arrival == step:
                engine.add_request(str(i), prompt, sampling)
            if abort is not None and arrival + abort == step:
                aborted = engine.abort(str(i))
                if aborted is not None:
                    outputs[str(i)] = aborted
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        engine.pool.check_integrity()
        if step > 20 and not engine.has_unfinished:
            break
    assert not engine.has_unfinished and not engine.scheduler.has_rows
    assert engine.pool.num_free == num_pages
    assert set(outputs) == {str(i) for i in range(len(requests))}
    for i, (prompt, sampling, _, abort) in enumerate(requests):
        expected = plain(prompt, sampling, eos_bias=3.0)
        if abort is None:
            assert summary(outputs[str(i)]) == summary(expected)
        for got, want in zip(outputs[str(i)].outputs, expected.outputs, strict=True):
            assert want.token_ids[: len(got.token_ids)] == got.token_ids


def test_preemption_changes_no_output_and_is_counted() -> None:
    prompts = [[i, 1, 2, 3, 4, 5, 6] for i in range(4)]
    engine = make_engine(num_pages=12)  # one full sequence; four of them need 4 * 6
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params(max_tokens=16, ignore_eos=True))
    outputs = run(engine)
    assert engine.stats.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert summary(outputs[str(i)]) == summary(plain(prompt, params(max_tokens=16, ignore_eos=True)))
    assert outputs["0"].stats.num_preemptions == 0, "the oldest is never preempted"
    assert sum(output.stats.num_preemptions for output in outputs.values()) == engine.stats.num_preemptions
    assert engine.pool.num_free == 12


def test_a_second_equal_prompt_is_served_from_the_prefix_cache() -> None:
    engine = make_engine()
    prompt = list(range(18))
    engine.add_request("first", prompt, params())
    first = run(engine)["first"]
    engine.add_request("second", prompt, params())
    second = run(engine)["second"]
    assert summary(first) == summary(second)
    assert first.stats.num_cached_tokens == 0
    assert second.stats.num_cached_tokens == 16, "four full pages of four; the last token is always computed"
    assert engine.stats.prefix_cache_hits == 16 and engine.stats.prefix_cache_queries == 36
    assert engine.stats.num_prompt_tokens == 20


def test_completions_of_one_request_share_the_prompts_pages() -> None:
    engine = make_engine()
    engine.add_request("r", list(range(16)), params(n=3, temperature=1.0, seed=5, ignore_eos=True))
    output = run(engine)["r"]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert engine.stats.prefix_cache_hits == 2 * 12
    assert [c.index for c in output.outputs] == [0, 1, 2]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_beside_decoding() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request("short", [1], params(max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add_request("long", list(range(30)), params(ignore_eos=True))
    seen = []
    while engine.has_unfinished:
        seen.append({output.request_id for output in engine.step()})
    assert seen[:4] == [{"short"}] * 4, "30 tokens at 7 a step; decoding never waits"
    assert seen[4] == {"short", "long"}


def test_arrivals_start_in_order() -> None:
    engine = make_engine(max_num_seqs=1)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], params(max_tokens=2, ignore_eos=True))
    order = [output.request_id for _ in range(6) for output in engine.step()]
    assert order == list("aabbcc")


@pytest.mark.parametrize(
    ("prompt", "kwargs", "param", "message"),
    [
        ([], {}, "prompt", "empty"),
        ([1, 99], {}, "prompt", "token id 99: this model's ids are integers from 0 to 31"),
        ([-1], {}, "prompt", "token id -1"),
        (["a"], {}, "prompt", "token id 'a'"),
        ([1] * 48, {}, "prompt", r"48 tokens; the context \(max_model_len\) is 48.*at most 47"),
        ([1] * 40, {"max_tokens": 9}, "max_tokens", "max_tokens=9 after a prompt of 40 tokens needs 49.*at most 8"),
        ([1], {"logit_bias": {32: 1.0}}, "logit_bias", "32"),
        ([1], {"stop_token_ids": [77]}, "stop_token_ids", "77"),
    ],
)
def test_a_bad_request_fails_plain(prompt: list[Any], kwargs: dict[str, Any], param: str, message: str) -> None:
    engine = make_engine()
    engine.add_request("good", [1, 2, 3], params())
    engine.step()
    with pytest.raises(RequestError, match=message) as caught:
        engine.add_request("bad", prompt, params(**kwargs))
    assert caught.value.param == param
    assert summary(run(engine)["good"]) == summary(plain([1, 2, 3], params()))
    assert engine.pool.num_free == engine.pool.num_pages


def test_a_request_id_in_use_is_refused() -> None:
    engine = make_engine()
    engine.add_request("r", [1], params())
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("r", [1], params())


def test_output_runs_to_the_end_of_the_context_without_max_tokens() -> None:
    output = plain([1] * 40, params(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"
    full = plain([1] * 47, params(max_tokens=None, ignore_eos=True))
    assert len(full.outputs[0].token_ids) == 1, "the last token of the context is produced"


def test_eos_stop_tokens_and_stop_strings_end_where_they_should() -> None:
    prompt, no_eos = [3, 1, 4], {EOS: -100.0}  # so that every token is one character
    whole = plain(prompt, params(max_tokens=20, logit_bias=no_eos)).outputs[0]
    target = whole.token_ids[6]
    first = whole.token_ids.index(target)

    stopped = plain(prompt, params(max_tokens=20, logit_bias=no_eos, stop_token_ids=[target])).outputs[0]
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", target)
    assert stopped.text == whole.text[:first], "the stop token's text is left out"

    kept = plain(
        prompt, params(max_tokens=20, logit_bias=no_eos, stop_token_ids=[target], include_stop_str_in_output=True)
    ).outputs[0]
    assert kept.text == whole.text[: first + 1]

    string = whole.text[5:8]
    at = whole.text.index(string)
    cut = plain(prompt, params(max_tokens=20, logit_bias=no_eos, stop=[string], logprobs=0)).outputs[0]
    assert cut.text == whole.text[:at]
    assert cut.token_ids == whole.token_ids[: at + 3], "the token that completes the stop string is the last"
    assert cut.logprobs is not None and len(cut.logprobs) == len(cut.token_ids)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", string)


def test_eos_is_a_stop_without_a_reason_and_without_text() -> None:
    output = plain([1], params(max_tokens=40, temperature=1.0, seed=1), eos_bias=9.0).outputs[0]
    assert output.token_ids[-1] == EOS
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert len(output.text) == len(output.token_ids) - 1


def test_min_tokens_holds_eos_back() -> None:
    output = plain([1], params(max_tokens=20, min_tokens=10), eos_bias=99.0).outputs[0]
    assert len(output.token_ids) == 11 and output.token_ids[-1] == EOS


def test_abort_gives_pages_back_and_keeps_the_output_so_far() -> None:
    engine = make_engine()
    engine.add_request("r", [1, 2, 3, 4, 5], params(n=2, max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    output = engine.abort("r")
    assert output is not None and output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    assert len(output.outputs[0].token_ids) == 3
    assert engine.pool.num_free == engine.pool.num_pages and not engine.has_unfinished
    assert engine.abort("r") is None


def test_statistics_count_what_requests_received() -> None:
    engine = make_engine()
    engine.add_request("r", [1, 2, 3], params(max_tokens=5, ignore_eos=True, logprobs=1))
    output = run(engine)["r"]
    assert engine.stats.num_generation_tokens == 5 and engine.stats.num_prompt_tokens == 3
    assert engine.stats.num_steps == 5
    stats = output.stats
    assert stats.num_steps == 5 and len(stats.token_times) == 5
    assert stats.ttft_ms is not None and stats.itl_ms_p50 is not None and stats.ttft_ms >= 0
    together = replace(stats, token_times=[1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 1.75])
    assert (together.arrivals_ms, together.itl_ms_p50) == ([500.0, 250.0], 500.0), "tokens of a step arrive together"
    entry = output.outputs[0].logprobs
    assert entry is not None
    assert all(token in position for token, position in zip(output.outputs[0].token_ids, entry, strict=True))
    assert all(item.decoded_token is not None for position in entry for item in position.values())


NO_EOS = {EOS: -100.0}  # so that every token is one character


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
def test_text_held_back_for_a_stop_string_that_never_comes_is_given_out(max_tokens: int) -> None:
    whole = plain([3, 1, 4], params(max_tokens=max_tokens, logit_bias=NO_EOS)).outputs[0]
    held = plain([3, 1, 4], params(max_tokens=max_tokens, logit_bias=NO_EOS, stop=[whole.text[-1] + "~"])).outputs[0]
    assert (held.text, held.token_ids, held.finish_reason) == (whole.text, whole.token_ids, "length")
    assert len(held.text) == max_tokens

    ended = plain(
        [3, 1, 4], params(max_tokens=20, logit_bias={EOS: 100.0, 5: 99.0}, min_tokens=2, stop=["f~", "ff~"])
    ).outputs[0]
    assert ended.finish_reason == "stop" and ended.token_ids[-1] == EOS
    assert ended.text == "f" * (len(ended.token_ids) - 1), "held back until EOS, then given out"


def test_stop_strings_within_the_first_min_tokens_are_ignored() -> None:
    whole = plain([3, 1, 4], params(max_tokens=20, logit_bias=NO_EOS)).outputs[0]
    early = whole.text[1:3]
    assert early not in whole.text[3:], "choose another prompt: the string must come once"
    cut = plain([3, 1, 4], params(max_tokens=20, logit_bias=NO_EOS, stop=[early])).outputs[0]
    assert cut.text == whole.text[:1]
    for min_tokens, ignored in [(2, False), (3, True), (4, True)]:
        output = plain(
            [3, 1, 4], params(max_tokens=20, logit_bias=NO_EOS, stop=[early], min_tokens=min_tokens)
        ).outputs[0]
        assert (output.text == whole.text) is ignored


class HalvesTokenizer(LetterTokenizer):
    """Tokens 28 and 29 are the two halves of one character."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = super().decode(token_ids, skip_special_tokens)
        first, second = self.token_text(28), self.token_text(29)
        return text.replace(first + second, "é").replace(first, "\ufffd").replace(second, "\ufffd")


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_an_output_that_ends_within_a_character_ends_in_a_replacement(max_tokens: int) -> None:
    engine = make_engine()
    engine.tokenizer = HalvesTokenizer()  # type: ignore[assignment]
    engine.add_request("r", [1], params(max_tokens=max_tokens, logit_bias={28: 100.0}))
    seen = []
    while engine.has_unfinished:
        seen += [output.outputs[0].text for output in engine.step()]
    assert seen == [""] * (max_tokens - 1) + ["\ufffd" * max_tokens]


def test_numpy_token_ids_become_plain_ones() -> None:
    engine = make_engine()
    engine.add_request("r", np.array([1, 2, 3]), params(max_tokens=1))  # type: ignore[arg-type]
    output = run(engine)["r"]
    assert output.prompt_token_ids == [1, 2, 3] and all(type(token) is int for token in output.prompt_token_ids)
