"""Prompt lookup: propose what followed the last tokens when they occurred before, in the prompt or in the output.

Needs no weights and microseconds a row. Good where output repeats its input: editing, code, summaries, quotations
(Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pilotfish.config import Ngram, Speculation
from pilotfish.runner import Runner
from pilotfish.speculation.base import CommittedRow, DraftRow, Proposal, Proposer, Scheme, SpeculationContext

__all__ = ["NgramProposer", "load"]


def load(settings: Speculation, context: SpeculationContext) -> Scheme:
    """See :mod:`pilotfish.speculation.base`."""
    assert isinstance(settings, Ngram)

    def start(runner: Runner | None) -> Proposer:
        return NgramProposer(settings.max_ngram, settings.min_ngram)

    return Scheme(model=None, start=start)


class _Index:
    """Where each n-gram of one sequence ended last, kept up as the sequence grows."""

    __slots__ = ("_ends", "_length", "_sizes")

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._length = 0  # tokens whose n-grams are in

    def lookup(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the most recent earlier occurrence of the longest known suffix."""
        length = len(tokens)
        # All n-grams but those that end at the last token: these would find themselves.
        for end in range(self._length + 1, length):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._length = max(self._length, length - 1)
        for size in self._sizes:
            if size < length:
                found = self._ends.get(tuple(tokens[length - size :]))
                if found is not None:
                    return _continuation(tokens, found, count)
        return []


def _continuation(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """``tokens[end:]``, going on from its own beginning where it runs out: a loop repeats itself."""
    period = len(tokens) - end
    return [tokens[end + i % period] for i in range(count)]


class NgramProposer:
    """See the module.

    Args:
        max_ngram: longest suffix that is looked up.
        min_ngram: shortest one.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._indices: dict[int, tuple[Sequence[int], _Index]] = {}  # by row; the tokens tell a new sequence in it

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        drafts = [self._index(row).lookup(row.token_ids, row.max_drafts) if row.max_drafts else [] for row in rows]
        return Proposal(drafts, [None] * len(rows))

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        for row in rows:
            if row.finished:
                self._indices.pop(row.index, None)

    def _index(self, row: DraftRow) -> _Index:
        tokens, index = self._indices.get(row.index, (None, None))
        if index is None or tokens is not row.token_ids:
            index = _Index(self._max_ngram, self._min_ngram)
            self._indices[row.index] = (row.token_ids, index)
        return index
