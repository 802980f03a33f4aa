"""From scheduled sequences to a :class:`ForwardBatch`, in buffers that live as long as the engine.

Each running sequence has a permanent row in the page table; a step gathers what it needs from there. The buffers never
move, so that a recorded program can read them at the same address in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.attention import ForwardBatch

__all__ = ["BatchBuilder", "BatchSize", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a forward pass.

    Attributes:
        row: its place in the page table.
        token_ids: the tokens to compute, drafts included.
        start: KV entries before them (their first position).
        pages: all of its pages; only ever extended while the sequence keeps its row.
        num_logits: of how many last tokens the logits are wanted.
    """

    row: int
    token_ids: Sequence[int]
    start: int
    pages: list[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How much of the builder's buffers a step fills: tokens, sequences, pages of all sequences, rows of logits."""

    num_tokens: int
    num_seqs: int
    num_pages: int
    num_logits: int


class BatchBuilder:
    """Owns the page table and the step buffers.

    Args:
        max_tokens: most tokens of a step.
        max_seqs: rows of the page table.
        max_model_len: longest sequence, in tokens.
        page_size: tokens in a page.
    """

    def __init__(self, *, max_tokens: int, max_seqs: int, max_model_len: int, page_size: int) -> None:
        self.page_size = page_size
        max_pages = -(-max_model_len // page_size)
        self._table: NDArray[np.int32] = np.zeros((max_seqs, max_pages), np.int32)
        self._mirrored: list[tuple[list[int], int]] = [([], 0)] * max_seqs
        self._token_ids = _Buffer(max_tokens)
        self._positions = _Buffer(max_tokens)
        self._slots = _Buffer(max_tokens)
        self._query_start = _Buffer(max_seqs + 1)
        self._kv_len = _Buffer(max_seqs)
        self._page_start = _Buffer(max_seqs + 1)
        self._pages = _Buffer(max_seqs * max_pages)
        self._logits_rows = _Buffer(max_tokens)

    @property
    def full_size(self) -> BatchSize:
        """Of the whole buffers: what a recording is made with."""
        return BatchSize(
            len(self._token_ids.array), len(self._kv_len.array), len(self._pages.array), len(self._logits_rows.array)
        )

    def batch(self, size: BatchSize) -> ForwardBatch:
        """The filled part of the buffers. Valid until the next :meth:`build`."""
        return ForwardBatch(
            token_ids=self._token_ids.tensor[: size.num_tokens],
            positions=self._positions.tensor[: size.num_tokens],
            slots=self._slots.tensor[: size.num_tokens],
            query_start=self._query_start.tensor[: size.num_seqs + 1],
            kv_len=self._kv_len.tensor[: size.num_seqs],
            page_start=self._page_start.tensor[: size.num_seqs + 1],
            pages=self._pages.tensor[: size.num_pages],
        )

    def logits_rows(self, num_logits: int) -> Tensor:
        """The rows of hidden states that logits are wanted of, in segment order: int32 [num_logits]."""
        return self._logits_rows.tensor[:num_logits]

    def build(self, segments: Sequence[Segment]) -> BatchSize:
        """Fill the buffers with a step.

        Plain lists, copied once each: between two passes over all weights nothing is in the caches, and a handful of
        array operations per sequence costs more than a loop over its few tokens.
        """
        page_size = self.page_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_rows: list[int] = []
        query_start, kv_len, page_start = [0], [], [0]
        for segment in segments:
            start, pages = segment.start, segment.pages
            end = start + len(segment.token_ids)
            token_ids.extend(segment.token_ids)
            positions.extend(range(start, end))
            slots.extend([pages[p // page_size] * page_size + p % page_size for p in range(start, end)])
            num_tokens = len(token_ids)
            logits_rows.extend(range(num_tokens - segment.num_logits, num_tokens))
            query_start.append(num_tokens)
            kv_len.append(end)
            first_page, num_pages = page_start[-1], -(-end // page_size)
            page_start.append(first_page + num_pages)
            self._mirror_pages(segment)
            self._pages.array[first_page : first_page + num_pages] = self._table[segment.row, :num_pages]
        self._token_ids.array[: len(token_ids)] = token_ids
        self._positions.array[: len(positions)] = positions
        self._slots.array[: len(slots)] = slots
        self._query_start.array[: len(query_start)] = query_start
        self._kv_len.array[: len(kv_len)] = kv_len
        self._page_start.array[: len(page_start)] = page_start
        self._logits_rows.array[: len(logits_rows)] = logits_rows
        return BatchSize(len(token_ids), len(segments), page_start[-1], len(logits_rows))

    def _mirror_pages(self, segment: Segment) -> None:
        """Copy pages that are new since the row's last step into the table."""
        pages, count = self._mirrored[segment.row]
        if pages is not segment.pages:
            count = 0
        if count < len(segment.pages):
            self._table[segment.row, count : len(segment.pages)] = segment.pages[count:]
        self._mirrored[segment.row] = (segment.pages, len(segment.pages))


class _Buffer:
    """An int32 array that numpy writes and torch reads."""

    def __init__(self, size: int) -> None:
        self.array: NDArray[np.int32] = np.zeros(size, np.int32)
        self.tensor: Tensor = torch.from_numpy(self.array)
