"""``verify="rejection"`` end to end: the first tokens are distributed as plain processing of the logits says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distributions import chi_square, fits, total_variation
from engines import make_head
from fakes import EOS, GuessProposer, make_draft, make_engine, next_logits
from fakes_heads import StateRunner
from pilotfish.config import Ngram
from pilotfish.engine.engine import Engine
from pilotfish.ops.reference import TorchOps
from pilotfish.sampling import LogitsRow, SamplerState, process_logits, sample, softmax_probs
from pilotfish.speculation import Candidate, DraftRow, Proposal, verify
from pilotfish.speculation.draft import DraftProposer
from pilotfish.types import RequestOutput, SamplingParams

PROMPT = [5, 2, 7]
NUM_TOKENS = 4
"""Of which the joint distribution is compared. Requests ask for one more, so that the first chain has three drafts."""

REQUESTS, SAMPLES = 24, 64
Drawn = tuple[int, ...]

PARAMS: dict[str, dict[str, Any]] = {
    "0.7, top_k": {"temperature": 0.7, "top_k": 3},
    "1.5, top_k, top_p": {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    "1.5, top_p, penalty": {"temperature": 1.5, "top_p": 0.5, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
}


def params(**kwargs: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS + 1, ignore_eos=True, **kwargs)


def exact_joint(wanted: SamplingParams) -> dict[Drawn, float]:
    """Probability of every output, by processing the logits of every history."""
    joint: dict[Drawn, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[Drawn, float] = {}
        for tokens, probability in joint.items():
            state = SamplerState(
                wanted, seed=0, sample_index=0, prompt_token_ids=PROMPT, vocab_size=32, eos_token_ids=(EOS,)
            )
            state.commit(tokens)
            logits = torch.from_numpy(next_logits(np.array([*PROMPT, *tokens])).copy())[None]
            probs = softmax_probs(process_logits(logits, [LogitsRow(state)]))[0].tolist()
            longer.update(((*tokens, t), probability * p) for t, p in enumerate(probs) if p > 0)
        joint = longer
    return joint


def draw(engine: Engine, wanted: dict[str, Any], requests: int = REQUESTS) -> Counter[Drawn]:
    """Outputs of many requests with a seed each, each of many completions with noise of their own."""
    for seed in range(requests):
        engine.add_request(str(seed), PROMPT, params(n=SAMPLES, seed=seed, **wanted))
    counts: Counter[Drawn] = Counter()
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                counts.update(tuple(completion.token_ids[:NUM_TOKENS]) for completion in output.outputs)
    assert counts.total() == requests * SAMPLES
    return counts


def rejection_engine(scheme: str, k: int = 3, cls: type[DraftProposer] = DraftProposer, **kwargs: Any) -> Engine:
    kwargs |= {"num_pages": 400, "max_num_seqs": SAMPLES, "max_num_batched_tokens": SAMPLES * (k + 1)}
    kwargs["speculation"] = Ngram(num_drafts=k, verify="rejection")
    if scheme == "certain":
        return make_engine(proposer=GuessProposer(0.6), **kwargs)
    if scheme in ("head", "stopping head"):  # which proposes 26 of the 32 tokens
        head = {"error": 0.9, "num_tokens": 26, "p_min": 0.15 if scheme == "stopping head" else 0.0}
        return make_engine(
            runner_class=StateRunner,
            make_proposer=lambda config, num_pages: make_head(config, num_pages, **head),
            **kwargs,
        )
    engine = make_engine(draft={"error": 0.9}, **kwargs)
    engine.proposer = make_draft(engine.config, 400, error=0.9, cls=cls)
    return engine


@pytest.mark.parametrize("scheme", ["draft", "certain", "head", "stopping head"])
@pytest.mark.parametrize("name", PARAMS)
def test_outputs_are_distributed_as_the_targets(scheme: str, name: str) -> None:
    """Drafts that are drawn from a q unlike p, and certain ones that are right or random."""
    engine = rejection_engine(scheme)
    counts, joint = draw(engine, PARAMS[name]), exact_joint(params(**PARAMS[name]))
    assert fits(counts, joint), (chi_square(counts, joint), total_variation(counts, joint))
    stats = engine.stats.speculation
    assert 0.1 < stats.num_accepted / stats.num_drafted < 0.9, "both accepting and rejecting is put to the test"
    if scheme == "stopping head":
        assert 0.1 < stats.drafted_at[1] / stats.drafted_at[0] < 0.9, "it stops, and does not"


class WrongTemperature(DraftProposer):
    """Reports a flatter q than drafts were drawn from."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        proposal = super().propose(rows)
        return Proposal(proposal.tokens, [None if q is None else _flatter(q) for q in proposal.probs])


class ShiftedPosition(DraftProposer):
    """Reports the q of the position before."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        proposal = super().propose(rows)
        return Proposal(proposal.tokens, [None if q is None else q.roll(1, 0) for q in proposal.probs])


class Uniform(DraftProposer):
    """Reports that drafts were drawn from all tokens alike."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        proposal = super().propose(rows)
        ones = [None if q is None else torch.ones_like(q) / q.shape[1] for q in proposal.probs]
        return Proposal(proposal.tokens, ones)


def _flatter(q: Tensor) -> Tensor:
    return q.sqrt() / q.sqrt().sum(-1, keepdim=True)


@pytest.mark.parametrize("cls", [WrongTemperature, ShiftedPosition, Uniform])
def test_a_planted_wrong_q_is_caught(cls: type[DraftProposer]) -> None:
    wanted = PARAMS["1.5, top_k, top_p"]
    counts, joint = draw(rejection_engine("draft", cls=cls), wanted), exact_joint(params(**wanted))
    statistic, critical = chi_square(counts, joint)
    assert statistic > critical
    assert not fits(counts, joint)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.10, 0.45, 0.45, 0.0], [0.0, 0.4, 0.4, 0.2]),  # a rejected draft says that the noise of the others is low
        ([0.5, 0.3, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]),  # token 0 is drawn where its own noise is high
    ],
)
def test_draft_acceptance_and_residual_use_noise_of_their_own(p: list[float], q: list[float]) -> None:
    """Drafts are chosen with the position's noise: that which decides on them afterwards must not be the same."""
    states = [
        SamplerState(params(temperature=1.0), seed=seed, sample_index=0, prompt_token_ids=[0], vocab_size=4,
                     eos_token_ids=())
        for seed in range(8000)
    ]  # fmt: skip
    ops, rows = TorchOps(torch.float32), [LogitsRow(state) for state in states]
    drafts = sample(torch.tensor([q] * len(states)).log(), rows, ops).token_ids
    probs = torch.tensor([q])
    assert fits(Counter(drafts), dict(enumerate(q)))
    candidates = [Candidate(state, [draft], probs) for state, draft in zip(states, drafts, strict=True)]
    logits = torch.tensor([p, p] * len(states)).log()
    outcomes = verify(logits, candidates, Ngram(verify="rejection"), ops, "raw_logprobs")
    counts = Counter(outcome.token_ids[0] for outcome in outcomes)
    assert fits(counts, dict(enumerate(p))), (counts, chi_square(counts, dict(enumerate(p))))


def one(engine: Engine, wanted: SamplingParams) -> RequestOutput:
    engine.add_request("one", PROMPT, wanted)
    done = []
    while engine.has_unfinished:
        done = engine.step()
    return done[0]


@pytest.mark.parametrize("scheme", ["draft", "certain", "head"])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_at_temperature_0_output_is_plain(scheme: str, k: int) -> None:
    for changes in ({}, {"repetition_penalty": 1.5}, {"logit_bias": {3: 5.0}}, {"min_tokens": 9}, {"ignore_eos": True}):
        wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "logprobs": 2} | changes)  # type: ignore[arg-type]
        plain, speculated = one(make_engine(), wanted).outputs[0], one(rejection_engine(scheme, k), wanted).outputs[0]
        assert plain.token_ids == speculated.token_ids
        assert (plain.text, plain.finish_reason, plain.logprobs) == (
            speculated.text, speculated.finish_reason, speculated.logprobs,
        )  # fmt: skip


def test_a_seed_gives_the_same_output_again() -> None:
    wanted = {"temperature": 1.5}
    assert draw(rejection_engine("draft"), wanted, 1) == draw(rejection_engine("draft"), wanted, 1)
