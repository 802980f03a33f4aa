"""Speculation without a model: whatever is proposed, requests get what plain decoding gives, and no page leaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import (
    ALWAYS_RIGHT,
    HEADS,
    KS,
    SCHEMES,
    check_statistics,
    engine_with,
    one,
    params,
    plain,
    run,
    summary,
)
from fakes import EOS, make_engine
from pilotfish.engine.engine import Engine
from pilotfish.types import RequestOutput, SamplingParams, SpeculationStats


def check_totals(engine: Engine, outputs: list[RequestOutput]) -> None:
    """The engine's statistics are the sum of its requests'."""
    parts, total = [output.stats.speculation for output in outputs], engine.stats.speculation
    for name in ("num_steps", "num_drafted", "num_accepted", "num_emitted"):
        assert getattr(total, name) == sum(getattr(part, name) for part in parts), name
    for name in ("drafted_at", "accepted_at"):
        columns = [sum(getattr(p, name)[i : i + 1][0] for p in parts if len(getattr(p, name)) > i)
                   for i in range(len(getattr(total, name)))]  # fmt: skip
        assert getattr(total, name) == columns
    assert engine.stats.num_generation_tokens == sum(len(c.token_ids) for o in outputs for c in o.outputs)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    max_tokens=st.integers(1, 16),
    n=st.sampled_from([1, 1, 1, 3]),
    seed=st.integers(0, 3),
    logprobs=st.sampled_from([None, None, 0, 2]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    logit_bias=st.sampled_from([None, None, {3: 100.0}, {3: -100.0, EOS: 4.0}]),
    stop=st.sampled_from([None, None, "a", ["bc", "d", "efg"]]),
    stop_token_ids=st.sampled_from([None, None, [7, 9]]),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    speculate=st.sampled_from([True, True, True, False]),
    num_drafts=st.sampled_from([None, None, 0, 1, 3, 99]),
).flatmap(lambda p: st.builds(lambda low: replace(p, min_tokens=low), st.sampled_from([0, 0, p.max_tokens // 2])))

traffic = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=30),  # few distinct tokens: prefixes are shared
        sampling_params,
        st.integers(0, 8),  # the step before which it arrives
        st.sampled_from([None, None, None, 0, 2, 5]),  # steps after its arrival until it is aborted
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(
    traffic=traffic,
    scheme=st.sampled_from(SCHEMES),
    k=st.sampled_from(KS),
    num_pages=st.sampled_from([12, 16, 40]),
    max_num_seqs=st.integers(1, 4),
    budget=st.sampled_from([4, 7, 16, 32]),
    prefix_caching=st.booleans(),
    decode_only=st.booleans(),
)
def test_random_traffic_equals_plain_decoding_one_by_one(
    traffic: list[tuple[list[int], SamplingParams, int, int | None]],
    scheme: str,
    k: int,
    num_pages: int,
    max_num_seqs: int,
    budget: int,
    prefix_caching: bool,
    decode_only: bool,
) -> None:
    engine = engine_with(
        scheme, k, num_pages=num_pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching, eos_bias=2.0, decode_only_batches=decode_only,
    )  # fmt: skip
    outputs: dict[str, RequestOutput] = {}
    for step in range(10_000):
        for i, (prompt, sampling, arrival, abort) in enumerate(traffic):
            if arrival == step:
                engine.add_request(str(i), prompt, sampling)
            if abort is not None and arrival + abort == step:
                aborted = engine.abort(str(i))
                if aborted is not None:
                    outputs[str(i)] = aborted
        outputs.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.pool.check_integrity()
        if step > 14 and not engine.has_unfinished:
            break
    assert not engine.has_unfinished and not engine.scheduler.has_rows
    assert engine.pool.num_free == num_pages
    assert set(outputs) == {str(i) for i in range(len(traffic))}
    assert all(count <= engine.config.max_step_tokens for count in engine.runner.num_tokens)  # type: ignore[attr-defined]
    for i, (prompt, sampling, _, abort) in enumerate(traffic):
        output, expected = outputs[str(i)], plain(prompt, sampling, eos_bias=2.0)
        if abort is None:
            assert summary(output) == summary(expected)
        for got, want in zip(output.outputs, expected.outputs, strict=True):
            assert want.token_ids[: len(got.token_ids)] == got.token_ids
        check_statistics(output)
        stats = output.stats.speculation
        if scheme in ALWAYS_RIGHT:
            assert stats.num_accepted == stats.num_drafted
        if not sampling.speculate or sampling.num_drafts == 0:
            assert stats == SpeculationStats("ngram", k)
        assert len(stats.drafted_at) <= k
    check_totals(engine, list(outputs.values()))


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_last_token_of_the_context_is_produced(scheme: str, k: int) -> None:
    for length in range(38, 48):
        endless = params(max_tokens=None, ignore_eos=True, temperature=1.0, seed=length)
        output = one(engine_with(scheme, k), [1] * length, endless)
        assert len(output.outputs[0].token_ids) == 48 - length and output.outputs[0].finish_reason == "length"
        assert summary(output) == summary(plain([1] * length, endless))
        check_statistics(output)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("scheme", ALWAYS_RIGHT)
def test_right_drafts_take_the_fewest_steps_there_can_be(scheme: str, k: int) -> None:
    """So the first draft comes right after the prompt, and a step near max_tokens drafts no more than it can use."""
    for temperature in (0.0, 1.5):
        for max_tokens in range(1, 21):
            wanted = params(max_tokens=max_tokens, ignore_eos=True, temperature=temperature, seed=1)
            engine = engine_with(scheme, k)
            output = one(engine, [4, 2], wanted)
            full, rest = divmod(max_tokens - 1, k + 1)
            assert engine.stats.num_steps == 1 + full + (rest > 0)
            stats = output.stats.speculation
            assert stats.num_accepted == stats.num_drafted == full * k + max(0, rest - 1)
            assert summary(output) == summary(plain([4, 2], wanted))
            if scheme == "equal":
                computed = engine.proposer._runner.num_tokens  # type: ignore[attr-defined]
                assert sum(computed) == 2 + max_tokens - 1, "the draft runs over each token once, not over the last"


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("scheme", ["equal", *(name for name in HEADS if name in ALWAYS_RIGHT)])
def test_a_draft_that_is_always_right_is_always_accepted(scheme: str, k: int, verify: str, temperature: float) -> None:
    """At every length of prompt and output, from the prefix cache too, and where a conversation goes on.

    The draft reads its own KV back through its own pages, and a head checks every state that it is given: an entry that
    is missing or wrong changes what it proposes.
    """
    wanted = {"ignore_eos": True, "temperature": temperature, "seed": 3}
    engine = engine_with(scheme, k, verify=verify)
    for length in range(1, 14):
        for max_tokens in (2, 7, 16):
            prompt = [length, *range(length - 1)]
            first, second = (one(engine, prompt, params(max_tokens=max_tokens, **wanted)) for _ in range(2))
            assert second.stats.num_cached_tokens == (length - 1) // 4 * 4
            assert summary(first) == summary(second)
            assert first.stats.speculation == second.stats.speculation
            follow_up = [*prompt, *first.outputs[0].token_ids, 9]
            third = one(engine, follow_up, params(max_tokens=6, **wanted))
            assert third.stats.num_cached_tokens == (length + max_tokens - 1) // 4 * 4, "output pages are cached too"
            for output in (first, second, third):
                stats = output.stats.speculation
                assert stats.num_accepted == stats.num_drafted
                assert stats.num_drafted > 0 or max_tokens == 2
                check_statistics(output)
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.mark.parametrize("k", KS)
def test_a_draft_keeps_its_acceptance_through_preemption_and_stops(k: int) -> None:
    prompts = [[i, 1, 2, 3, 4, 5, 6] for i in range(4)]
    engine = engine_with("equal", k, num_pages=12, max_num_batched_tokens=40)
    wanted = params(max_tokens=30, temperature=1.0, seed=0, stop=["q"], logit_bias={EOS: -100.0})
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, wanted)
    outputs = run(engine)
    assert engine.stats.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert summary(outputs[str(i)]) == summary(plain(prompt, wanted))
        stats = outputs[str(i)].stats.speculation
        assert stats.num_accepted == stats.num_drafted
    assert engine.stats.speculation.num_drafted > 10
    assert engine.pool.num_free == 12


@pytest.mark.parametrize("max_len", [1, 5, 9, 16])
def test_past_the_drafts_own_context_decoding_goes_on_without_drafts(max_len: int) -> None:
    wanted = params(max_tokens=30, ignore_eos=True)
    engine = engine_with("equal", 5, draft={"max_len": max_len})
    output = one(engine, [1, 2, 3], wanted)
    assert summary(output) == summary(plain([1, 2, 3], wanted))
    stats = output.stats.speculation
    # It sees positions below max_len, so the last token that it can propose is the one after them.
    assert stats.num_accepted == stats.num_drafted
    assert sum(output.outputs[0].is_draft[max(0, max_len + 1 - 3) :]) == 0
    assert (stats.num_drafted > 0) == (max_len > 4)


@pytest.mark.parametrize(("vocab_size", "num_tokens"), [(20, 20), (40, 32), (32, 20)])
def test_padding_is_never_proposed_and_what_the_draft_lacks_is_never_accepted(vocab_size: int, num_tokens: int) -> None:
    engine = engine_with("equal", 4, draft={"vocab_size": vocab_size, "num_tokens": num_tokens})
    for seed in range(4):
        wanted = params(max_tokens=16, ignore_eos=True, temperature=1.5, seed=seed)
        output = one(engine, [1, 2], wanted)
        assert summary(output) == summary(plain([1, 2], wanted))
        c, stats = output.outputs[0], output.stats.speculation
        assert all(token < num_tokens for token, is_draft in zip(c.token_ids, c.is_draft, strict=True) if is_draft)
        assert stats.num_accepted > 0
        assert (stats.num_accepted == stats.num_drafted) == (num_tokens == 32)


def test_drafts_are_clamped_where_pages_are_short_and_nobody_is_preempted_for_them() -> None:
    engine = engine_with("oracle", 8, num_pages=5, max_num_batched_tokens=32)
    prompts, wanted = [[0] * 6, [1] * 9], params(max_tokens=10, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, wanted)
    engine.step()
    engine.step()
    assert engine.runner.num_tokens == [15, (1 + 1) + (1 + 2)]  # type: ignore[attr-defined]
    assert engine.stats.num_preemptions == 0, "pages of 8 and 12 slots: room for one draft and for two"
    outputs = run(engine)
    assert engine.stats.num_preemptions == 1, "the younger makes room for the older's next token"
    for i, prompt in enumerate(prompts):
        assert summary(outputs[str(i)]) == summary(plain(prompt, wanted))


@pytest.mark.parametrize("decode_only", [False, True])
def test_steps_that_compute_a_prompt_draft_unless_told_otherwise(decode_only: bool) -> None:
    engine = engine_with("oracle", 3, decode_only_batches=decode_only)
    engine.add_request("a", [1], params(max_tokens=30, ignore_eos=True))
    engine.step()
    engine.step()
    engine.add_request("b", [2] * 5, params(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    # One token and three drafts; with the prompt of five beside it; then both decode.
    mixed = 1 + (0 if decode_only else 3) + 5
    assert engine.runner.num_tokens == [1, 4, mixed, 8]  # type: ignore[attr-defined]


def test_drafts_come_on_top_of_the_token_budget() -> None:
    engine = engine_with("oracle", 8, max_num_batched_tokens=10)
    for name, prompt in {"a": [1, 2], "b": [1] * 30}.items():
        engine.add_request(name, prompt, params(max_tokens=18, ignore_eos=True))
    engine.step()
    engine.step()
    engine.step()
    # The prompt gets what the tokens leave of the budget; the drafts beside it cost it nothing and are all there.
    assert engine.runner.num_tokens == [2 + 8, (1 + 8) + 9, (1 + 7) + 9]  # type: ignore[attr-defined]
    assert engine.config.max_step_tokens == 10 + 4 * 8


def test_a_request_may_ask_for_fewer_drafts_or_none() -> None:
    engine = engine_with("oracle", 4, max_num_batched_tokens=40)
    wishes: dict[str, dict[str, Any]] = {
        "all": {}, "two": {"num_drafts": 2}, "more": {"num_drafts": 9}, "off": {"speculate": False},
    }  # fmt: skip
    for name, wish in wishes.items():
        engine.add_request(name, [1, 2], params(max_tokens=12, ignore_eos=True, **wish))
    lengths = {name: len(o.stats.speculation.drafted_at) for name, o in run(engine).items()}
    assert lengths == {"all": 4, "two": 2, "more": 4, "off": 0}


def test_engine_statistics_name_the_scheme_and_its_rule() -> None:
    assert make_engine().stats.speculation == SpeculationStats("none", 0)
    assert engine_with("oracle", 3).stats.speculation == SpeculationStats("ngram", 3)
    assert not engine_with("oracle", 3, verify="threshold").stats.speculation.exact
