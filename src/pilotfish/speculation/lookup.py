"""Prompt lookup before a head: what the text itself repeats is proposed as it stands, else the head drafts.

A head of one layer is poor at copying a long passage, and a copy costs no pass of it; where nothing is repeated, a
lookup has nothing to say. The head follows every step, whoever proposed, so its KV stays true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from pilotfish.runner import HeadRunner
from pilotfish.speculation.base import CommittedRow, DraftRow, Proposal, Proposer
from pilotfish.speculation.heads import HeadProposer

__all__ = ["LookupFirstProposer"]


class LookupFirstProposer:
    """See the module.

    Args:
        lookup: proposes what is repeated, without distributions.
        head: proposes for the rows that are left.
    """

    def __init__(self, lookup: Proposer, head: HeadProposer) -> None:
        self._lookup = lookup
        self._head = head

    @property
    def runner(self) -> HeadRunner:
        """The head's, see :attr:`pilotfish.speculation.heads.HeadProposer.runner`."""
        return self._head.runner

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        found = self._lookup.propose(rows).tokens
        left = [replace(row, max_drafts=0) if tokens else row for row, tokens in zip(rows, found, strict=True)]
        drafted = self._head.propose(left)
        tokens = [a or b for a, b in zip(found, drafted.tokens, strict=True)]
        return Proposal(tokens, drafted.probs)

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        self._lookup.observe(rows, features)
        self._head.observe(rows, features)
