"""The draft vocabulary: the slice of the target's tokens that a head can draft.

Below about a billion parameters the output layer is most of a draft's cost (FR-Spec, arXiv:2502.14856), and a target
writes most of its text with a fraction of its vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pilotfish.errors import ConfigError
from pilotfish.training.store import CaptureReader

__all__ = ["draft_vocabulary"]


def draft_vocabulary(reader: CaptureReader, size: int, vocab_size: int, forced: Iterable[int]) -> Tensor | None:
    """The ``size`` tokens to draft: those that the target wrote most often.

    Where the capture has fewer of these, tokens that prompts have most often follow, then those of the lowest ids.

    Args:
        reader: captured text.
        size: D; 0: the whole vocabulary.
        vocab_size: V, the target's.
        forced: ids that are in it however rare: ends of sequences and other special tokens.

    Returns:
        int64 [D], ascending; None for the whole vocabulary.

    Raises:
        ConfigError: ``size`` is negative, above V, or has no room for ``forced``.
    """
    forced = sorted({token_id for token_id in forced if token_id < vocab_size})
    if not 0 <= size <= vocab_size:
        raise ConfigError(f"draft_vocab={size}: must be from 0 (all tokens) to the target's vocabulary of {vocab_size}")
    if size in (0, vocab_size):
        return None
    if size < len(forced):
        raise ConfigError(f"draft_vocab={size}: has no room for the {len(forced)} special tokens that must be in it")
    written, given = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for index in range(len(reader)):
        tokens, mask = reader.token_ids(index), reader.loss_mask(index).astype(bool)
        written += np.bincount(tokens[mask], minlength=vocab_size)
        given += np.bincount(tokens[~mask], minlength=vocab_size)
    first = np.zeros(vocab_size, bool)
    first[forced] = True
    # lexsort: the last key decides first; equal ones keep the order of ids.
    order = np.lexsort((-given, -written, ~first))
    return torch.from_numpy(np.sort(order[:size]).astype(np.int64))
