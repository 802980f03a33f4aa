"""Captured samples as batches of rows, with the one place where rows, labels, masks and teachers are aligned.

Row j of a sample embeds token j, reads the target's state of position j - 1 and predicts token j + 1; the target's own
prediction of token j + 1 is its state at position j. The last token of a sample has no row: nothing is known of what
follows it. Step k of the chain that starts at row j embeds token j + k, predicts token j + k + 1 and is taught by the
target's state at position j + k. It counts if tokens j + 1 to j + k + 1 are all to be learnt.

T rows of a batch, R chains (rows whose next token is to be learnt), F feature width, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.attention import ForwardBatch
from pilotfish.training.store import Sample

__all__ = ["Batch", "Step", "make_batch", "plan_batches", "split_validation"]

_WINDOW_BATCHES = 64
"""Samples are sorted by length within the samples of about this many batches, so that batches stay well mixed."""


@dataclass(frozen=True, slots=True)
class Step:
    """Step k of a batch's chains.

    Attributes:
        chains: int64 [R_k], which of the R chains count.
        teachers: int64 [R_k], the taught position of each, as an index into ``Batch.taught``.
        samples: int64 [R_k], the sample that each belongs to.
        labels: int64 [R_k], the token that really follows, an id of the target's.
    """

    chains: Tensor
    teachers: Tensor
    samples: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples' rows.

    Attributes:
        text: all rows as one ragged batch, for step 0.
        features: [T, F], what each row reads of the target: the feature of the position before it; zeros in row 0.
        rows: int64 [R], the rows at which chains start.
        taught: [R, H], the target's states at ``rows``: its predictions of the tokens after them.
        steps: what counts in each step.
        num_samples: of the batch.
    """

    text: ForwardBatch
    features: Tensor
    rows: Tensor
    taught: Tensor
    steps: tuple[Step, ...]
    num_samples: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples, those without a row included."""
        return self.text.num_tokens + self.num_samples

    def chain_inputs(self, step: int) -> tuple[Tensor, Tensor]:
        """Embedded tokens (int32 [R]) and rope positions (int32 [R]) of step ``step`` >= 1.

        A chain that runs over the end of its sample gets any token: it does not count there.
        """
        rows = (self.rows + step).clamp(max=self.text.num_tokens - 1)
        return self.text.token_ids[rows], self.text.positions[rows]


def make_batch(samples: Sequence[Sample], *, steps: int, first_row: bool, dtype: torch.dtype) -> Batch:
    """Lay out samples of at least 2 tokens (3 without a first row).

    Args:
        samples: with ``aux`` if the head reads it; then that is the feature.
        steps: of the chains, 1 or more.
        first_row: whether token 0 has a row.
        dtype: of features and states.
    """
    first = 0 if first_row else 1
    token_ids, masks, positions, features, states, lengths = [], [], [], [], [], []
    for sample in samples:
        rows = len(sample.token_ids) - 1 - first
        feature = sample.hidden if sample.aux is None else sample.aux
        token_ids.append(torch.from_numpy(sample.token_ids[first:-1].astype(np.int32)))
        # The mask and the label of row j are those of the token that it predicts, j + 1.
        masks.append(torch.from_numpy(sample.loss_mask[first + 1 :].astype(np.int64)))
        positions.append(torch.arange(first, first + rows, dtype=torch.int32))
        if first_row:
            features.append(feature.new_zeros(1, feature.shape[1]))
        features.append(feature[: rows - 1 + first])
        states.append(sample.hidden[first:-1])
        lengths.append(rows)
    length = torch.tensor(lengths)
    start = _starts(length)
    tokens, mask = torch.cat(token_ids), torch.cat(masks).bool()
    labels = torch.cat([torch.from_numpy(sample.token_ids[first + 1 :].astype(np.int64)) for sample in samples])
    text = ForwardBatch(
        token_ids=tokens,
        positions=torch.cat(positions),
        slots=torch.arange(tokens.shape[0], dtype=torch.int32),
        query_start=start.to(torch.int32),
        kv_len=length.to(torch.int32),
        page_start=start.to(torch.int32),
        pages=torch.arange(tokens.shape[0], dtype=torch.int32),
    )
    chains = mask.nonzero().squeeze(1)
    return Batch(
        text=text,
        features=torch.cat(features).to(dtype),
        rows=chains,
        taught=torch.cat(states).to(dtype)[chains],
        steps=_align(mask, labels, torch.repeat_interleave(torch.arange(len(samples)), length), chains, steps),
        num_samples=len(samples),
    )


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _align(mask: Tensor, labels: Tensor, sample_of: Tensor, chains: Tensor, steps: int) -> tuple[Step, ...]:
    """Which chains count in each step: ``mask`` bool [T] says so of each row's label; ``chains`` are its true rows."""
    order = mask.long().cumsum(0) - 1  # index among the taught positions
    alive = torch.ones_like(chains, dtype=torch.bool)
    result = []
    for k in range(steps):
        ends = (chains + k).clamp(max=mask.shape[0] - 1)
        inside = (chains + k < mask.shape[0]) & (sample_of[ends] == sample_of[chains])
        alive = alive & inside & mask[ends]
        ends = ends[alive]
        result.append(Step(alive.nonzero().squeeze(1), order[ends], sample_of[ends], labels[ends]))
    return tuple(result)


def split_validation(num_samples: int, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to train on and to validate with, by sample: the same for the same capture, fraction and seed."""
    order = np.random.default_rng(seed).permutation(num_samples)
    held_out = math.ceil(num_samples * fraction) if fraction else 0
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def plan_batches(
    indices: NDArray[np.int64], lengths: NDArray[np.int64], batch_tokens: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """An epoch's batches: samples of about the same length together, at most ``batch_tokens`` tokens or one sample.

    Args:
        indices: samples to use.
        lengths: tokens of every sample of the capture.
        batch_tokens: budget of a batch.
        seed: of the run.
        epoch: counted from 0; each has its own order, which depends on nothing else.
    """
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(indices)
    total = int(lengths[order].sum())
    window = max(1, math.ceil(len(order) * _WINDOW_BATCHES * batch_tokens / max(total, 1)))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        samples = order[start : start + window]
        samples = samples[np.argsort(lengths[samples], kind="stable")]
        batch: list[int] = []
        tokens = 0
        for index in samples.tolist():
            if batch and tokens + lengths[index] > batch_tokens:
                batches.append(batch)
                batch, tokens = [], 0
            batch.append(index)
            tokens += int(lengths[index])
        batches.append(batch)
    return [batches[i] for i in random.permutation(len(batches))]
