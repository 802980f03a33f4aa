"""From measured groups to the figures of a table: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pilotfish.bench.records import Group, Measured, Run
from pilotfish.bench.run import BASELINE

__all__ = ["OVERALL", "Summary", "percentile", "summarise"]

OVERALL = "overall"
"""The category of the figures over all categories."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One scheme at one batch size over one category, or over all.

    Attributes:
        batch: requests at once.
        category: or :data:`OVERALL`.
        scheme: the scheme's name.
        num_requests: requests measured.
        num_tokens: tokens that they got.
        tokens_per_second: output tokens over wall time, prompts included.
        ratio: ``tokens_per_second`` over that of ``none`` in the same groups; None without ``none``.
        tokens_per_step: tokens over steps, those without a draft included.
        mean_accepted_length: tokens over steps that verified a draft, bonus included; None if there was none.
        acceptance: drafts accepted over drafts proposed; None if there was none.
        acceptance_by_position: how often the draft at each position was accepted, of the times there was one.
        ttft_ms_p50: median time to the first token, in milliseconds.
        itl_ms_p50: median time between arrivals of tokens, in milliseconds. Tokens of one step arrive together.
        itl_ms_p99: the 99th percentile of it.
        num_identical: requests whose tokens are those of ``none``; None without ``none``.
        exact: False where verification was lossy: these are figures of other output than the target's.
    """

    batch: int
    category: str
    scheme: str
    num_requests: int
    num_tokens: int
    tokens_per_second: float
    ratio: float | None
    tokens_per_step: float
    mean_accepted_length: float | None
    acceptance: float | None
    acceptance_by_position: list[float]
    ttft_ms_p50: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    num_identical: int | None
    exact: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return asdict(self)


def summarise(groups: Sequence[Group]) -> list[Summary]:
    """Per batch size: overall, then each category; within each, the schemes in the order of their runs."""
    summaries = []
    for batch in dict.fromkeys(group.batch for group in groups):
        of_batch = [group for group in groups if group.batch == batch]
        for category in (OVERALL, *dict.fromkeys(group.category for group in of_batch)):
            chosen = [group for group in of_batch if category in (OVERALL, group.category)]
            runs: dict[str, list[Run]] = {}
            for group in chosen:
                for run in group.runs:
                    runs.setdefault(run.scheme, []).append(run)
            plain = _speed(runs[BASELINE]) if BASELINE in runs else None
            summaries += [_summary(batch, category, scheme, own, plain) for scheme, own in runs.items()]
    return summaries


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of the values do not exceed; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _summary(batch: int, category: str, scheme: str, runs: Sequence[Run], plain: float | None) -> Summary:
    requests = [request for run in runs for request in run.requests]
    speed = _speed(runs)
    num_tokens = sum(request.num_tokens for request in requests)
    draft_steps = sum(request.num_draft_steps for request in requests)
    drafted = sum(request.num_drafted for request in requests)
    arrivals = [gap for request in requests for gap in request.arrivals_ms]
    known = [request.identical for request in requests if request.identical is not None]
    return Summary(
        batch=batch,
        category=category,
        scheme=scheme,
        num_requests=len(requests),
        num_tokens=num_tokens,
        tokens_per_second=speed,
        ratio=speed / plain if plain else None,
        tokens_per_step=num_tokens / max(sum(request.num_steps for request in requests), 1),
        mean_accepted_length=sum(r.num_draft_tokens for r in requests) / draft_steps if draft_steps else None,
        acceptance=sum(r.num_accepted for r in requests) / drafted if drafted else None,
        acceptance_by_position=_by_position(requests),
        ttft_ms_p50=percentile([request.ttft_ms for request in requests], 0.5),
        itl_ms_p50=percentile(arrivals, 0.5),
        itl_ms_p99=percentile(arrivals, 0.99),
        num_identical=sum(known) if known else None,
        exact=all(request.exact for request in requests),
    )


def _speed(runs: Sequence[Run]) -> float:
    """Tokens a second."""
    return sum(r.num_tokens for run in runs for r in run.requests) / max(sum(run.seconds for run in runs), 1e-9)


def _by_position(requests: Iterable[Measured]) -> list[float]:
    drafted: list[int] = []
    accepted: list[int] = []
    for request in requests:
        missing = len(request.drafted_at) - len(drafted)
        drafted += [0] * missing
        accepted += [0] * missing
        for position, (d, a) in enumerate(zip(request.drafted_at, request.accepted_at, strict=True)):
            drafted[position] += d
            accepted[position] += a
    return [a / d for a, d in zip(accepted, drafted, strict=True)]
