"""What is measured of a server, and the figures that follow from it: pure functions. Times are in milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pilotfish.bench.summary import percentile

__all__ = ["Latencies", "Level", "LevelSummary", "Served"]


@dataclass(slots=True)
class Served:
    """One request, as its client saw it.

    Attributes:
        name: of its prompt.
        error: what went wrong, such as "HTTP 503" or "timeout"; None if it was answered to its end.
        message: what the server or the network said of the error.
        ttft_ms: from its arrival to its first token.
        e2e_ms: from its arrival to its end.
        itl_ms: inter-token latencies. The wait for a chunk is shared by its tokens, which come together. Of a server
            that does not say how many tokens a chunk holds: the waits between chunks.
        num_prompt_tokens: by the server's ``usage``.
        num_cached_tokens: of them, found in its prefix cache.
        num_tokens: of the output, by ``usage``; counted from chunks where there is none.
        finish_reason: of the output.
        stats: a Pilotfish server's own figures.
    """

    name: str
    error: str | None = None
    message: str = ""
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    itl_ms: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    stats: dict[str, Any] | None = None


@dataclass(slots=True)
class Level:
    """Requests at one load.

    Attributes:
        concurrency: most requests at once; None: no limit.
        rate: mean arrivals a second, as a Poisson process; None: each request starts when another ends.
        seconds: from the first arrival to the last end, or to Ctrl-C.
        requests: those that ended, in the order of their ends.
        complete: whether Ctrl-C left the level alone.
    """

    concurrency: int | None
    rate: float | None = None
    seconds: float = 0.0
    requests: list[Served] = field(default_factory=list)
    complete: bool = False

    @property
    def label(self) -> str:
        """Such as "16" or "4/s, at most 16"."""
        if self.rate is None:
            return str(self.concurrency)
        return f"{self.rate:g}/s" + ("" if self.concurrency is None else f", at most {self.concurrency}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles; None of nothing."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Latencies:
        return cls(percentile(values, 0.5), percentile(values, 0.95), percentile(values, 0.99))


@dataclass(frozen=True, slots=True)
class LevelSummary:
    """One line of the table. All but ``errors`` is of requests that were answered to their ends.

    Attributes:
        label: of the level.
        num_requests: answered.
        num_tokens: that they got.
        requests_per_second: answered, over the level's time.
        tokens_per_second: output tokens, over the level's time.
        ttft_ms: time to the first token.
        itl_ms: inter-token latency: see :class:`Served`.
        e2e_ms: time to the end.
        mean_accepted_length: tokens over steps that verified a draft, bonus included; None where the server says none.
        acceptance: drafts accepted over drafts proposed; None where the server says none.
        cached_share: prompt tokens that the prefix cache had, of all prompt tokens.
        errors: how many of each kind.
        complete: whether Ctrl-C left the level alone.
    """

    label: str
    num_requests: int
    num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    ttft_ms: Latencies
    itl_ms: Latencies
    e2e_ms: Latencies
    mean_accepted_length: float | None
    acceptance: float | None
    cached_share: float | None
    errors: dict[str, int]
    complete: bool

    @classmethod
    def of(cls, level: Level) -> LevelSummary:
        answered = [request for request in level.requests if request.error is None]
        seconds = max(level.seconds, 1e-9)
        num_tokens = sum(request.num_tokens for request in answered)
        num_prompt_tokens = sum(request.num_prompt_tokens for request in answered)
        stats = [request.stats for request in answered if request.stats is not None]
        steps, drafted = _total(stats, "num_steps"), _total(stats, "num_drafted")
        return cls(
            label=level.label,
            num_requests=len(answered),
            num_tokens=num_tokens,
            requests_per_second=len(answered) / seconds,
            tokens_per_second=num_tokens / seconds,
            ttft_ms=Latencies.of([request.ttft_ms for request in answered if request.ttft_ms is not None]),
            itl_ms=Latencies.of([gap for request in answered for gap in request.itl_ms]),
            e2e_ms=Latencies.of([request.e2e_ms for request in answered]),
            mean_accepted_length=_total(stats, "num_emitted") / steps if steps else None,
            acceptance=_total(stats, "num_accepted") / drafted if drafted else None,
            cached_share=(
                sum(request.num_cached_tokens for request in answered) / num_prompt_tokens
                if num_prompt_tokens
                else None
            ),
            errors=dict(Counter(request.error for request in level.requests if request.error is not None)),
            complete=level.complete,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return asdict(self)


def _total(stats: Sequence[dict[str, Any]], name: str) -> int:
    return sum(int(item.get(name, 0)) for item in stats)
