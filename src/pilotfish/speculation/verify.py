"""Verification: from the target's logits at every drafted position to the tokens that a sequence gets.

The rules share all processing of logits: every sampling parameter applies at every drafted position, with the drafts
before it as history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish.config import LogprobsMode, Speculation
from pilotfish.ops import Ops
from pilotfish.ops.noise import STREAM_ACCEPTANCE, STREAM_RESIDUAL, uniform
from pilotfish.sampling import (
    LogitsRow,
    SamplerState,
    Verdict,
    accept_chain,
    choose,
    logprobs_of,
    noise_keys,
    process_logits,
    reject_chain,
    sample,
    softmax_probs,
    threshold_chain,
)
from pilotfish.types import Logprob

__all__ = ["Candidate", "Outcome", "verify"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that gets tokens in this step: its drafts, and the distributions they were drawn from."""

    sampler: SamplerState
    drafts: Sequence[int]
    probs: Tensor | None

    @property
    def rows(self) -> list[LogitsRow]:
        """One row of logits a draft and one for the bonus token, each with the history before it."""
        return [LogitsRow(self.sampler, self.drafts[:position]) for position in range(len(self.drafts) + 1)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Accepted drafts and the bonus token, and their log-probabilities if the request asked for them."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


def verify(
    logits: Tensor,
    candidates: Sequence[Candidate],
    settings: Speculation | None,
    ops: Ops,
    logprobs_mode: LogprobsMode,
) -> list[Outcome]:
    """Decide which drafts are kept, and what comes after them.

    Args:
        logits: the target's, float32 [R, V]; K + 1 rows for each candidate in order. May be overwritten.
        candidates: with K drafts each, maybe none.
        settings: name the rule; None is plain decoding.
        ops: give the sampler's argmax.
        logprobs_mode: what log-probabilities are made of.
    """
    rows = [row for candidate in candidates for row in candidate.rows]
    if settings is not None and settings.verify == "rejection":
        return _reject(logits, candidates, rows, ops, logprobs_mode)
    lossy = settings is not None and settings.verify == "threshold" and any(c.drafts for c in candidates)
    probs = softmax_probs(process_logits(logits.clone(), rows), rows) if lossy else None
    reported = logits.clone() if lossy and any(_wants_logprobs(c) for c in candidates) else None
    chosen = sample(logits, rows, ops, logprobs_mode)
    outcomes = []
    for candidate, first, last in _spans(candidates):
        choices = chosen.token_ids[first:last]
        if probs is None:
            tokens = _tokens(candidate, accept_chain(candidate.drafts, choices))
            entries = chosen.logprobs[first : first + len(tokens)] if chosen.logprobs is not None else []
            listed = [entry for entry in entries if entry is not None]
            outcomes.append(Outcome(tokens, listed if _wants_logprobs(candidate) else None))
        else:
            assert settings is not None
            tokens = _tokens(
                candidate, threshold_chain(candidate.drafts, probs[first:last], choices, settings.threshold)
            )
            # The kept drafts are not the target's choices: their log-probabilities are looked up afterwards.
            outcomes.append(_looked_up(candidate, tokens, reported, rows, first, logprobs_mode))
    return outcomes


def _reject(
    logits: Tensor, candidates: Sequence[Candidate], rows: Sequence[LogitsRow], ops: Ops, logprobs_mode: LogprobsMode
) -> list[Outcome]:
    reported = logits.clone() if any(_wants_logprobs(c) for c in candidates) else None
    processed = process_logits(logits, rows)
    probs = softmax_probs(processed, rows)
    keys = noise_keys(rows)
    accepting, choosing = (
        uniform(keys.seeds, keys.sample_indices, keys.positions, 1, stream=stream)[:, 0].tolist()
        for stream in (STREAM_ACCEPTANCE, STREAM_RESIDUAL)
    )
    outcomes = []
    for candidate, first, last in _spans(candidates):
        verdict = reject_chain(candidate.drafts, probs[first:last], candidate.probs, accepting[first:last])
        at = first + verdict.num_accepted
        assert verdict.residual is not None
        if verdict.num_accepted == len(candidate.drafts) and not candidate.sampler.greedy:
            # Nothing was rejected: the token of plain decoding.
            noise = noise_keys(rows[at : at + 1], processed.device)
            one = torch.ones(1, dtype=torch.float32, device=processed.device)
            bonus = int(ops.noise_argmax(processed[at : at + 1], one, noise)[0])
        else:
            bonus = choose(verdict.residual, choosing[at])
        tokens = _tokens(candidate, verdict, bonus)
        outcomes.append(_looked_up(candidate, tokens, reported, rows, first, logprobs_mode))
    return outcomes


def _looked_up(
    candidate: Candidate,
    tokens: list[int],
    reported: Tensor | None,
    rows: Sequence[LogitsRow],
    first: int,
    logprobs_mode: LogprobsMode,
) -> Outcome:
    if not _wants_logprobs(candidate):
        return Outcome(tokens, None)
    assert reported is not None
    span = slice(first, first + len(tokens))
    return Outcome(tokens, logprobs_of(reported[span], rows[span], tokens, logprobs_mode))


def _spans(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, int, int]]:
    """Each candidate with the range of its rows."""
    first = 0
    for candidate in candidates:
        last = first + len(candidate.drafts) + 1
        yield candidate, first, last
        first = last


def _wants_logprobs(candidate: Candidate) -> bool:
    return candidate.sampler.params.logprobs is not None


def _tokens(candidate: Candidate, verdict: Verdict, bonus: int | None = None) -> list[int]:
    last = verdict.bonus if bonus is None else bonus
    assert last is not None
    return [*(candidate.drafts[i] for i in verdict.path), last]
