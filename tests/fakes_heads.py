"""A draft head without a model: a runner that checks what every row reads, over the engine of :mod:`fakes`.

A "state" says where it comes from: of which kind it is (the target's, or which module's), the position after its own,
its token, and a digest of all tokens so far. The head's "KV" is each row's token and the state that it read. Whenever
it runs it reads a sequence's rows back through its pages and checks that they follow from each other. The logits depend
on every token that it read, so a row that is missing, stale or another sequence's changes what it proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fakes import VOCAB_SIZE, PageCheckingRunner, next_logits, tiny_model_config
from pilotfish.attention import RopeTable
from pilotfish.models.heads import HeadConfig
from pilotfish.ops.reference import TorchOps
from pilotfish.runner import BatchBuilder, HeadStep, Segment

HIDDEN = 8
KIND, NEXT_POSITION, TOKEN, DIGEST = range(4)
TARGET = 0
"""The kind of the target's states; module m's are of kind m + 1."""

Rows = NDArray[np.float32]


def digest(before: float, token: int) -> int:
    """Of a text that ends with ``token``, given that of the text before it. A small integer: exact in float32."""
    return (int(before) * 1_000_003 + token * 7919 + 12345) % 16_777_213


def state(kind: int, position: int, token: int, before: float) -> Rows:
    row = np.zeros(HIDDEN, np.float32)
    row[: DIGEST + 1] = kind, position + 1, token, digest(before, token)
    return row


class StateRunner(PageCheckingRunner):
    """A target whose features are its states; with ``num_aux`` layers, so many copies side by side, each one larger."""

    num_aux = 0
    _features = torch.empty(0)

    @property
    def features(self) -> Tensor:
        return self._features

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        self._features.fill_(torch.nan)  # as a recording overwrites its output
        logits = super().forward(segments)
        rows: list[Rows] = []
        for segment in segments:
            before = 0
            for position, token in enumerate(self.history(segment)):
                rows += [state(TARGET, position, token, before)] if position >= segment.start else []
                before = digest(before, token)
        features = np.stack(rows)
        if self.num_aux:
            features = np.concatenate([features + layer + 1 for layer in range(self.num_aux)], axis=1)
        self._features = torch.from_numpy(features)
        return logits

    def history(self, segment: Segment) -> list[int]:
        """The sequence's tokens, as they are in its pages."""
        slots = slots_of(segment.pages, self.page_size, segment.start + len(segment.token_ids))
        return [int(token) for token in self._kv[slots]]


class FakeHead:
    """The part of a head that its proposer reads."""

    def __init__(
        self, *, num_modules: int = 1, first_row: bool = True, num_aux: int = 0, num_tokens: int = VOCAB_SIZE,
        max_len: int = 48,
    ) -> None:  # fmt: skip
        shape = replace(tiny_model_config(), num_layers=num_modules, hidden_size=HIDDEN)
        self.config = HeadConfig(
            kind="eagle3" if num_aux else "mtp", shape=shape, target_hidden_size=HIDDEN, draft_vocab_size=num_tokens,
            aux_layers=tuple(range(1, num_aux + 1)), first_row=first_row,
        )  # fmt: skip
        self.rope = RopeTable(torch.zeros(max_len, 1), torch.zeros(max_len, 1))
        # A slice that is not a prefix: ids of drafts are not ids of tokens.
        self.token_ids = None if num_tokens == VOCAB_SIZE else torch.arange(VOCAB_SIZE - num_tokens, VOCAB_SIZE)


class StateCheckingHeadRunner:
    """A :class:`pilotfish.runner.HeadRunner`: see the module.

    Args:
        head: what it stands for.
        builder: of its batches.
        num_pages: of its KV pool.
        eos_bias: as the target's.
        error: share of histories after which it does not know what the target will choose.

    Attributes:
        num_tokens: of each pass of each module so far, by module.
    """

    def __init__(
        self, head: FakeHead, builder: BatchBuilder, num_pages: int, eos_bias: float = 0.0, error: float = 0.0
    ) -> None:
        self.head: Any = head
        self.ops = TorchOps(torch.float32)
        self.num_pages = num_pages
        self.page_size = builder.page_size
        self.num_tokens: list[list[int]] = [[] for _ in range(head.config.num_modules)]
        self._builder = builder
        self._eos_bias = eos_bias
        self._error = error
        self._first = 0 if head.config.first_row else 1
        slots = num_pages * builder.page_size
        self._tokens = np.full((head.config.num_modules, slots), -1)
        self._results: dict[int, HeadStep] = {}
        self._fused = torch.empty(0)
        self._states = np.full((head.config.num_modules, slots, HIDDEN), np.nan, np.float32)

    def fuse(self, features: Tensor) -> Tensor:
        num_aux = len(self.head.config.aux_layers)
        assert num_aux and features.shape[1] == num_aux * HIDDEN
        parts = features.split(HIDDEN, dim=1)
        assert all(torch.equal(part - layer - 1, parts[0] - 1) for layer, part in enumerate(parts))
        self._fused.fill_(torch.nan)
        self._fused = parts[0] - 1
        return self._fused

    def forward(self, segments: Sequence[Segment], states: Tensor, module: int = 0) -> HeadStep:
        size = self._builder.build(segments)
        batch = self._builder.batch(size)
        self.num_tokens[module].append(batch.num_tokens)
        slots = batch.slots.numpy()
        assert len(set(slots.tolist())) == len(slots), "two tokens of one pass share a slot"
        if module in self._results:  # a recording overwrites its output
            self._results[module].states.fill_(torch.nan)
            self._results[module].logits.fill_(torch.nan)
        assert states.shape == (batch.num_tokens, HIDDEN)
        self._tokens[module, slots] = batch.token_ids.numpy()
        self._states[module, slots] = states.numpy()
        logits: list[Rows] = []
        recycled: list[Rows] = []
        for segment in segments:
            end = segment.start + len(segment.token_ids)
            tokens = self._history(segment.pages, end, module)
            read = self._states[module, slots_of(segment.pages, self.page_size, end)]
            recycled += [state(module + 1, p, tokens[p], read[p, DIGEST]) for p in range(segment.start, end)]
            for position in range(end - segment.num_logits, end):
                row = next_logits(np.array(tokens[: position + 1]), self._error).copy()
                logits.append(row)
        out = torch.from_numpy(np.stack(logits) if logits else np.empty((0, VOCAB_SIZE), np.float32))
        out[:, -1] += self._eos_bias  # EOS is the last token
        ids = self.head.token_ids
        out = out if ids is None else out[:, ids].contiguous()
        self._results[module] = HeadStep(out, torch.from_numpy(np.stack(recycled)))
        return self._results[module]

    def _history(self, pages: Sequence[int], end: int, module: int) -> list[int]:
        """All tokens up to position ``end``; asserts that every row that they lie in has read what it should."""
        assert end <= self.head.rope.cos.shape[0], "there are no rotary tables for this position"
        slots = slots_of(pages, self.page_size, end)
        tokens, read = self._tokens[module, slots], self._states[module, slots]
        last = self.head.config.num_modules - 1
        before, drafting = 0.0, False
        if self._first:
            # There is no row 0: its token is known from the state alone.
            assert end > 1, "row 0 was computed"
            tokens[0] = int(read[1, TOKEN])
            before = digest(0, int(tokens[0]))
        for position in range(self._first, end):
            row = read[position]
            if position == 0:
                assert not row.any(), "row 0 reads zeros"
            else:
                assert row[NEXT_POSITION] == position, f"row {position} read the state of position {row[1] - 1}"
                assert (row[TOKEN], row[DIGEST]) == (tokens[position - 1], before), f"row {position}: of another text"
                # Only drafts, which are at the end, may have read what the last module itself computed.
                drafting |= module == last and row[KIND] == last + 1
                assert row[KIND] == (last + 1 if drafting else module), f"row {position} of module {module}: {row}"
            before = digest(before, int(tokens[position]))
        return [int(token) for token in tokens]


def slots_of(pages: Sequence[int], page_size: int, end: int) -> NDArray[np.int64]:
    """Slots of the first ``end`` positions."""
    return (np.array(pages)[:, None] * page_size + np.arange(page_size)).reshape(-1)[:end]
