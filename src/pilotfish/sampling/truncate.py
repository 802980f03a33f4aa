"""min_p, top_k and top_p on one row of logits, and its n most likely tokens, without sorting the vocabulary.

Sorting 49,152 logits takes milliseconds, a row's nucleus has tens of tokens. The maxima of some 1,024 groups of
logits give a bound: the k-th largest maximum is at most the k-th largest logit, so every logit at or above the bound
is a superset of the top k, found in two passes. All of it is exact, and ties go to the lowest token id.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["top_candidates", "truncate_row"]

_NUM_GROUPS = 1024
_NUCLEUS_SIZES = (64, 1024)
"""Candidates that top_p looks at, until they hold its probability mass; after the last one it sorts the whole row."""

_Row = NDArray[np.float32]
_Ids = NDArray[np.int64]


def top_candidates(row: _Row, count: int, floor: float = -math.inf) -> _Ids:
    """Ids, ascending, of a superset of the ``count`` largest entries of ``row`` [V] that are at least ``floor``.

    The set is everything at or above some value, so its order by value begins with the order of the whole row.
    """
    vocab = len(row)
    if count >= vocab:
        return np.flatnonzero(row >= floor)
    if 4 * count <= _NUM_GROUPS <= vocab:
        width = vocab // _NUM_GROUPS * _NUM_GROUPS
        source = row[:width].reshape(-1, _NUM_GROUPS).max(axis=0)
        tail = vocab - width
        np.maximum(source[:tail], row[width:], out=source[:tail])
    else:
        source = row
    bound = np.partition(source, len(source) - count)[len(source) - count]
    return np.flatnonzero(row >= max(bound, np.float32(floor)))


def truncate_row(row: _Row, *, top_k: int, top_p: float, min_p: float) -> None:
    """Set every entry of ``row`` [V] to -inf that min_p, top_k or top_p drops, in place.

    min_p keeps tokens at least ``min_p`` times as likely as the most likely one; top_k the ``top_k`` most likely of
    those; top_p the smallest set of most likely ones whose probabilities, renormalised over what top_k left, sum to at
    least ``top_p``. At least one token stays. A row whose maximum is not finite (NaN logits) is left alone.

    Args:
        row: logits, already divided by the temperature.
        top_k: 0 or less keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
    """
    peak = row.max()
    if not np.isfinite(peak):
        return
    floor = float(peak) + math.log(min_p) if min_p > 0.0 else -math.inf
    count = top_k if 0 < top_k < len(row) else len(row)
    if count == len(row) and top_p >= 1.0:
        row[row < floor] = -np.inf
        return
    if count < len(row):
        ids = top_candidates(row, count, floor)
        ordered = np.sort(row[ids])[::-1][:count]
        if top_p < 1.0:
            mass = _cumulative_mass(ordered, peak)
            ordered = ordered[: _nucleus_size(mass, top_p * mass[-1])]
    else:
        ids, ordered = _nucleus(row, peak, top_p, floor)
    _keep(row, ids, ordered)


def _nucleus(row: _Row, peak: np.float32, top_p: float, floor: float) -> tuple[_Ids, _Row]:
    """Candidates' ids, and the values of the nucleus in descending order."""
    weights = np.exp(row - peak)
    if floor > -math.inf:
        weights[row < floor] = 0.0
    goal = top_p * float(weights.sum(dtype=np.float64))
    for size in (*_NUCLEUS_SIZES, len(row)):
        ids = top_candidates(row, size, floor)
        ordered = np.sort(row[ids])[::-1]
        mass = _cumulative_mass(ordered, peak)
        if mass[-1] >= goal:
            break
    return ids, ordered[: _nucleus_size(mass, goal)]


def _cumulative_mass(ordered: _Row, peak: np.float32) -> NDArray[np.float64]:
    return np.cumsum(np.exp(ordered - peak), dtype=np.float64)


def _nucleus_size(mass: NDArray[np.float64], goal: float) -> int:
    return int(np.searchsorted(mass, goal, side="left")) + 1  # one past the end is harmless: it slices


def _keep(row: _Row, ids: _Ids, ordered: _Row) -> None:
    """Leave only the candidates ``ids`` whose values are in ``ordered``, the lowest ids among equals."""
    values = row[ids]
    last = ordered[-1]
    kept = values >= last
    surplus = int(np.count_nonzero(kept)) - len(ordered)
    if surplus > 0:
        kept[np.flatnonzero(values == last)[-surplus:]] = False
    row.fill(-np.inf)
    row[ids[kept]] = values[kept]
