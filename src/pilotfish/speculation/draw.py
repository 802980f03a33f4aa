"""Choosing drafts as the target chooses its tokens: for every scheme whose drafts come from logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pilotfish.ops import Ops
from pilotfish.sampling import LogitsRow, process_logits, sample, softmax_probs

__all__ = ["draw"]


def draw(logits: Tensor, rows: Sequence[LogitsRow], ops: Ops, *, with_probs: bool) -> tuple[list[int], Tensor | None]:
    """A draft for each row: the same processing with the same history and the same noise as the target's token.

    Args:
        logits: the draft's, over the target's vocabulary, float32 [R, V]; may be overwritten.
        rows: [R].
        ops: give the sampler's argmax.
        with_probs: wanted for rejection.

    Returns:
        The drafts, and the distributions that they were drawn from, float32 [R, V], or None. No log-probabilities are
        made, whatever the requests ask: nobody reads those of drafts.
    """
    probs = softmax_probs(process_logits(logits.clone(), rows), rows) if with_probs else None
    return sample(logits, rows, ops, logprobs_mode=None).token_ids, probs
