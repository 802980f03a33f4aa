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

__all__ = ["BatchBuilder", "BuiltBatch", "Segment"]


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
class BuiltBatch:
    """A batch and the rows of its hidden states that logits are wanted of: int32 [R], in segment order."""

    batch: ForwardBatch
    logits_rows: Tensor


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
        self._iota = np.arange(max_tokens, dtype=np.int32)
        self._token_ids = _Buffer(max_tokens)
        self._positions = _Buffer(max_tokens)
        self._slots = _Buffer(max_tokens)
        self._query_start = _Buffer(max_seqs + 1)
        self._kv_len = _Buffer(max_seqs)
        self._page_start = _Buffer(max_seqs + 1)
        self._pages = _Buffer(max_seqs * max_pages)
        self._logits_rows = _Buffer(max_tokens)

    def full_batch(self) -> ForwardBatch:
        """The whole buffers as one batch of the greatest size: what a recording is made with."""
        return ForwardBatch(
            token_ids=self._token_ids.tensor,
            positions=self._positions.tensor,
            slots=self._slots.tensor,
            query_start=self._query_start.tensor,
            kv_len=self._kv_len.tensor,
            page_start=self._page_start.tensor,
            pages=self._pages.tensor,
        )

    @property
    def logits_rows(self) -> Tensor:
        """The whole buffer of logits rows, int32 [max_tokens]."""
        return self._logits_rows.tensor

    def build(self, segments: Sequence[Segment]) -> BuiltBatch:
        """Gather ``segments`` into a batch. The result is valid until the next call."""
        num_seqs, size = len(segments), self.page_size
        for segment in segments:
            self._mirror_pages(segment)
        rows = np.fromiter((s.row for s in segments), np.int32, num_seqs)
        starts = np.fromiter((s.start for s in segments), np.int32, num_seqs)
        query_lens = np.fromiter((len(s.token_ids) for s in segments), np.int32, num_seqs)
        num_logits = np.fromiter((s.num_logits for s in segments), np.int32, num_seqs)

        query_start = self._query_start.array[: num_seqs + 1]
        np.cumsum(query_lens, out=query_start[1:])
        num_tokens = int(query_start[-1])
        flat = segments[0].token_ids if num_seqs == 1 else [t for s in segments for t in s.token_ids]
        self._token_ids.array[:num_tokens] = flat

        positions = self._positions.array[:num_tokens]
        np.add(self._iota[:num_tokens], np.repeat(starts - query_start[:-1], query_lens), out=positions)
        pages_of_tokens = self._table[np.repeat(rows, query_lens), positions // size]
        np.add(pages_of_tokens * size, positions % size, out=self._slots.array[:num_tokens])

        kv_len = self._kv_len.array[:num_seqs]
        np.add(starts, query_lens, out=kv_len)
        num_pages = (kv_len + (size - 1)) // size
        page_start = self._page_start.array[: num_seqs + 1]
        np.cumsum(num_pages, out=page_start[1:])
        total_pages = int(page_start[-1])
        tables = [self._table[row, :count] for row, count in zip(rows, num_pages, strict=True)]
        np.concatenate(tables, out=self._pages.array[:total_pages])

        total_logits = int(num_logits.sum())
        first = query_start[1:] - num_logits  # first row of each segment's logits
        before = np.cumsum(num_logits, dtype=np.int32) - num_logits
        logits_rows = self._logits_rows.array[:total_logits]
        np.add(self._iota[:total_logits], np.repeat(first - before, num_logits), out=logits_rows)

        batch = ForwardBatch(
            token_ids=self._token_ids.tensor[:num_tokens],
            positions=self._positions.tensor[:num_tokens],
            slots=self._slots.tensor[:num_tokens],
            query_start=self._query_start.tensor[: num_seqs + 1],
            kv_len=self._kv_len.tensor[:num_seqs],
            page_start=self._page_start.tensor[: num_seqs + 1],
            pages=self._pages.tensor[:total_pages],
        )
        return BuiltBatch(batch, self._logits_rows.tensor[:total_logits])

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
