"""Logits to the distribution that a token is drawn from, one row at a time.

Rows are processed on the host with NumPy, in place where the logits are CPU memory: at one row of some 50,000 logits
a call's overhead counts as much as its work, and a row's bits cannot depend on the other rows. The order is vLLM's:
constraint, min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.sampling.state import Constraint, LogitsRow
from pilotfish.sampling.truncate import truncate_row

__all__ = ["choose", "edit_row", "process_logits", "scale_row", "softmax_probs"]

_Row = NDArray[np.float32]

_MAX_PENALTY = 1e37
"""Of repetition, or one over it: in float32, the penalty must become neither infinite nor 0 (0 times -inf is NaN)."""


def process_logits(logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
    """Apply every sampling parameter to each row of logits.

    Softmax of the result is the distribution a token is drawn from; dropped tokens are -inf. A greedy row (temperature
    0) is neither scaled nor truncated: its token is the argmax.

    Args:
        logits: float32 [R, V], overwritten where it is CPU memory.
        rows: [R], the place of each row. Drafts before a row count as its history.

    Returns:
        float32 [R, V], on the logits' device. Rows without any processing are not touched.
    """
    for i, row in enumerate(rows):
        plain = row.state.inverse_temperature in (0.0, 1.0) and not row.state.truncates
        if plain and not row.edits:
            continue
        values = logits[i].detach().cpu().numpy()
        if row.edits:
            edit_row(values, row)
        if not plain:
            scale_row(values, row)
        if logits.device.type != "cpu":
            logits[i] = torch.from_numpy(values)
    return logits


def edit_row(values: _Row, row: LogitsRow) -> None:
    """Apply the constraint, min_tokens, logit_bias and the penalties to ``values`` [V], in place."""
    state = row.state
    if state.constraint is not None:
        allowed = _allowed(state.constraint, row)
        np.copyto(values, -np.inf, where=~allowed)
    elif row.holds_stops:
        values[state.banned_ids] = -np.inf
    if len(state.bias_ids):
        values[state.bias_ids] += state.bias_values
    if state.counts is not None:
        ids, counts = state.counts.seen(row.drafts)
        values[ids] = _penalised(values[ids], counts, row)
    if state.constraint is not None and values.max() == -np.inf:
        # Nothing is left: a draft does not know what is allowed, or a penalty is absurd. All that is allowed is equal.
        values[allowed] = 0.0


def _allowed(constraint: Constraint, row: LogitsRow) -> NDArray[np.bool_]:
    """What the constraint allows, without what ``min_tokens`` holds back as long as that leaves anything."""
    allowed = constraint.allowed(row.drafts)
    if row.holds_stops:
        held = allowed.copy()
        held[row.state.banned_ids] = False
        if held.any():
            return held
    return allowed


def _penalised(logits: _Row, counts: _Row, row: LogitsRow) -> _Row:
    params = row.state.params
    seen = logits
    if params.repetition_penalty != 1.0:
        penalty = np.float32(min(max(params.repetition_penalty, 1.0 / _MAX_PENALTY), _MAX_PENALTY))
        with np.errstate(over="ignore"):  # an absurd penalty gives infinities, which choose as they should
            seen = np.where(seen > 0, seen / penalty, seen * penalty).astype(np.float32, copy=False)
    if params.frequency_penalty != 0.0:
        seen = seen - np.float32(params.frequency_penalty) * counts
    if params.presence_penalty != 0.0:
        seen = seen - np.float32(params.presence_penalty) * (counts > 0).astype(np.float32)
    return seen


def scale_row(values: _Row, row: LogitsRow) -> None:
    """Apply temperature, min_p, top_k and top_p to ``values`` [V], in place. Not for greedy rows."""
    state = row.state
    values *= np.float32(state.inverse_temperature)
    if state.truncates:
        truncate_row(values, top_k=state.params.top_k, top_p=state.params.top_p, min_p=state.params.min_p)


def softmax_probs(processed: Tensor, rows: Sequence[LogitsRow] | None = None) -> Tensor:
    """Probabilities of processed logits: float32 [R, V] -> float32 [R, V], rows summing to 1.

    With ``rows``, a greedy row is one-hot at its argmax (the lowest id among equals).
    """
    probs = np.empty(processed.shape, np.float32)
    for i, values in enumerate(processed.detach().cpu().numpy()):
        if rows is not None and rows[i].state.greedy:
            probs[i] = 0.0
            probs[i, np.argmax(values)] = 1.0
            continue
        # By numpy: torch would wake threads of its own for a row of this size, which compete with the kernels'.
        np.subtract(values, values.max(), out=probs[i])
        np.exp(probs[i], out=probs[i])
        probs[i] /= probs[i].sum()
    return torch.from_numpy(probs).to(processed.device)


def choose(weights: Tensor, u: float) -> int:
    """A token drawn in proportion to ``weights`` [V] by a number in (0, 1): the inverse of their running sum."""
    values = weights.cpu().numpy()
    sums = np.cumsum(values, dtype=np.float64)
    token = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return min(token, int(np.flatnonzero(values)[-1]))  # where rounding reaches the end
