"""Draft heads: a layer or a short chain of them that reads the target's hidden states, in the target's pages.

A head's row for position j embeds token j, reads the state of position j - 1 and predicts token j + 1; its KV lies in
slot j. After each step the head runs over all tokens that are new, the bonus token last, with the *target's* states: so
its KV holds true entries only, and what drafting left there is overwritten. The logits at the bonus token are carried
to the next step and choose the first draft at once; each further draft is a row that reads what the head itself
computed for the row before.

In a chain of M modules, module m's row for position j reads module m - 1's state of position j - 1. The s-th row beyond
the last token so chooses draft s + 1 by module s, and by the last one, which then reads itself, from s = M on.

A page's KV depends on tokens up to the page's end alone, so the prefix cache serves the head as it serves the target.
The states that the first row behind a page reads are kept with the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.runner import HeadRunner, Segment
from pilotfish.runner.head import bits
from pilotfish.sampling import LogitsRow
from pilotfish.speculation.base import CommittedRow, DraftRow, Proposal
from pilotfish.speculation.draw import draw

__all__ = ["HeadProposer"]

_Bits = NDArray[Any]
"""States in the ops' dtype, as integers of its size: see :func:`pilotfish.runner.head.bits`."""


@dataclass(slots=True)
class _Carry:
    """What is known of a sequence. Its pages tell a new sequence in the same row.

    Attributes:
        pages: its pages.
        length: positions below it are in the head's KV; the row for position ``length`` is the next.
        feature: [H], the target's state of the last position that the target has computed.
        states: [C, H], the modules' states of position ``length - 1``.
        logits: [D], of module 0 at position ``length - 1``, if that is the sequence's last token.
    """

    pages: list[int]
    length: int
    feature: _Bits
    states: _Bits
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows that the head computes of one sequence: positions from ``start``, and the state [N, H] that each reads."""

    row: CommittedRow
    carry: _Carry
    start: int
    states: _Bits
    reaches_last: bool

    def segment(self, num_logits: int) -> Segment:
        end = self.start + len(self.states)
        return Segment(self.row.index, self.row.token_ids[self.start : end], self.start, self.row.pages, num_logits)


class _PageStates:
    """The states of each page's last position, which the row behind it reads.

    Args:
        shape: [pages, kinds of states, H].
        page_size: tokens in a page.
        dtype: of :data:`_Bits`.
    """

    def __init__(self, shape: tuple[int, int, int], page_size: int, dtype: np.dtype[Any]) -> None:
        self._kept: _Bits = np.zeros(shape, dtype)
        self._page_size = page_size

    def keep(self, kind: int, pages: Sequence[int], start: int, states: _Bits) -> None:
        """Take those of page ends out of ``states`` [N, H], which are of positions from ``start``."""
        size = self._page_size
        for position in range(start + -(start + 1) % size, start + len(states), size):
            self._kept[pages[position // size], kind] = states[position - start]

    def before(self, pages: Sequence[int], position: int) -> _Bits:
        """[kinds, H] of the page that ends before ``position``."""
        kept: _Bits = self._kept[pages[position // self._page_size - 1]]
        return kept


class HeadProposer:
    """See the module.

    Args:
        runner: of the head, over a KV pool with the target's page numbers.
        vocab_size: V, of the target.
        with_probs: give the distributions that drafts were drawn from.
        p_min: see :class:`pilotfish.config.HeadSpeculation`.
    """

    def __init__(self, runner: HeadRunner, vocab_size: int, *, with_probs: bool, p_min: float = 0.0) -> None:
        head = runner.head
        self._runner = runner
        self._vocab_size = vocab_size
        self._with_probs = with_probs
        self._p_min = p_min
        self._num_modules = head.config.num_modules
        self._has_aux = bool(head.config.aux_layers)
        self._first_row = 0 if head.config.first_row else 1
        self._max_len = head.rope.cos.shape[0]
        self._target_ids = None if head.token_ids is None else head.token_ids.numpy()
        self._target_id_list = None if self._target_ids is None else self._target_ids.tolist()
        # Of a chain, the last module's states are read in drafting only.
        self._num_carried = max(self._num_modules - 1, 1)
        self._hidden_size = head.config.shape.hidden_size
        self._bits_dtype = bits(torch.empty(0, dtype=runner.ops.dtype)).dtype
        self._page_states = _PageStates(
            (runner.num_pages, self._num_modules, self._hidden_size), runner.page_size, self._bits_dtype
        )
        self._carries: dict[int, _Carry] = {}

    @property
    def runner(self) -> HeadRunner:
        """The head's. Its KV is the proposer's, and free for others only while no request is under way."""
        return self._runner

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        limits = [self._limit(row) for row in rows]
        active = [s for s, limit in enumerate(limits) if limit > 0]
        if not active:
            return Proposal.empty(len(rows))
        tokens: list[list[int]] = [[] for _ in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        carries = [self._carries[rows[s].index] for s in active]
        logits = torch.from_numpy(np.stack([carry.logits for carry in carries if carry.logits is not None]))
        states = np.stack([carry.states for carry in carries])
        num_steps = max(limits)
        joint = [1.0] * len(rows)
        for step in range(1, num_steps + 1):
            scores = logits.numpy()
            if self._p_min and self._target_ids is None:
                scores = scores.copy()  # choosing may overwrite the logits
            chosen, q = self._choose(logits, [LogitsRow(rows[s].sampler, tuple(tokens[s])) for s in active])
            for i, s in enumerate(active):
                tokens[s].append(chosen[i])
                if q is not None:
                    probs[s].append(q[i])
                if self._p_min:
                    joint[s] *= self._probability(scores[i], chosen[i])
            # A draft that has been drawn stays, however unlikely: to drop it for what it is would bias rejection.
            kept = [i for i, s in enumerate(active) if len(tokens[s]) < limits[s] and joint[s] >= self._p_min]
            active = [active[i] for i in kept]
            if not active:
                break
            segments = [
                Segment(rows[s].index, tokens[s][-1:], len(rows[s].token_ids) + step - 1, rows[s].pages, 1)
                for s in active
            ]
            logits, states = self._draft(segments, states[kept], step, num_steps)
        return Proposal(tokens, [torch.stack(q) if q else None for q in probs])

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        """Run over what is new, so that pages that the prefix cache may hand out hold true entries of the head too."""
        fused = self._fuse(rows, features)
        spans, first = [], 0
        for row in rows:
            last = first + row.num_computed - row.start
            span = self._advance(row, fused[first:last])
            if span is not None:
                spans.append(span)
            first = last
        if spans:
            self._run(spans)

    def _limit(self, row: DraftRow) -> int:
        carry = self._carries.get(row.index)
        if carry is None or carry.pages is not row.pages or carry.logits is None:
            return 0
        # The last draft is chosen by the row of the one before it.
        return min(row.max_drafts, self._max_len - len(row.token_ids) + 1)

    def _choose(self, logits: Tensor, places: Sequence[LogitsRow]) -> tuple[list[int], Tensor | None]:
        """A draft for each row of logits [R, D], and the distributions [R, V] that they are drawn from if wanted."""
        if not self._with_probs and all(place.state.takes_argmax for place in places):
            # The lowest id among equals, as the sampler's; the draft vocabulary is ascending.
            best: list[int] = logits.numpy().argmax(axis=1).tolist()
            ids = self._target_id_list
            return (best if ids is None else [ids[token] for token in best]), None
        if self._target_ids is not None:
            # What is not in the draft vocabulary cannot be proposed.
            full = np.full((len(places), self._vocab_size), -np.inf, np.float32)
            full[:, self._target_ids] = logits.numpy()
            logits = torch.from_numpy(full)
        return draw(logits, places, self._runner.ops, with_probs=self._with_probs)

    def _probability(self, scores: NDArray[np.float32], token: int) -> float:
        """What the head gives a token of the target's ids, at temperature 1: softmax of ``scores`` [D]."""
        index = token if self._target_ids is None else int(np.searchsorted(self._target_ids, token))
        weights = np.exp(scores - scores.max())
        return float(weights[index] / weights.sum())

    def _draft(self, segments: list[Segment], states: _Bits, step: int, num_steps: int) -> tuple[Tensor, _Bits]:
        """Compute the ``step``-th row beyond the last token.

        Args:
            segments: a draft of each of R sequences.
            states: [R, C, H], of the row before, by module.
            step: from 1.
            num_steps: of the longest proposal; modules that only later steps would need are left out.

        Returns:
            Logits [R, D] that choose the next draft, and the states of this row [R, M, H].
        """
        last = self._num_modules - 1
        after = np.empty((len(segments), self._num_modules, self._hidden_size), self._bits_dtype)
        logits = None
        for module in range(min(step, last), min(last, num_steps - 1) + 1):
            source = module - 1 if step <= last else last
            if logits is not None:
                segments = [Segment(x.row, x.token_ids, x.start, x.pages, 0) for x in segments]
            result = self._runner.forward(segments, self._tensor(states[:, source]), module)
            after[:, module] = bits(result.states)
            if logits is None:
                logits = result.logits
        assert logits is not None
        return logits, after

    def _fuse(self, rows: Sequence[CommittedRow], features: Tensor) -> _Bits:
        """What rows read of the features of tokens that are in the KV now, row after row: [N, H]."""
        source = bits(features)
        parts = [source[row.offset : row.offset + row.num_computed - row.start] for row in rows]
        kept = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return bits(self._runner.fuse(self._tensor(kept))) if self._has_aux else kept

    def _advance(self, row: CommittedRow, own: _Bits) -> _Span | None:
        """Note what became of a sequence; which rows are to be computed, if any.

        Args:
            row: the sequence.
            own: [N, H], the target's states of the tokens that this step put into its KV.
        """
        carry = self._carries.get(row.index)
        if carry is None or carry.pages is not row.pages:
            carry = self._carries[row.index] = self._new_carry(row)
        carry.logits = None
        self._page_states.keep(0, row.pages, row.start, own)
        num_tokens, size = len(row.token_ids), self._runner.page_size
        end = num_tokens if row.num_computed >= num_tokens - 1 else row.num_computed
        end = min(end, self._max_len, len(row.pages) * size)
        if row.finished:
            # Whole pages stay in the prefix cache; nobody reads what is behind them.
            end = min(end, row.num_computed // size * size)
            del self._carries[row.index]
        span = None
        if end > carry.length:
            first = carry.length - 1 - row.start
            states = own[first : end - 1 - row.start] if first >= 0 else own[: end - 1 - row.start]
            if first < 0:
                states = np.concatenate([carry.feature[None], states])
            span = _Span(row, carry, carry.length, states, reaches_last=end == num_tokens and not row.finished)
            carry.length = end
        carry.feature = own[-1].copy()
        return span

    def _new_carry(self, row: CommittedRow) -> _Carry:
        carried = np.zeros((self._num_carried, self._hidden_size), self._bits_dtype)
        if row.start == 0:
            return _Carry(row.pages, self._first_row, np.zeros_like(carried[0]), carried)
        kept = self._page_states.before(row.pages, row.start)
        carried[: len(kept) - 1] = kept[1:]
        return _Carry(row.pages, row.start, kept[0].copy(), carried)

    def _run(self, spans: Sequence[_Span]) -> None:
        """Run all modules over the spans' rows; carry the last rows' logits and states."""
        states = np.concatenate([span.states for span in spans])
        segments = [span.segment(int(span.reaches_last)) for span in spans]
        result = self._runner.forward(segments, self._tensor(states), 0)
        logits = iter(result.logits.numpy())
        for span in spans:
            if span.reaches_last:
                span.carry.logits = next(logits).copy()
        if self._num_modules == 1:
            self._keep_last(spans, bits(result.states))
            return
        for module in range(self._num_carried):
            states = self._shift(spans, bits(result.states), module)
            result = self._runner.forward([span.segment(0) for span in spans], self._tensor(states), module + 1)

    def _keep_last(self, spans: Sequence[_Span], computed: _Bits) -> None:
        """Carry what the only module computed for each sequence's last row: drafting goes on from there."""
        last = -1
        for span in spans:
            last += len(span.states)
            span.carry.states[0] = computed[last]

    def _shift(self, spans: Sequence[_Span], computed: _Bits, module: int) -> _Bits:
        """A module's states [T, H] moved on by one row within each sequence, as the next module reads them."""
        shifted = np.empty_like(computed)
        first = 0
        for span in spans:
            last = first + len(span.states)
            shifted[first] = span.carry.states[module]
            shifted[first + 1 : last] = computed[first : last - 1]
            span.carry.states[module] = computed[last - 1]
            self._page_states.keep(module + 1, span.row.pages, span.start, computed[first:last])
            first = last
        return shifted

    def _tensor(self, states: _Bits) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(states)).view(self._runner.ops.dtype)
