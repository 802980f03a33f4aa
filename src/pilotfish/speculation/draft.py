"""Draft-target: a small LLM proposes, whose KV pool has the target's pages.

The draft has always seen every token that the target has, and one more: after a step it runs over the tokens that are
new to it, the bonus token last, and the logits it gives there are carried to the next step, where they choose the first
draft at once. K - 1 further forwards choose the others. A rejected draft's KV is overwritten by what came instead.

Drafts are chosen as the target chooses: the same processing of logits with the same history, and the same noise. Equal
distributions so give equal tokens (coupled verification), and q is what rejection needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.config import DraftModel, Speculation
from pilotfish.errors import ConfigError
from pilotfish.models import Model
from pilotfish.runner import Runner, Segment
from pilotfish.sampling import LogitsRow
from pilotfish.speculation.base import CommittedRow, DraftRow, Proposal, Proposer, Scheme, SpeculationContext
from pilotfish.speculation.draw import draw
from pilotfish.text import Tokenizer

__all__ = ["DraftProposer", "check_same_vocabulary", "load"]


def load(settings: Speculation, context: SpeculationContext) -> Scheme:
    """See :mod:`pilotfish.speculation.base`.

    Raises:
        ConfigError: the draft's vocabulary is not the target's, or ``layers`` is more than the target has.
        CheckpointError: the draft cannot be loaded.
    """
    assert isinstance(settings, DraftModel)
    vocab_size = context.target.config.vocab_size
    if settings.layers is not None:
        model, token_ids = _first_layers(context.target, settings.layers), None
        num_tokens = vocab_size
    else:
        assert settings.model is not None
        model, tokenizer, token_ids = context.load_model(settings.model)
        num_tokens = check_same_vocabulary(context.tokenizer, tokenizer, settings.model)
    num_tokens = min(num_tokens, vocab_size, model.config.vocab_size)
    known = np.arange(num_tokens) if token_ids is None else token_ids.numpy()
    known = known[known < num_tokens]
    draft = model

    def start(runner: Runner | None) -> Proposer:
        assert runner is not None
        max_len = draft.rope.cos.shape[0]
        return DraftProposer(runner, vocab_size, known, max_len, with_probs=settings.verify == "rejection")

    return Scheme(model=model, start=start)


def _first_layers(target: Model, layers: int) -> Model:
    total = target.config.num_layers
    if layers >= total:
        raise ConfigError(f"layers={layers}: the target has {total} layers. A draft of its first ones has fewer.")
    return target.first_layers(layers)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, name: str) -> int:
    """The number of tokens that both have, if they are the same ones.

    Raises:
        ConfigError: naming the first id whose tokens differ.
    """
    ours, theirs = target.tokens(), draft.tokens()
    if ours == theirs:
        return len(ours)
    for token_id in range(max(len(ours), len(theirs))):
        a = ours[token_id] if token_id < len(ours) else None
        b = theirs[token_id] if token_id < len(theirs) else None
        if a != b:
            raise ConfigError(
                f"The draft {name} has another vocabulary than the target: token {token_id} is {_shown(b)} in the "
                f"draft's and {_shown(a)} in the target's. A draft must have the target's own tokenizer."
            )
    return len(ours)


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)


@dataclass(slots=True)
class _Carry:
    """What the draft knows of a sequence: its pages tell a new sequence in the same row.

    ``length`` tokens are in the draft's KV. After the sequence's last one it carries ``first``, the first draft of a
    row that takes the argmax, or the ``logits`` [V] that a draft is to be drawn from.
    """

    pages: list[int]
    length: int
    takes_argmax: bool = False
    first: int | None = None
    logits: NDArray[np.float32] | None = None


class DraftProposer:
    """See the module.

    Args:
        runner: of the draft model, over a KV pool with the target's page numbers.
        vocab_size: V, of the target.
        known: int64 [D], ascending: what the draft's first D logits are of. Behind them may be padding; other ids are
            never proposed.
        max_len: the draft's own context limit; beyond it decoding goes on without drafts.
        with_probs: give the distributions that drafts were drawn from.
    """

    def __init__(
        self, runner: Runner, vocab_size: int, known: NDArray[np.int64], max_len: int, *, with_probs: bool
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._known = known
        self._is_known = np.zeros(vocab_size, np.bool_)
        self._is_known[known] = True
        self._max_len = max_len
        self._with_probs = with_probs
        self._carries: dict[int, _Carry] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        tokens: list[list[int]] = [[] for _ in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        limits = [self._limit(row) for row in rows]
        drawn = []
        for s, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            carry = self._carries.get(row.index)
            if limit and carry is not None and carry.first is not None:
                tokens[s].append(carry.first)
            elif limit:
                drawn.append(s)
        if drawn:
            self._choose(self._carried([rows[s] for s in drawn]), drawn, rows, limits, tokens, probs)
        while active := [s for s, limit in enumerate(limits) if len(tokens[s]) < limit]:
            logits = self._forward([_next_segment(rows[s], tokens[s]) for s in active])
            self._choose(logits, active, rows, limits, tokens, probs)
        return Proposal(tokens, [torch.stack(q) if q else None for q in probs])

    def _choose(
        self,
        logits: Tensor,
        active: Sequence[int],
        rows: Sequence[DraftRow],
        limits: list[int],
        tokens: list[list[int]],
        probs: list[list[Tensor]],
    ) -> None:
        """The next draft of the rows ``active``, and the distribution it was drawn from where that is wanted."""
        places = [LogitsRow(rows[s].sampler, tokens[s]) for s in active]
        chosen, q = draw(logits, places, self._runner.ops, with_probs=self._with_probs)
        for i, s in enumerate(active):
            if not self._is_known[chosen[i]]:  # a constraint leaves nothing that the draft knows
                limits[s] = len(tokens[s])
                continue
            tokens[s].append(chosen[i])
            if q is not None:
                probs[s].append(q[i])

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        """Run over what is new, so that pages that the prefix cache may hand out hold true entries of the draft too."""
        segments, carries = [], []
        for row in rows:
            carry = self._carries.get(row.index)
            if carry is None or carry.pages is not row.pages:
                carry = self._carries[row.index] = _Carry(row.pages, row.start)
            # Of its own drafts it has seen all but the last one; those that were kept are in place.
            kept = row.num_computed - carry.length if row.num_drafts else 0
            carry.length += max(0, min(kept, row.num_drafts - 1))
            carry.first = carry.logits = None
            end = len(row.token_ids) if row.num_computed >= len(row.token_ids) - 1 else row.num_computed
            if row.finished:
                end = row.num_computed
                del self._carries[row.index]
            end = min(end, self._max_len, len(row.pages) * self._runner.page_size)
            if end > carry.length:
                reaches_last = end == len(row.token_ids) and not row.finished
                segments.append(
                    Segment(row.index, row.token_ids[carry.length : end], carry.length, row.pages, int(reaches_last))
                )
                if reaches_last:
                    carries.append(carry)
                carry.length = end
        if segments:
            logits = self._forward(segments)
            likely: list[int] = []
            if any(carry.takes_argmax for carry in carries):
                likely = self._runner.ops.argmax(logits).tolist()
            for i, carry in enumerate(carries):
                if carry.takes_argmax:
                    carry.first = likely[i]
                else:
                    carry.logits = logits[i].numpy().copy()

    def _limit(self, row: DraftRow) -> int:
        carry = self._carries.get(row.index)
        if carry is None or carry.pages is not row.pages or (carry.logits is None and carry.first is None):
            return 0
        # With the distributions wanted, a greedy draft's is needed too.
        carry.takes_argmax = row.sampler.takes_argmax and not self._with_probs
        # The first draft needs no forward pass: the last one proposed has no entry of its own.
        return max(0, min(row.max_drafts, self._max_len - len(row.token_ids) + 1))

    def _carried(self, rows: Sequence[DraftRow]) -> Tensor:
        # Copies by numpy: torch would wake threads of its own, which compete with the kernels', for a row of this size.
        carried = np.empty((len(rows), self._vocab_size), np.float32)
        for i, row in enumerate(rows):
            carried[i] = self._carries[row.index].logits
        return torch.from_numpy(carried)

    def _forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits over the target's vocabulary: [R, V], -inf for what the draft cannot propose."""
        logits = self._runner.forward(segments)
        num_known = len(self._known)
        if logits.shape[1] == num_known == self._vocab_size:
            return logits
        out = np.full((logits.shape[0], self._vocab_size), -np.inf, np.float32)
        out[:, self._known] = logits[:, :num_known].numpy()
        return torch.from_numpy(out)


def _next_segment(row: DraftRow, drafts: list[int]) -> Segment:
    """The forward pass of the last draft, which gives the logits of the next one."""
    return Segment(row.index, drafts[-1:], len(row.token_ids) + len(drafts) - 1, row.pages, 1)
