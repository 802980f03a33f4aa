"""Draft heads without a model: every row reads the state it should, wherever its sequence comes from."""

from __future__ import annotations

from typing import Any

import pytest

from engines import HEADS, engine_with, one, params, plain, run, summary
from fakes import EOS, VOCAB_SIZE
from fakes_heads import StateCheckingHeadRunner
from pilotfish.engine.engine import Engine

EXACT = [name for name in HEADS if name != "near head"]
"""Heads that know what the target will choose, as long as every row has read the right state."""


def runner_of(engine: Engine) -> StateCheckingHeadRunner:
    runner: StateCheckingHeadRunner = engine.proposer._runner  # type: ignore[attr-defined]
    return runner


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_many_at_once_have_the_outputs_and_acceptance_of_one_by_one(scheme: str, num_drafts: int) -> None:
    prompts = [[i % 3, 1, 2, 3, *range(i)] for i in range(12)]
    wanted = [
        params(max_tokens=10 + i, temperature=(0.0, 1.0)[i % 2], seed=i, n=1 + i % 3, ignore_eos=True)
        for i in range(len(prompts))
    ]
    for error in (0.0, 0.4):
        engine = engine_with(
            scheme, num_drafts, max_num_seqs=12, num_pages=300, max_num_batched_tokens=200, head={"error": error}
        )
        alone = [one(engine, prompt, p) for prompt, p in zip(prompts, wanted, strict=True)]
        for i, (prompt, p) in enumerate(zip(prompts, wanted, strict=True)):
            engine.add_request(str(i), prompt, p)
        together = run(engine)
        for i, output in enumerate(alone):
            assert summary(together[str(i)]) == summary(output)
            assert together[str(i)].stats.speculation == output.stats.speculation
        stats = engine.stats.speculation
        assert (stats.num_accepted == stats.num_drafted) == (error == 0.0)
        assert engine.pool.num_free == 300


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("budget", [3, 4, 7])
def test_prompts_in_chunks_and_preempted_rows_go_on_with_true_states(scheme: str, budget: int) -> None:
    prompts = [[i, 1, 2, 3, 4, 5, 6, *range(3 * i)] for i in range(4)]
    wanted = params(max_tokens=22, temperature=1.0, seed=0, stop=["q"], logit_bias={EOS: -100.0})
    engine = engine_with(scheme, 5, num_pages=11, max_num_seqs=3, max_num_batched_tokens=budget)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, wanted)
    outputs = run(engine)
    assert engine.stats.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert summary(outputs[str(i)]) == summary(plain(prompt, wanted))
        stats = outputs[str(i)].stats.speculation
        assert stats.num_accepted == stats.num_drafted
    assert engine.stats.speculation.num_drafted > 0
    assert engine.pool.num_free == 11


@pytest.mark.parametrize("scheme", EXACT)
def test_requests_that_want_no_drafts_leave_true_pages(scheme: str) -> None:
    engine = engine_with(scheme, 4)
    prompt, wanted = [1, 2, 3], {"max_tokens": 13, "ignore_eos": True}
    first = one(engine, prompt, params(**wanted, speculate=False))
    second = one(engine, [*prompt, *first.outputs[0].token_ids, 5], params(**wanted))
    assert first.stats.speculation.num_drafted == 0 and second.stats.num_cached_tokens == 12
    stats = second.stats.speculation
    assert stats.num_accepted == stats.num_drafted > 0


@pytest.mark.parametrize(("num_modules", "drafting"), [(1, [3]), (2, [0, 3]), (3, [0, 1, 3])])
def test_a_step_runs_no_pass_that_no_draft_needs(num_modules: int, drafting: list[int]) -> None:
    """Four drafts: the first is carried, the others take a row each, of the module whose turn it is and later ones."""
    engine = engine_with("head", 4, head={"num_modules": num_modules})
    engine.add_request("a", [1, 2], params(max_tokens=30, ignore_eos=True))
    engine.step()
    passes = runner_of(engine).num_tokens
    assert passes == [[3]] * num_modules, "the prompt and the first token, once in each module"
    engine.step()
    assert passes == [[3, *[1] * count, 5] for count in drafting], "true rows are four drafts and the bonus token"


@pytest.mark.parametrize("num_tokens", [5, 20, VOCAB_SIZE])
@pytest.mark.parametrize("scheme", ["head", "chain of 3"])
def test_what_is_not_in_the_draft_vocabulary_is_never_proposed(scheme: str, num_tokens: int) -> None:
    bias: dict[str, Any] = {"logit_bias": {1: 8.0, 30: -3.0}, "repetition_penalty": 1.3, "min_tokens": 6}
    for i, more in enumerate(({}, bias)):
        for temperature in (0.0, 1.5):
            engine = engine_with(scheme, 4, head={"num_tokens": num_tokens})
            wanted = params(max_tokens=20, ignore_eos=True, temperature=temperature, seed=i, **more)
            output = one(engine, [1, 2], wanted)
            assert summary(output) == summary(plain([1, 2], wanted))
            c, stats = output.outputs[0], output.stats.speculation
            drafted = [token for token, is_draft in zip(c.token_ids, c.is_draft, strict=True) if is_draft]
            assert all(token >= VOCAB_SIZE - num_tokens for token in drafted)
            assert stats.num_drafted > 10
            assert (stats.num_accepted == stats.num_drafted) == (num_tokens == VOCAB_SIZE)
            assert stats.num_accepted > 0 or num_tokens == 5


@pytest.mark.parametrize("max_len", [1, 5, 9, 16])
@pytest.mark.parametrize("scheme", EXACT)
def test_past_the_heads_own_context_decoding_goes_on_without_drafts(scheme: str, max_len: int) -> None:
    wanted = params(max_tokens=30, ignore_eos=True)
    engine = engine_with(scheme, 5, head={"max_len": max_len})
    for _ in range(2):
        output = one(engine, [1, 2, 3], wanted)
        assert summary(output) == summary(plain([1, 2, 3], wanted))
        stats = output.stats.speculation
        assert stats.num_accepted == stats.num_drafted
        # The last row is at position max_len - 1, and chooses the token behind it.
        is_draft = output.outputs[0].is_draft
        assert not any(is_draft[max(0, max_len + 1 - 3) :])
        assert (stats.num_drafted > 0) == (max_len > 4)


def test_a_head_that_is_wrong_half_the_time_changes_nothing_and_recovers() -> None:
    wanted = params(max_tokens=40, ignore_eos=True, temperature=0.8, seed=2)
    engine = engine_with("near head", 5)
    output = one(engine, [3, 1], wanted)
    assert summary(output) == summary(plain([3, 1], wanted))
    stats = output.stats.speculation
    assert 0 < stats.num_accepted < stats.num_drafted
