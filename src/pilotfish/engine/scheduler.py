"""The scheduler: which sequences run in the next step, how many of their tokens, and in which pages.

Host only; it knows no tensors and no text. A sequence lives in a :class:`Row`. Rows that are decoding come first, then
prompts under way (cut into chunks by the token budget), then new arrivals in order. When no page is left, the youngest
row gives its pages back and is computed again later: its output does not change.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pilotfish.kv import ROOT, PagePool

__all__ = ["Row", "ScheduledRow", "Scheduler"]


@dataclass(eq=False, slots=True)
class Row:
    """A live sequence.

    Attributes:
        arrival: order of arrival, the age that decides who is preempted.
        token_ids: prompt and output; the last token of a decoding row is not yet in the KV cache.
        num_prompt: tokens of the prompt.
        index: its permanent place in the row table while it runs, -1 while it waits.
        pages: its KV pages in order; they may reach beyond ``num_computed``.
        num_computed: leading tokens whose KV is in the pages.
        num_cached: leading tokens found in the prefix cache when it was last admitted.
        num_preemptions: how often it lost its pages.
    """

    arrival: int
    token_ids: list[int]
    num_prompt: int
    index: int = -1
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    _node: int = ROOT
    _num_indexed: int = 0

    @property
    def is_decoding(self) -> bool:
        """True when only its last token is missing from the KV cache."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_computed >= self.num_prompt


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A row's share of a step: its tokens ``[start, start + num_tokens)`` and room for ``max_drafts`` drafts."""

    row: Row
    start: int
    num_tokens: int
    max_drafts: int = 0

    @property
    def samples(self) -> bool:
        """Whether the step reaches the row's last token, so that its next one is chosen."""
        return self.start + self.num_tokens == len(self.row.token_ids)


class _Step:
    """A step while it is composed: who is in it, and what is left of the token budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[Row, ScheduledRow] = {}

    def add(self, item: ScheduledRow) -> None:
        self.rows[item.row] = item
        self.budget -= item.num_tokens

    def add_drafts(self, item: ScheduledRow, count: int) -> None:
        self.rows[item.row] = replace(item, max_drafts=count)

    def drop(self, row: Row) -> None:
        item = self.rows.pop(row, None)
        if item is not None:
            self.budget += item.num_tokens


class Scheduler:
    """Composes steps.

    Args:
        pool: the pages of target and draft.
        max_num_seqs: most rows that run at once.
        max_num_batched_tokens: token budget of a step; drafts come on top of it.
        max_model_len: longest sequence.
        draft_has_kv: the draft runs over the bonus token too, which needs a slot a step before the target's.
        decode_only_drafts: no drafts in a step that computes a prompt.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        draft_has_kv: bool = False,
        decode_only_drafts: bool = False,
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self.draft_has_kv = draft_has_kv
        self.decode_only_drafts = decode_only_drafts
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.num_preemptions = 0
        self._free_indices = list(range(max_num_seqs))

    @property
    def has_rows(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, rows: Iterable[Row], *, first: bool = False) -> None:
        """Queue rows; ``first`` puts them before all others that wait (completions of a request already under way)."""
        if first:
            self.waiting.extendleft(reversed(list(rows)))
        else:
            self.waiting.extend(rows)

    def remove(self, row: Row) -> None:
        """Take out a row that has finished or was aborted, wherever it is."""
        if row.index >= 0:
            self._stop(row)
        elif row in self.waiting:
            self.waiting.remove(row)

    def commit(self, row: Row, num_computed: int) -> None:
        """Record that the first ``num_computed`` tokens of ``row`` have their KV in its pages."""
        row.num_computed = num_computed
        index, size = self.pool.index, self.pool.page_size
        if index is None:
            return
        while (row._num_indexed + 1) * size <= num_computed:
            page_number = row._num_indexed
            tokens = row.token_ids[page_number * size : (page_number + 1) * size]
            row._node = index.insert(row._node, tokens, row.pages[page_number])
            row._num_indexed += 1

    def schedule(self, drafts_wanted: Callable[[Row], int] = lambda row: 0) -> list[ScheduledRow]:
        """Compose the next step. Empty only if no rows are left.

        Args:
            drafts_wanted: how many drafts a decoding row can use; it gets as many as free pages allow.
        """
        step = _Step(self.max_num_batched_tokens)
        preemptions = self.num_preemptions
        for row in sorted(self.running, key=lambda row: (not row.is_decoding, row.arrival)):
            if step.budget == 0:
                break
            if row.index >= 0:  # else preempted for an older row a moment ago
                self._schedule(row, step)
        if self.num_preemptions == preemptions:
            self._admit(step)
        self._add_drafts(step, drafts_wanted)
        return list(step.rows.values())

    def _schedule(self, row: Row, step: _Step) -> None:
        """Put as many of the row's tokens into the step as budget allows, preempting the youngest for pages."""
        num_tokens = min(len(row.token_ids) - row.num_computed, step.budget)
        count = self.pool.pages_for(row.num_computed + num_tokens) - len(row.pages)
        if count > 0:
            while (pages := self.pool.allocate(count)) is None:
                victim = max(self.running, key=lambda row: row.arrival)
                step.drop(victim)
                self._preempt(victim)
                if victim is row:
                    return
            row.pages.extend(pages)
        step.add(ScheduledRow(row, row.num_computed, num_tokens))

    def _admit(self, step: _Step) -> None:
        """Start waiting rows in order while rows, pages and budget last. Nobody overtakes: nobody starves."""
        while self.waiting and step.budget > 0 and len(self.running) < self.max_num_seqs:
            row = self.waiting[0]
            # The last token is always computed: its logits choose the next one.
            cached, node = self.pool.match_prefix(row.token_ids[:-1])
            # Room for all of it, so that a long prompt is not admitted only to be preempted half-way.
            num_new = self.pool.pages_for(len(row.token_ids)) - len(cached)
            if num_new + self.pool.num_evictable(cached) > self.pool.num_free:
                return
            self.waiting.popleft()
            self.pool.share(cached)
            row.pages = cached
            row.num_computed = row.num_cached = len(cached) * self.pool.page_size
            row._node, row._num_indexed = node, len(cached)
            row.index = heapq.heappop(self._free_indices)
            self.running.append(row)
            self._schedule(row, step)

    def _add_drafts(self, step: _Step, drafts_wanted: Callable[[Row], int]) -> None:
        """Give rows room for drafts out of the pages that are left: nobody waits or is preempted for a guess.

        The token budget is not asked: a row's drafts would depend on whose prompt is computed beside it.
        """
        drafting = not self.decode_only_drafts or all(row.is_decoding for row in step.rows)
        for row, item in list(step.rows.items()):
            if not item.samples:
                continue
            end = item.start + item.num_tokens
            wanted = drafts_wanted(row) if drafting and row.is_decoding else 0
            len_bound = min(end + wanted + self.draft_has_kv, self.max_model_len)
            count = min(self.pool.pages_for(len_bound) - len(row.pages), self.pool.num_free)
            if count > 0:
                row.pages.extend(self.pool.allocate(count) or [])
            step.add_drafts(item, max(0, min(wanted, len(row.pages) * self.pool.page_size - end)))

    def _preempt(self, row: Row) -> None:
        self._stop(row)
        row.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(row)

    def _stop(self, row: Row) -> None:
        self.running.remove(row)
        heapq.heappush(self._free_indices, row.index)
        self.pool.release(row.pages)
        row.index = -1
        row.pages = []
        row.num_computed = 0
        row._node, row._num_indexed = ROOT, 0
