"""How good a draft head is, computed by the code that serves it.

Captured text is replayed as the engine decodes it: the head's true rows in order, and from each row that predicts a
token to be learnt a chain of drafts that embed the text's tokens and recycle the head's own state. The next true row
overwrites the chain's KV, as it does after a rejected draft. So the hits are what the engine would accept at
temperature 0, if it visited every row.

S sequences, K steps, L tokens of a sample, R of its rows, M modules of the head, H hidden size, F features of the
target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.config import EngineConfig
from pilotfish.engine.runners import RunnerFactory
from pilotfish.errors import ConfigError
from pilotfish.models import kv_shape
from pilotfish.models.heads import DraftHead
from pilotfish.ops import Ops
from pilotfish.runner import HeadRunner, Segment
from pilotfish.training.store import CaptureReader, Sample

__all__ = ["OVERALL", "Accuracy", "SampleHits", "evaluate_capture", "evaluation_runner", "sample_hits"]

OVERALL = "overall"
"""The source of the figures over all samples."""


@dataclass(frozen=True, slots=True)
class SampleHits:
    """What the head would have drafted from one sample's rows.

    Attributes:
        index: of the sample.
        positions: int64 [R], the position j of each row: it embeds token j, and its first step predicts token j + 1.
        known: bool [R, K], whether tokens j + 1 to j + k + 1 are there and all to be learnt (k counts from 0).
        hits: bool [R, K], whether step k's most likely token is token j + k + 1; False where it is not known.
    """

    index: int
    positions: NDArray[np.int64]
    known: NDArray[np.bool_]
    hits: NDArray[np.bool_]


@dataclass(slots=True)
class Accuracy:
    """Counts over many rows.

    Attributes:
        num_rows: int64 [K], rows with a known token at each step.
        hits: int64 [K], rows where this step was right, given the text's tokens before it.
        joint: int64 [K], rows where it and all steps before it were right: a chain of drafts that is accepted so far.
    """

    num_rows: NDArray[np.int64]
    hits: NDArray[np.int64]
    joint: NDArray[np.int64]

    @classmethod
    def zeros(cls, num_steps: int) -> Accuracy:
        return cls(*(np.zeros(num_steps, np.int64) for _ in range(3)))

    @property
    def by_step(self) -> list[float]:
        """Teacher-forced top-1 accuracy of each step; 0 where nothing was predicted."""
        return [float(value) for value in self.hits / np.maximum(self.num_rows, 1)]

    @property
    def accepted_by_step(self) -> list[float]:
        """How often a chain of drafts is accepted up to each step."""
        return [float(value) for value in self.joint / np.maximum(self.num_rows, 1)]

    @property
    def accepted_length(self) -> float:
        """Mean tokens of a step with K drafts, the target's own included, over all rows alike.

        The engine skips the rows that it accepts: what it measures is a little lower, for easy rows come in runs.
        """
        return 1.0 + sum(self.accepted_by_step)

    def add(self, sample: SampleHits) -> None:
        """Count a sample's rows."""
        self.num_rows += sample.known.sum(axis=0)
        self.hits += sample.hits.sum(axis=0)
        self.joint += np.logical_and.accumulate(sample.hits, axis=1).sum(axis=0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON output and logs."""
        return {
            "num_rows": self.num_rows.tolist(),
            "accuracy": self.by_step,
            "accepted": self.accepted_by_step,
            "accepted_length": self.accepted_length,
        }


def evaluation_runner(head: DraftHead, ops: Ops, *, max_seqs: int, max_tokens: int, max_len: int) -> HeadRunner:
    """The engine's runner of a head, over a KV pool of its own and without an engine: for validation while training.

    Args:
        head: built with ``ops``.
        ops: the reference ops or the native ones.
        max_seqs: sequences at once, for each of which there are pages for ``max_len`` tokens.
        max_tokens: tokens of a pass.
        max_len: of the longest sequence.
    """
    config = EngineConfig(
        backend="torch" if ops.name == "torch" else "native",
        max_model_len=max_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        speculation=None,
    )
    kv = kv_shape(head.config.shape, config.page_size, ops.dtype)
    num_pages = max_seqs * -(-max_len // config.page_size)
    return RunnerFactory(config, ops, num_pages).head_runner(head, kv, max_tokens, max_seqs)


def evaluate_capture(
    runner: HeadRunner,
    reader: CaptureReader,
    indices: Iterable[int],
    num_steps: int,
    *,
    max_seqs: int,
    max_tokens: int,
) -> dict[str, Accuracy]:
    """Accuracy over samples: ``OVERALL`` first, then of each source that has a name.

    Args:
        runner: of the head. Nothing else may use its KV pool meanwhile.
        reader: the captured text, with the states that the head reads.
        indices: of the samples.
        num_steps: K.
        max_seqs: sequences that ``runner`` takes at once; its pages are shared out evenly.
        max_tokens: tokens that it takes at once; at least ``max_seqs``.

    Raises:
        ConfigError: the capture lacks the states that the head reads, or a sample needs more pages than there are.
    """
    results = {OVERALL: Accuracy.zeros(num_steps)}
    for hits in sample_hits(runner, reader, indices, num_steps, max_seqs=max_seqs, max_tokens=max_tokens):
        for source in (OVERALL, reader.sources[hits.index]):
            if source:
                results.setdefault(source, Accuracy.zeros(num_steps)).add(hits)
    return results


def sample_hits(
    runner: HeadRunner,
    reader: CaptureReader,
    indices: Iterable[int],
    num_steps: int,
    *,
    max_seqs: int,
    max_tokens: int,
) -> Iterator[SampleHits]:
    """Each sample's hits as soon as it is done; samples without a row to evaluate are left out.

    Arguments and errors are those of :func:`evaluate_capture`.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps={num_steps}: must be at least 1")
    _check_states(runner, reader)
    replays = _Replays(runner, num_steps, max_seqs, max_tokens)
    waiting = iter(indices)
    while True:
        while replays.has_room:
            index = next(waiting, None)
            if index is None:
                break
            replays.add(index, reader[index])
        if replays.is_empty:
            return
        yield from replays.advance()


def _check_states(runner: HeadRunner, reader: CaptureReader) -> None:
    wanted = runner.head.config.aux_layers
    if wanted and wanted != reader.aux_layers:
        has = f"of layers {list(reader.aux_layers)}" if reader.aux_layers else "of the last layer only"
        raise ConfigError(
            f"aux_layers={list(wanted)}: are the layers that the head reads; the capture has states {has}. Capture "
            f"again with --aux-layers {','.join(map(str, wanted))}."
        )


@dataclass(slots=True)
class _Replay:
    """A sample under way.

    Attributes:
        row: its place in the page table, and in the carried states.
        states: [N, H], what the row of position j + 1 reads, for each j that a row needs.
        positions: of the rows to evaluate, ascending.
        next_row: the first true row that is not in the KV.
        cursor: how many of ``positions`` are done.
    """

    index: int
    row: int
    pages: list[int]
    token_ids: list[int]
    states: Tensor
    positions: NDArray[np.int64]
    known: NDArray[np.bool_]
    hits: NDArray[np.bool_]
    next_row: int
    cursor: int = 0

    @property
    def position(self) -> int:
        """Of the row that is evaluated next."""
        return int(self.positions[self.cursor])

    @property
    def is_done(self) -> bool:
        return self.cursor == len(self.positions)

    def segment(self, start: int, end: int) -> Segment:
        return Segment(self.row, self.token_ids[start:end], start, self.pages, 1)

    def target_states(self, start: int, end: int) -> Tensor:
        """What the rows ``start`` to ``end - 1`` of the first module read: the target's states, and zeros in row 0."""
        if start > 0:
            return self.states[start - 1 : end - 1]
        return torch.cat([self.states.new_zeros(1, self.states.shape[1]), self.states[: end - 1]])

    def expected(self, step: int) -> int:
        """The token that the step should predict from the current row."""
        return self.token_ids[self.position + step + 1]


class _Replays:
    """Samples that are replayed in step, each in a row of its own.

    ``_recycled[row, m]`` is module m's state after the sample's last true row: what its next row may read.
    """

    def __init__(self, runner: HeadRunner, num_steps: int, max_seqs: int, max_tokens: int) -> None:
        config = runner.head.config
        self._runner = runner
        self._num_steps = num_steps
        self._max_tokens = max_tokens
        self._num_modules = config.num_modules
        self._first_row = 0 if config.first_row else 1
        self._has_aux = bool(config.aux_layers)
        self._max_len = runner.head.rope.cos.shape[0]
        self._pages_each = runner.num_pages // max_seqs
        self._free = list(range(max_seqs))
        self._span = max_tokens // max_seqs  # rows that every sample may compute in one pass
        self._running: list[_Replay] = []
        self._recycled = torch.zeros(max_seqs, self._num_modules, config.shape.hidden_size, dtype=runner.ops.dtype)

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    @property
    def is_empty(self) -> bool:
        return not self._running

    def add(self, index: int, sample: Sample) -> None:
        """Begin a sample, if it has rows to evaluate."""
        length = min(len(sample.token_ids), self._max_len)
        learnt = sample.loss_mask[:length].astype(np.bool_)
        positions = np.flatnonzero(learnt[self._first_row + 1 :]) + self._first_row
        if not len(positions):
            return
        known = _known(learnt, positions, self._num_steps)
        features = sample.aux if self._has_aux else sample.hidden
        assert features is not None  # _check_states
        row = self._free.pop()
        replay = _Replay(
            index=index,
            row=row,
            pages=self._pages(row, min(length, int(positions[-1]) + self._num_steps)),
            token_ids=sample.token_ids[:length].tolist(),
            states=self._fuse(features[: max(int(positions[-1]), 1)]),
            positions=positions,
            known=known,
            hits=np.zeros_like(known),
            next_row=self._first_row,
        )
        self._recycled[row] = 0
        self._running.append(replay)

    def advance(self) -> list[SampleHits]:
        """Evaluate the next row of every sample. Those that are done then."""
        running = self._running
        for replay in running:
            self._catch_up(replay)
        tops = self._true_rows([(replay, replay.position + 1) for replay in running])
        self._compare(running, 0, tops)
        chain = self._recycled.clone()
        for step in range(1, self._num_steps):
            active = [replay for replay in running if replay.known[replay.cursor, step]]
            if not active:
                break
            self._compare(active, step, self._chain_rows(active, step, chain))
        for replay in running:
            replay.cursor += 1
        done = [replay for replay in running if replay.is_done]
        self._free.extend(replay.row for replay in done)
        self._running = [replay for replay in running if not replay.is_done]
        return [SampleHits(replay.index, replay.positions, replay.known, replay.hits) for replay in done]

    def _catch_up(self, replay: _Replay) -> None:
        """Compute rows that are only seen by others (a prompt's), until few enough are left to go with all samples."""
        while (missing := replay.position + 1 - replay.next_row) > self._span:
            self._true_rows([(replay, replay.next_row + min(missing - self._span, self._max_tokens))])

    def _true_rows(self, spans: Sequence[tuple[_Replay, int]]) -> Tensor:
        """Run every module over each sample's rows from ``next_row`` to an end, with the target's states.

        Returns:
            The first module's most likely draft ids after the last rows, int32 [S].
        """
        segments = [replay.segment(replay.next_row, end) for replay, end in spans]
        rows = [replay.row for replay, _ in spans]
        last = np.cumsum([end - replay.next_row for replay, end in spans]) - 1
        states = torch.cat([replay.target_states(replay.next_row, end) for replay, end in spans])
        step = self._runner.forward(segments, states, 0)
        tops = self._runner.ops.argmax(step.logits)
        before = self._recycled.clone()
        for module in range(self._num_modules):
            if module > 0:
                step = self._runner.forward(segments, states, module)
            recycled = step.states.clone()
            self._recycled[rows, module] = recycled[last]
            # The next module reads, in each row, what this one left in the row before.
            states = recycled.roll(1, 0)
            states[[0, *(last[:-1] + 1)]] = before[rows, module]
        for replay, end in spans:
            replay.next_row = end
        return tops

    def _chain_rows(self, replays: Sequence[_Replay], step: int, chain: Tensor) -> Tensor:
        """Run the draft of one step: a row that embeds the text's token and reads a state that the head recycled.

        The first modules draft one step each and are done; the last one goes on alone.

        Args:
            chain: [max_seqs, M, H], each module's state in the row before; updated.

        Returns:
            The most likely draft ids, int32 [S].
        """
        rows = [replay.row for replay in replays]
        segments = [replay.segment(replay.position + step, replay.position + step + 1) for replay in replays]
        before = chain[rows]
        last = self._num_modules - 1
        first = min(step, last)
        tops: Tensor | None = None
        for module in range(first, last + 1):
            source = module - 1 if step <= last else last
            result = self._runner.forward(segments, before[:, source].contiguous(), module)
            if tops is None:
                tops = self._runner.ops.argmax(result.logits)
            chain[rows, module] = result.states
        assert tops is not None
        return tops

    def _compare(self, replays: Sequence[_Replay], step: int, tops: Tensor) -> None:
        token_ids = self._runner.head.token_ids
        drafts = tops.tolist() if token_ids is None else token_ids[tops.long()].tolist()
        for replay, draft in zip(replays, drafts, strict=True):
            replay.hits[replay.cursor, step] = draft == replay.expected(step)

    def _fuse(self, features: Tensor) -> Tensor:
        """What rows read of the target's features: [N, F] -> [N, H], in parts that the runner has room for."""
        features = features.to(self._runner.ops.dtype)
        if not self._has_aux:
            return features
        return torch.cat([self._runner.fuse(part).clone() for part in features.split(self._max_tokens)])

    def _pages(self, row: int, num_slots: int) -> list[int]:
        size = self._runner.page_size
        needed = -(-num_slots // size)
        if needed > self._pages_each:
            raise ConfigError(
                f"A sample needs KV for {num_slots} tokens; the pool has {self._pages_each * size} for each of its "
                f"sequences. Use more pages, or fewer sequences at once."
            )
        return list(range(row * self._pages_each, row * self._pages_each + needed))


def _known(learnt: NDArray[np.bool_], positions: NDArray[np.int64], num_steps: int) -> NDArray[np.bool_]:
    """``SampleHits.known``."""
    padded = np.concatenate([learnt, np.zeros(num_steps, np.bool_)])
    wanted = padded[positions[:, None] + 1 + np.arange(num_steps)]
    result: NDArray[np.bool_] = np.logical_and.accumulate(wanted, axis=1)
    return result
