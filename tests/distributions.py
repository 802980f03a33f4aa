"""Is this sample from that distribution? Chi-square and total variation, for tests with a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)

MIN_EXPECTED = 5.0
"""Cells expected to be rarer than this are counted together: chi-square is an approximation for large counts."""


def chi_square(counts: Mapping[Outcome, int], expected: Mapping[Outcome, float]) -> tuple[float, float]:
    """Pearson's statistic of ``counts`` against probabilities, and the value that it exceeds once in 10,000 times.

    An outcome that has no probability gives an infinite statistic.
    """
    total = sum(counts.values())
    if any(count and expected.get(outcome, 0.0) <= 0.0 for outcome, count in counts.items()):
        return math.inf, 0.0
    cells: list[tuple[float, float]] = []
    rare_seen, rare_expected = 0.0, 0.0
    for outcome, probability in expected.items():
        seen, wanted = counts.get(outcome, 0), probability * total
        if wanted >= MIN_EXPECTED:
            cells.append((seen, wanted))
        else:
            rare_seen, rare_expected = rare_seen + seen, rare_expected + wanted
    if rare_expected >= MIN_EXPECTED:
        cells.append((rare_seen, rare_expected))
    assert len(cells) > 1, "nothing to compare: draw more"
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return statistic, _critical_value(len(cells) - 1)


def total_variation(counts: Mapping[Outcome, int], expected: Mapping[Outcome, float]) -> float:
    """Half the sum of the differences between relative frequencies and probabilities: 0 equal, 1 disjoint."""
    total = sum(counts.values())
    outcomes = {*counts, *expected}
    return sum(abs(counts.get(o, 0) / total - expected.get(o, 0.0)) for o in outcomes) / 2


def fits(counts: Mapping[Outcome, int], expected: Mapping[Outcome, float]) -> bool:
    """Whether both tests take ``counts`` for a sample of ``expected``.

    Total variation of a true sample is about half the sum of the cells' standard errors; three times that is far off.
    """
    assert abs(sum(expected.values()) - 1.0) < 1e-4
    statistic, critical = chi_square(counts, expected)
    total = sum(counts.values())
    noise = sum(math.sqrt(p * (1 - p) / total) for p in expected.values()) / 2
    return statistic < critical and total_variation(counts, expected) < 3 * noise


def _critical_value(freedom: int) -> float:
    """Of chi-square at 1e-4, by Wilson and Hilferty's approximation."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
