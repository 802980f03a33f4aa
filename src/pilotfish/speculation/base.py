"""The seam between the engine and a speculation scheme.

Every step is: propose, forward, accept, commit. A scheme says only what it proposes; plain decoding is the scheme that
proposes nothing. Drafts live in the proposal until commit, so a rejected draft leaves nothing to restore: its KV entry
is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["NoProposer", "Proposal", "ProposalRow", "Proposer", "Verdict", "accept_chain"]


class ProposalRow(Protocol):
    """What a scheme sees of a scheduled sequence."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""
        ...

    @property
    def max_drafts(self) -> int:
        """Most drafts that the scheduler has made room for; 0 while the prompt is not yet computed."""
        ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one step: ``tokens[s]`` are the drafts of the s-th scheduled sequence, maybe none."""

    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said of one sequence's drafts: how many it accepted, and its own next token."""

    num_accepted: int
    bonus: int


class Proposer(Protocol):
    """A speculation scheme."""

    name: str

    def propose(self, rows: Sequence[ProposalRow]) -> Proposal:
        """Propose at most ``max_drafts`` tokens for each row."""
        ...


class NoProposer:
    """Plain decoding: an empty proposal through the same loop."""

    name = "none"

    def propose(self, rows: Sequence[ProposalRow]) -> Proposal:
        return Proposal(tokens=[()] * len(rows))


def accept_chain(drafts: Sequence[int], target_tokens: Sequence[int]) -> Verdict:
    """Coupled verification of a chain: keep drafts while they equal what the target chose at their position.

    The target's choice is its argmax under the position's own noise, so the tokens that come out are those of plain
    decoding, whatever was proposed (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
    speculative decoding").

    Args:
        drafts: K proposed tokens.
        target_tokens: K + 1 tokens that the target chose, the j-th given the first j drafts.
    """
    assert len(target_tokens) == len(drafts) + 1
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == target_tokens[num_accepted]:
        num_accepted += 1
    return Verdict(num_accepted, target_tokens[num_accepted])
