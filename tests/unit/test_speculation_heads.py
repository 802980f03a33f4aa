"""Draft heads without a model: every row reads the state it should, wherever its sequence comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
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
@pytest.mark.parametrize("budget", [12, 200])
def test_many_at_once_have_the_outputs_and_acceptance_of_one_by_one(scheme: str, num_drafts: int, budget: int) -> None:
    prompts = [[i % 3, 1, 2, 3, *range(i)] for i in range(12)]
    wanted = [
        params(max_tokens=10 + i, temperature=(0.0, 1.0)[i % 2], seed=i, n=1 + i % 3, ignore_eos=True)
        for i in range(len(prompts))
    ]
    for error in (0.0, 0.4):
        engine = engine_with(
            scheme, num_drafts, max_num_seqs=12, num_pages=300, max_num_batched_tokens=budget, head={"error": error}
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


@pytest.mark.parametrize("scheme", EXACT)
def test_what_is_repeated_is_looked_up_and_the_head_goes_on_with_true_states(scheme: str) -> None:
    """The head's runner checks every state that it reads, those of tokens that were looked up included."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    wanted = params(max_tokens=20, ignore_eos=True, logit_bias={5: 4.0})
    engine = engine_with(scheme, 4, head={"lookup": 1})
    proposer: Any = engine.proposer
    by_head, looked_up = [], []
    propose_by_head, look_up = proposer._head.propose, proposer._lookup.propose

    def watched_head(rows: Any) -> Any:
        by_head.append([row.max_drafts for row in rows])
        return propose_by_head(rows)

    def watched_lookup(rows: Any) -> Any:
        proposal = look_up(rows)
        looked_up.append([len(tokens) for tokens in proposal.tokens])
        return proposal

    proposer._head.propose, proposer._lookup.propose = watched_head, watched_lookup
    for i, prompt in enumerate([[*text, *text, *text], [*text, 9], [3, 1]]):
        engine.add_request(str(i), prompt, wanted)
    outputs = run(engine)
    for i, prompt in enumerate([[*text, *text, *text], [*text, 9], [3, 1]]):
        assert summary(outputs[str(i)]) == summary(plain(prompt, wanted))
    found = [n for step in looked_up for n in step]
    left = [n for step in by_head for n in step]
    assert all(n == 0 or m == 0 for n, m in zip(found, left, strict=True)), "one of the two proposes"
    assert any(found) and any(left)


@pytest.mark.parametrize("num_tokens", [20, VOCAB_SIZE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_stops_behind_the_draft_that_makes_the_proposal_unlikely(temperature: float, num_tokens: int) -> None:
    """The joint probability at temperature 1, up to and with a draft, decides whether another one follows."""
    wanted = params(max_tokens=40, ignore_eos=True, temperature=temperature, seed=3)
    lengths = []
    for p_min in (0.0, 0.2, 0.5, 0.999):
        engine = engine_with("head", 4, head={"num_tokens": num_tokens, "p_min": p_min})
        seen = watch(engine)
        assert summary(one(engine, [1, 2], wanted)) == summary(plain([1, 2], wanted))
        assert len(seen) > 5
        for chain in seen:
            joint = np.cumprod([probability for _, probability in chain])
            assert all(joint[:-1] >= p_min), "a draft behind an unlikely proposal"
        free = seen[:-5]  # max_tokens leaves no room for four of the last ones
        short = [chain for chain in free if len(chain) < 4]
        assert all(np.prod([probability for _, probability in chain]) < p_min for chain in short)
        lengths.append(np.mean([len(chain) for chain in free]))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4 > lengths[2] > lengths[-1] == 1


def watch(engine: Engine) -> list[list[tuple[int, float]]]:
    """Of each proposal of the only sequence: the drafts, and what the head gave each of them."""
    proposer: Any = engine.proposer
    ids, choose, propose = proposer._target_ids, proposer._choose, proposer.propose
    seen: list[list[tuple[int, float]]] = []

    def watched_choose(logits: Any, places: Any) -> Any:
        probs = logits.clone().softmax(dim=1)[0].tolist()
        chosen, q = choose(logits, places)
        index = chosen[0] if ids is None else ids.tolist().index(chosen[0])
        seen[-1].append((chosen[0], probs[index]))
        return chosen, q

    def watched_propose(rows: Any) -> Any:
        seen.append([])
        proposal = propose(rows)
        assert [token for token, _ in seen[-1]] == list(proposal.tokens[0])
        if not seen[-1]:
            seen.pop()
        return proposal

    proposer._choose, proposer.propose = watched_choose, watched_propose
    return seen


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
