"""Prometheus metrics under vLLM's names with our prefix.

Counters of the engine are read from it when they are asked for, so they cost nothing in between; histograms are filled
when a request ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pilotfish.server.host import EngineHost
from pilotfish.server.stream import RequestStream
from pilotfish.types import RequestStats

__all__ = ["Metrics"]

_PREFIX = "pilotfish:"

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0
)  # fmt: skip
_ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 5.0
)  # fmt: skip
_E2E_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0
)  # fmt: skip


class Metrics:
    """What one server measures, in a registry of its own.

    Args:
        host: of the engine.
        model_name: label of every metric.

    Attributes:
        http_errors: responses with an error's status, by status.
    """

    def __init__(self, host: EngineHost, model_name: str) -> None:
        self._host = host
        self._model_name = model_name
        self._ttft = _Histogram("time_to_first_token_seconds", "From a request's arrival to its first token.",
                                _TTFT_BUCKETS)  # fmt: skip
        self._itl = _Histogram("inter_token_latency_seconds",
                               "Between tokens of a request's first completion; a step's time is divided among its "
                               "tokens.", _ITL_BUCKETS)  # fmt: skip
        self._e2e = _Histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _E2E_BUCKETS)
        self._finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.http_errors: Counter[int] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self))
        ProcessCollector(registry=self._registry)
        host.on_close.append(self.observe)

    def observe(self, stream: RequestStream) -> None:
        """Take in a request that has ended, however it did."""
        output = stream.output
        if output is not None:
            stats = output.stats
            if stats.first_token_time is not None:
                self._ttft.observe(stats.first_token_time - stream.submit_time)
            for gap, count in token_gaps(stats):
                self._itl.observe(gap, count)
        if stream.error is not None or output is None:
            cancelled = getattr(stream.error, "status", None) == 499
            self._finished["abort" if cancelled else "error"] += 1
            return
        if output.stats.last_token_time is not None:
            self._e2e.observe(output.stats.last_token_time - stream.submit_time)
        for c in output.outputs:
            self._finished[c.finish_reason or "abort"] += 1

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric as it is now."""
        stats, load = self._host.stats, self._host.load
        speculation = stats.speculation
        yield self._counter("spec_decode_num_drafts", "Steps that verified drafts.", speculation.num_steps)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", speculation.num_drafted)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.", speculation.num_accepted)
        yield self._counters("spec_decode_num_accepted_tokens_per_pos",
                             "Drafts accepted, by their position in the proposal.", "position",
                             dict(enumerate(speculation.accepted_at)))  # fmt: skip
        yield self._gauge("num_requests_running", "Sequences in the engine's steps.", load.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for a place.", load.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 is all.", load.kv_usage)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_generation_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_cache_hits)
        yield self._counter("num_preemptions", "Sequences that lost their pages.", stats.num_preemptions)
        yield self._counter("engine_steps", "Forward passes of the target.", stats.num_steps)
        yield self._counter("engine_restarts", "Engines built after a failure.", self._host.num_restarts)
        yield self._counters("request_success", "Completions by why they ended, and requests that failed.",
                             "finished_reason", self._finished)  # fmt: skip
        yield self._counters("http_errors", "Responses with an error's status.", "status", self.http_errors)
        for histogram in (self._ttft, self._itl, self._e2e):
            yield histogram.family(self._model_name)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, str(key)], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def token_gaps(stats: RequestStats) -> Iterator[tuple[float, int]]:
    """(seconds a token, tokens) of each step after the first that gave completion 0 tokens."""
    last, count = None, 0
    previous: float | None = None
    for now in [*stats.token_times, None]:
        if now == last:
            count += 1
            continue
        if last is not None:
            if previous is not None:
                yield (last - previous) / count, count
            previous = last
        last, count = now, 1


class _EngineCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()


class _Histogram:
    """Counts by bucket. Only the event loop's thread touches it, so it needs no lock."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, model_name: str) -> Metric:
        buckets, total = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(f"{_PREFIX}{self._name}", self._text, labels=["model_name"])
        family.add_metric([model_name], buckets, self._sum)
        return family
