"""Prompt lookup proposes what followed the longest known suffix where it occurred last."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.sampling import SamplerState
from pilotfish.speculation import CommittedRow, DraftRow
from pilotfish.speculation.ngram import NgramProposer
from pilotfish.types import SamplingParams

SAMPLER = SamplerState(
    SamplingParams(), seed=0, sample_index=0, prompt_token_ids=[0], vocab_size=8, eos_token_ids=()
)  # fmt: skip


def row(token_ids: Sequence[int], max_drafts: int, index: int = 0) -> DraftRow:
    return DraftRow(index, token_ids, [], SAMPLER, max_drafts)


def propose(proposer: NgramProposer, token_ids: Sequence[int], max_drafts: int, index: int = 0) -> list[int]:
    proposal = proposer.propose([row(token_ids, max_drafts, index)])
    assert proposal.probs == [None], "each draft is certain"
    return list(proposal.tokens[0])


def searched(tokens: Sequence[int], count: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The definition, by search: longest suffix first, then its latest earlier occurrence."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[len(tokens) - size :]:
                out = list(tokens)
                for _ in range(count):  # reading its own drafts where the text ends
                    out.append(out[end + len(out) - len(tokens)])
                return out[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    steps=st.lists(st.integers(1, 6), max_size=12),
    sizes=st.sampled_from([(1, 1), (3, 1), (4, 2), (3, 3)]),
    count=st.integers(1, 8),
)
def test_lookup_is_search(tokens: list[int], steps: list[int], sizes: tuple[int, int], count: int) -> None:
    """However the sequence grew: its index is kept up, not built anew."""
    proposer = NgramProposer(*sizes)
    known: list[int] = []
    rest = list(tokens)
    for step in [*steps, len(tokens)]:
        known.extend(rest[:step])
        rest = rest[step:]
        assert propose(proposer, known, count) == searched(known, count, *sizes)


@pytest.mark.parametrize(
    ("tokens", "count", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),  # goes on in the loop
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 1, [4]),  # the later one
        ([5, 1, 2, 3, 9, 6, 1, 2, 4, 9, 5, 1, 2], 1, [3]),  # the longer one
        ([7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 3], 3, []),
        ([1, 2, 3, 1], 3, []),  # one token is too short a match
        ([1], 3, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_examples(tokens: list[int], count: int, drafts: list[int]) -> None:
    assert propose(NgramProposer(4, 2), tokens, count) == drafts


def test_a_row_taken_by_another_sequence_starts_anew() -> None:
    proposer = NgramProposer(2, 2)
    first, second = [1, 2, 3, 1, 2], [4, 5, 1, 2]
    assert propose(proposer, first, 1) == [3]
    assert propose(proposer, second, 1) == [], "without word that the first has ended: it was aborted"
    second += [1, 2]
    assert propose(proposer, second, 1) == [1]
    proposer.observe([CommittedRow(0, second, [], 0, 0, 6, 1, True)], torch.empty(6, 0))
    assert propose(proposer, first, 1) == [3]


def test_rows_do_not_see_each_other() -> None:
    proposer = NgramProposer(2, 2)
    proposal = proposer.propose([row([1, 2, 3, 1, 2], 2), row([4, 5, 1, 2], 2, 1), row([6, 7, 8, 6, 7], 1, 2)])
    assert [list(tokens) for tokens in proposal.tokens] == [[3, 1], [], [8]]
