"""Structured output with speculation: the tokens of plain decoding, whatever is proposed, and always valid."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from distributions import fits
from engines import ALWAYS_RIGHT, SCHEMES, check_statistics, engine_with, one, run, summary
from fakes import EOS, VOCAB_SIZE, make_engine, next_logits
from helpers_grammar import json_tokenizer
from pilotfish import LLM
from pilotfish.engine.engine import Engine
from pilotfish.errors import RequestError
from pilotfish.grammar import GrammarCompiler
from pilotfish.grammar import matcher as matcher_module
from pilotfish.grammar.matcher import GrammarTime
from pilotfish.ops.reference import TorchOps
from pilotfish.sampling import LogitsRow, SamplerState, process_logits, sample, softmax_probs
from pilotfish.speculation import DraftRow, Proposal
from pilotfish.types import RequestOutput, SamplingParams, StructuredOutputs

TOKENIZER = json_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"enum": ["b", "é"]}]}},
        "c": {"type": "string", "maxLength": 4},
    },
    "additionalProperties": False,
    "required": ["a"],
}
REGEX = r"\{(ab?c,|x[0-2]+)*\}"
GRAMMAR = 'start: "[" [start ("," start)*] "]" | /[a-c]+/\n'
ASKED = {
    "json": StructuredOutputs(json=SCHEMA),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=REGEX),
    "choice": StructuredOutputs(choice=["abc", "ab", "true", 'x"']),
    "grammar": StructuredOutputs(grammar=GRAMMAR),
}
PROMPTS = [[i, 1, 2, i, 1, 2, 3] for i in range(6)]
BIAS = 1.0


def wanted(**kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "seed": 5} | kwargs)


def engine(scheme: str | None, k: int = 4, **kwargs: Any) -> Engine:
    return engine_with(scheme, k, tokenizer=TOKENIZER, eos_bias=BIAS, **kwargs)


def check_valid(output: RequestOutput, asked: StructuredOutputs) -> None:
    for completion in output.outputs:
        text = completion.text
        if completion.finish_reason == "length":
            continue
        assert completion.finish_reason == "stop" and completion.token_ids[-1] == EOS and output.error is None
        if asked.kind == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif asked.kind == "json_object":
            assert isinstance(json.loads(text), dict)
        elif asked.kind == "regex":
            assert re.fullmatch(REGEX, text)
        elif asked.kind == "choice":
            assert asked.choice is not None and text in asked.choice


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Each kind of grammar at each temperature with each of a few parameters."""
    changes: list[dict[str, Any]] = [
        {},
        {"n": 3},
        {"top_k": 3, "logprobs": 2},
        {"top_p": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 1.0},
        {"min_tokens": 9, "logit_bias": {0: 3.0, EOS: 8.0}},
        {"ignore_eos": True, "min_p": 0.2},
        {"stop_token_ids": [9, 12], "presence_penalty": 1.0},
        {"stop": ["c", "1"], "max_tokens": 9},
    ]
    return [
        (PROMPTS[i % len(PROMPTS)], wanted(temperature=temperature, seed=i, structured_outputs=asked, **change))
        for asked in ASKED.values()
        for temperature in (0.0, 0.8, 1.5)
        for i, change in enumerate(changes)
    ]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return [one(engine(None), prompt, params) for prompt, params in requests()]


def test_plain_outputs_are_valid_and_of_both_endings(plain: list[RequestOutput]) -> None:
    reasons: Counter[tuple[str, Any]] = Counter()
    for (_, params), output in zip(requests(), plain, strict=True):
        assert params.structured_outputs is not None
        if params.stop is None and params.stop_token_ids is None:
            check_valid(output, params.structured_outputs)
        reasons.update((params.structured_outputs.kind, c.finish_reason) for c in output.outputs)
    assert all(reasons[kind, "stop"] >= 5 for kind in ASKED), reasons
    assert sum(reasons[kind, "length"] for kind in ASKED) > 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_gives_what_plain_decoding_gives(scheme: str, plain: list[RequestOutput]) -> None:
    speculating = engine(scheme, max_num_batched_tokens=40)
    for i, (prompt, params) in enumerate(requests()):
        speculating.add_request(str(i), prompt, params)
    outputs = run(speculating)
    for i, output in enumerate(plain):
        got = outputs[str(i)]
        assert summary(got) == summary(output), requests()[i]
        check_statistics(got)
        if scheme in ALWAYS_RIGHT:
            stats = got.stats.speculation
            assert stats.num_accepted == stats.num_drafted, "drafts see the masks that the target sees"
    assert speculating.stats.speculation.num_accepted > (20 if scheme in ("random", "ngram") else 300)
    assert speculating.pool.num_free == speculating.pool.num_pages


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rejection(scheme: str, plain: list[RequestOutput]) -> None:
    """At temperature 0 it is plain decoding; above, always valid, and right drafts are always accepted."""
    speculating = engine(scheme, verify="rejection", max_num_batched_tokens=40)
    for i, (prompt, params) in enumerate(requests()):
        speculating.add_request(str(i), prompt, params)
    outputs = run(speculating)
    for i, (_, params) in enumerate(requests()):
        output, stats = outputs[str(i)], outputs[str(i)].stats.speculation
        assert params.structured_outputs is not None
        if params.temperature == 0.0:
            assert summary(output) == summary(plain[i])
        elif params.stop is None and params.stop_token_ids is None:
            check_valid(output, params.structured_outputs)
        assert output.error is None
        if scheme in ALWAYS_RIGHT and scheme not in ("oracle",):
            assert stats.num_accepted == stats.num_drafted
    assert speculating.pool.num_free == speculating.pool.num_pages


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("scheme", ["equal", "near", "head", "near head", "chain of 3", "eagle"])
def test_drafts_are_drawn_from_what_the_grammar_allows(scheme: str, verify: str) -> None:
    """Or rejection would not be exact: its q is 0 for what is forbidden."""
    drafting = engine(scheme, verify=verify, max_num_batched_tokens=40)
    propose, num_checked = drafting.proposer.propose, 0

    def checked(rows: Sequence[DraftRow]) -> Proposal:
        nonlocal num_checked
        proposal = propose(rows)
        for row, drafts, probs in zip(rows, proposal.tokens, proposal.probs, strict=True):
            assert row.sampler.constraint is not None and (probs is None) == (verify == "coupled" or not drafts)
            for position, draft in enumerate(drafts):
                allowed = row.sampler.constraint.allowed(drafts[:position])
                assert allowed[draft]
                assert probs is None or not probs[position].numpy()[~allowed].any()
                num_checked += 1
                if draft == EOS:
                    break
        return proposal

    drafting.proposer.propose = checked  # type: ignore[method-assign]
    for i, (prompt, params) in enumerate(requests()[::3]):
        drafting.add_request(str(i), prompt, params)
    run(drafting)
    assert num_checked > 100


def test_rejection_keeps_the_distribution() -> None:
    """Of the whole output, by a draft that is often wrong; the grammar leaves about half of what it would propose."""
    asked, prompt, length = StructuredOutputs(regex='[abcx012"{:,é]{0,9}'), PROMPTS[0], 3
    params = wanted(temperature=1.3, max_tokens=length, structured_outputs=asked)
    grammar = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,)).compile(asked)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in joint.items():
            if EOS in tokens:
                longer[tokens] = probability
                continue
            state = SamplerState(
                params, seed=0, sample_index=0, prompt_token_ids=prompt, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,),
                constraint=grammar.matcher(),
            )  # fmt: skip
            state.commit(tokens)
            logits = torch.from_numpy(next_logits(np.array([*prompt, *tokens])).copy())[None]
            logits[:, EOS] += BIAS
            probs = softmax_probs(process_logits(logits, [LogitsRow(state)]))[0].tolist()
            longer.update(((*tokens, t), probability * p) for t, p in enumerate(probs) if p > 0)
        joint = longer
    many = engine(
        "near", 3, verify="rejection", draft={"error": 1.0}, num_pages=400, max_num_seqs=64, max_num_batched_tokens=256
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(48):
        many.add_request(str(seed), prompt, replace(params, n=64, seed=seed))
    for output in run(many).values():
        counts.update(tuple(completion.token_ids) for completion in output.outputs)
    stats = many.stats.speculation
    assert 0 < stats.num_accepted < stats.num_drafted
    assert fits(counts, joint)


@pytest.mark.parametrize("scheme", ["oracle", "ngram", "near", "head"])
def test_preemption_abort_and_the_prefix_cache(scheme: str) -> None:
    small = engine(scheme, num_pages=14, max_num_batched_tokens=40)
    params = [
        wanted(temperature=t, seed=i, max_tokens=30, min_tokens=20, n=2, structured_outputs=ASKED["json"])
        for i, t in enumerate((0.0, 1.0, 0.7, 1.0))
    ]
    for i, request in enumerate(params):
        small.add_request(str(i), PROMPTS[0], request)
        small.add_request(f"aborted {i}", PROMPTS[1], request)
    for _ in range(6):
        small.step()
    for i in range(len(params)):
        small.abort(f"aborted {i}")
    outputs = run(small)
    assert small.stats.num_preemptions > 0 and small.stats.prefix_cache_hits > 0
    for i, request in enumerate(params):
        assert summary(outputs[str(i)]) == summary(one(engine(None), PROMPTS[0], request))
    assert small.pool.num_free == 14


def test_forbidden_drafts_end_a_proposal_and_are_not_counted() -> None:
    """What random drafts the grammar forbids never reaches the target, and right ones are all kept."""
    speculating = engine("random", 8, max_num_batched_tokens=64)
    output = one(speculating, PROMPTS[0], wanted(max_tokens=30, ignore_eos=True, structured_outputs=ASKED["regex"]))
    drafted, proposed = output.stats.speculation.num_drafted, speculating.proposer.num_drafts  # type: ignore[attr-defined]
    assert 0 < drafted < proposed / 3
    computed = sum(speculating.runner.num_tokens)  # type: ignore[attr-defined]
    assert computed == len(PROMPTS[0]) + speculating.stats.num_steps - 1 + drafted


def test_nothing_is_drafted_behind_the_end() -> None:
    """Drafts up to EOS and no further: a right draft is never cut off."""
    for i in range(6):
        asked = StructuredOutputs(regex="a(b|c){0,2}")
        output = one(engine("oracle", 8), PROMPTS[i], wanted(structured_outputs=asked, max_tokens=20))
        stats = output.stats.speculation
        assert output.outputs[0].finish_reason == "stop"
        assert stats.num_drafted == len(output.outputs[0].token_ids) - 1 == stats.num_accepted


def test_eos_comes_where_the_grammar_is_complete_and_nowhere_else() -> None:
    for change in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"min_tokens": 20, "ignore_eos": True}):
        only = one(engine(None), PROMPTS[0], wanted(structured_outputs=StructuredOutputs(regex="abc"), **change))
        assert only.outputs[0].text == "abc" and only.outputs[0].finish_reason == "stop"
        assert only.outputs[0].stop_reason is None and only.outputs[0].token_ids[-1] == EOS
    endless = StructuredOutputs(regex="a[abc]*")
    for change in ({"ignore_eos": True}, {"min_tokens": 24}):
        held = one(engine(None), PROMPTS[0], wanted(structured_outputs=endless, logit_bias={EOS: 100.0}, **change))
        assert held.outputs[0].finish_reason == "length" and EOS not in held.outputs[0].token_ids
    free = one(engine(None), PROMPTS[0], wanted(structured_outputs=endless, logit_bias={EOS: 100.0}))
    assert free.outputs[0].text in ("a", "ab") and free.outputs[0].finish_reason == "stop"


def test_stop_tokens_end_a_complete_output() -> None:
    x = TOKENIZER.encode("x")[0]
    asked = StructuredOutputs(regex="abc?")
    for min_tokens in (0, 9):
        output = one(
            engine(None), PROMPTS[0],
            wanted(structured_outputs=asked, stop_token_ids=[x], logit_bias={x: 100.0}, min_tokens=min_tokens),
        )  # fmt: skip
        c = output.outputs[0]
        assert (c.finish_reason, c.stop_reason, c.token_ids[-1]) == ("stop", x, x)
        assert c.text == ("ab" if min_tokens == 0 else "abc"), "held back as long as anything else is allowed"


def test_absurd_penalties_leave_what_the_grammar_allows() -> None:
    for scheme in (None, "equal", "ngram", "head"):
        output = one(
            engine(scheme), PROMPTS[0],
            wanted(repetition_penalty=1e38, temperature=1.0, structured_outputs=StructuredOutputs(regex="(a|x){12}")),
        )  # fmt: skip
        assert re.fullmatch("[ax]{12}", output.outputs[0].text)


def test_a_draft_that_knows_none_of_the_allowed_tokens_proposes_nothing() -> None:
    unknown = [t for t in range(20, EOS) if TOKENIZER.token_text(t).isascii()]
    asked = StructuredOutputs(choice=["".join(TOKENIZER.token_text(t) for t in unknown)])
    for verify in ("coupled", "rejection"):
        limited = engine("equal", 4, draft={"vocab_size": 20, "num_tokens": 20}, verify=verify)
        output = one(limited, PROMPTS[0], wanted(temperature=1.0, structured_outputs=asked))
        assert asked.choice is not None and output.outputs[0].text == asked.choice[0]
        assert output.stats.speculation.num_drafted == 0


def test_log_probabilities_are_the_models_own_unless_processed_ones_are_asked_for() -> None:
    asked = StructuredOutputs(choice=["abc"])
    params = wanted(structured_outputs=asked, logprobs=5)
    for scheme in (None, "near"):
        raw = one(engine(scheme), PROMPTS[0], params).outputs[0]
        processed = one(engine(scheme, logprobs_mode="processed_logprobs"), PROMPTS[0], params).outputs[0]
        assert raw.logprobs is not None and processed.logprobs is not None
        history = list(PROMPTS[0])
        for token, ours, masked in zip(raw.token_ids, raw.logprobs, processed.logprobs, strict=True):
            logits = torch.from_numpy(next_logits(np.array(history)).copy())
            logits[EOS] += BIAS
            expected = torch.log_softmax(logits, 0)
            assert ours[token].logprob == pytest.approx(float(expected[token]), abs=1e-5)
            assert len(ours) >= 5
            assert masked[token].logprob > ours[token].logprob
            history.append(token)


def test_rows_without_a_grammar_are_untouched_by_others() -> None:
    free = wanted(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = summary(one(engine(None), PROMPTS[2], free))
    for scheme in (None, "equal", "head", "ngram"):
        mixed = engine(scheme, max_num_batched_tokens=40)
        mixed.add_request("free", PROMPTS[2], free)
        for name, asked in ASKED.items():
            mixed.add_request(name, PROMPTS[1], wanted(structured_outputs=asked))
        assert summary(run(mixed)["free"]) == expected
    state = SamplerState(
        free, seed=0, sample_index=0, prompt_token_ids=[1], vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)
    )
    assert state.takes_argmax and not LogitsRow(state).edits
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None]
    assert sample(logits.clone(), [LogitsRow(state)], TorchOps(torch.float32)).token_ids == [VOCAB_SIZE - 1]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("scheme", [None, "oracle", "ngram", "near"])
def test_a_grammar_that_meets_a_limit_fails_its_request_alone(scheme: str | None, n: int) -> None:
    """The parser's limit is met at the fourth token of one request; what it gave by then stays."""
    asked, other = StructuredOutputs(regex="[abc]{9}"), wanted(structured_outputs=ASKED["json"], seed=3)
    whole = one(engine(None), PROMPTS[0], wanted(n=n, temperature=1.0, structured_outputs=asked))
    limited = engine(scheme, max_num_batched_tokens=40)
    limited.add_request("other", PROMPTS[1], other)
    limited.add_request("limited", PROMPTS[0], wanted(n=n, temperature=1.0, structured_outputs=asked))
    for completion in limited._requests["limited"].completions:
        constraint = completion.sampler.constraint
        assert constraint is not None
        _limit(constraint, 4)
    outputs = run(limited)
    failed = outputs["limited"]
    assert failed.finished and failed.error is not None and "too complex" in str(failed.error)
    assert failed.error.param == "structured_outputs"
    assert failed.outputs[0].finish_reason == "abort"
    for got, want in zip(failed.outputs, whole.outputs, strict=True):
        tokens = got.token_ids[:-1] if got.token_ids[-1:] == [EOS] else got.token_ids
        assert want.token_ids[: len(tokens)] == tokens and len(tokens) <= 4
    assert summary(outputs["other"]) == summary(one(engine(None), PROMPTS[1], other))
    assert limited.pool.num_free == limited.pool.num_pages and not limited.has_unfinished


def _limit(constraint: Any, num_tokens: int) -> None:
    """Let the library's matcher of a completion fail after so many tokens, as its limits make it fail."""

    class Limited:
        def __init__(self, matcher: Any, count: int = 0) -> None:
            self.matcher, self.count, self.failed = matcher, count, False

        def compute_bitmask(self) -> Any:
            self.failed = self.failed or self.count >= num_tokens
            return self.matcher.compute_bitmask()

        def is_error(self) -> bool:
            return self.failed

        def get_error(self) -> str:
            return "too complex"

        def is_accepting(self) -> Any:
            return self.matcher.is_accepting()

        def consume_token(self, token: int) -> Any:
            assert not self.failed
            self.count += 1
            return self.matcher.consume_token(token)

        def consume_tokens(self, tokens: Sequence[int]) -> Any:
            self.count += len(tokens)
            return self.matcher.consume_tokens(tokens)

        def rollback(self, count: int) -> Any:
            assert not self.failed
            self.count -= count
            return self.matcher.rollback(count)

        def deep_copy(self) -> Any:
            return Limited(self.matcher.deep_copy(), self.count)

    constraint._start = Limited(constraint._start)
    constraint._matcher = constraint._start.deep_copy()


def test_a_limit_that_only_a_rejected_draft_meets_is_not_met() -> None:
    asked = StructuredOutputs(regex="[abcx]{12}")
    params = wanted(structured_outputs=asked, max_tokens=6)
    expected = one(engine(None), PROMPTS[0], params)
    for scheme in ("random", "guess", "near", "ngram", "oracle"):
        limited = engine(scheme, 8, max_num_batched_tokens=40)
        limited.add_request("one", PROMPTS[0], params)
        _limit(limited._requests["one"].completions[0].sampler.constraint, 6)
        assert summary(run(limited)["one"]) == summary(expected)


@pytest.mark.parametrize("num_kept", range(5))
def test_behind_a_rejected_draft_that_met_a_limit_all_is_as_before(num_kept: int) -> None:
    """Also where the draft that met it is the first one rejected."""
    grammar = GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,)).compile(StructuredOutputs(regex="[abcx]{12}"))
    matcher, plain, (a, b) = grammar.matcher(), grammar.matcher(), (TOKENIZER.encode(text)[0] for text in "ab")
    _limit(matcher, 4)
    matcher.allowed([a] * 5)
    assert matcher.num_allowed([a] * 5) == 4, "the limit is met behind the fourth"
    for token in [a] * min(num_kept, 3) + [b] * (num_kept < 4):
        matcher.commit(token)
        plain.commit(token)
        assert matcher.error is None
        if len(matcher._committed) < 4:
            assert (matcher.allowed() == plain.allowed()).all()


def test_a_grammar_that_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen completions share the time that one has: others wait once, and not for each of them."""
    monkeypatch.setattr(matcher_module, "_TIME_AT_ONCE", 0.001)
    monkeypatch.setattr(matcher_module, "_TIME_PER_TOKEN", 0.0)
    asked = StructuredOutputs(grammar='start: s\ns: "a" | s s | s s s')
    ambiguous = wanted(structured_outputs=asked, n=16, max_tokens=40, ignore_eos=True)
    mixed = engine("near", max_num_batched_tokens=40)
    mixed.add_request("slow", PROMPTS[0], ambiguous)
    mixed.add_request("other", PROMPTS[1], wanted())
    outputs = run(mixed)
    error = outputs["slow"].error
    assert isinstance(error, RequestError) and error.param == "structured_outputs"
    assert "it took more than 0.001 s, and 0 ms for each token" in str(error)
    assert outputs["other"].error is None
    assert summary(outputs["other"]) == summary(one(engine(None), PROMPTS[1], wanted()))
    assert mixed.pool.num_free == mixed.pool.num_pages and not mixed.has_unfinished


def test_time_is_earned_with_each_token_up_to_what_it_was_at_first() -> None:
    now = 0.0
    time = GrammarTime(lambda: now)
    for _ in range(3):
        time.earn()
    with time:
        now += 1.009
    assert time.is_used_up, "unused time is not saved"
    time.earn()
    assert not time.is_used_up


def test_what_cannot_be_compiled_changes_nothing() -> None:
    fresh, used = (make_engine(tokenizer=TOKENIZER) for _ in range(2))
    bad = wanted(structured_outputs=StructuredOutputs(json={"type": "fish"}), seed=None)
    with pytest.raises(RequestError, match="fish") as caught:
        used.add_request("one", PROMPTS[0], bad)
    assert caught.value.param == "structured_outputs" and not used.has_unfinished
    params = wanted(temperature=1.0, seed=None)
    assert summary(one(used, PROMPTS[0], params)) == summary(one(fresh, PROMPTS[0], params)), "no seed was drawn"
    with pytest.raises(RequestError, match="fish"):
        used.compile_structured_outputs(StructuredOutputs(json={"type": "fish"}))
    outputs = LLM.from_engine(used).generate([PROMPTS[0], PROMPTS[1]], [bad, wanted(structured_outputs=ASKED["regex"])])
    assert outputs[0].error is not None and outputs[1].error is None


def test_compiled_beforehand_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_engine(tokenizer=TOKENIZER)
    compiled: list[StructuredOutputs] = []
    compile_one = GrammarCompiler._compile

    def counting(self: GrammarCompiler, structured: StructuredOutputs, text: str) -> Any:
        compiled.append(structured)
        return compile_one(self, structured, text)

    monkeypatch.setattr(GrammarCompiler, "_compile", counting)
    ours.compile_structured_outputs(ASKED["json"])
    for seed in range(3):
        one(ours, PROMPTS[0], wanted(n=2, seed=seed, structured_outputs=ASKED["json"]))
    assert compiled == [ASKED["json"]]
