"""Log-probabilities of one position, in any of vLLM's ``logprobs_mode``s."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pilotfish.sampling.truncate import top_candidates
from pilotfish.types import Logprob

__all__ = ["row_logprobs"]


def row_logprobs(values: NDArray[np.float32], token_id: int, top_n: int, *, normalise: bool) -> dict[int, Logprob]:
    """The chosen token first, then the ``top_n`` most likely tokens in order, the lowest id first among equals.

    Args:
        values: logits [V], -inf for dropped tokens, which are never listed.
        token_id: the chosen token; listed in any case.
        top_n: how many others; 0 lists the chosen token alone.
        normalise: report log-probabilities; else the logits themselves.

    Returns:
        Token id -> :class:`Logprob`, ``top_n`` or ``top_n + 1`` entries. All values are NaN where the logits are.
    """
    shift = _log_sum_exp(values) if normalise else 0.0
    chosen = values[token_id]
    above = np.count_nonzero(values > chosen) + np.count_nonzero(values[:token_id] == chosen)
    result = {token_id: Logprob(float(chosen) - shift, int(above) + 1)}
    if top_n > 0:
        ids = top_candidates(values, top_n)
        ids = ids[np.argsort(-values[ids], kind="stable")][:top_n]  # stable: ids ascend, so the lowest comes first
        for rank, token in enumerate(ids.tolist(), start=1):
            if values[token] > -np.inf:
                result.setdefault(token, Logprob(float(values[token]) - shift, rank))
    return result


def _log_sum_exp(values: NDArray[np.float32]) -> float:
    peak = values.max()
    if not np.isfinite(peak):
        return float(peak)
    return float(peak) + float(np.log(np.exp(values - peak).sum(dtype=np.float64)))
