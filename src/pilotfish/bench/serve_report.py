"""Figures of a server as a table, a file and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pilotfish.bench.results import machine_facts, write_json
from pilotfish.bench.serve_records import Latencies, Level, LevelSummary
from pilotfish.plots import check_plot, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_levels", "levels_table", "save_levels"]

_COLUMNS = (
    "requests", "requests/s", "tokens/s", "TTFT ms\np50 / p95 / p99", "ITL ms\np50 / p95 / p99", "e2e s\np50 / p95",
    "mean\nlength", "accepted", "cached", "errors",
)  # fmt: skip


def levels_table(summaries: Sequence[LevelSummary], title: str) -> Table:
    """One line a level. ITL: the wait for a chunk, shared by its tokens."""
    table = Table(title=title)
    table.add_column("load", justify="right")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for item in summaries:
        table.add_row(
            item.label + ("" if item.complete else " (stopped)"),
            str(item.num_requests),
            f"{item.requests_per_second:.2f}",
            f"{item.tokens_per_second:.1f}",
            _three(item.ttft_ms, ".0f"),
            _three(item.itl_ms, ".1f"),
            " / ".join(_number(v, ".2f", 1e-3) for v in (item.e2e_ms.p50, item.e2e_ms.p95)),
            _number(item.mean_accepted_length, ".2f"),
            _number(item.acceptance, ".0%"),
            _number(item.cached_share, ".0%"),
            ", ".join(f"{kind}: {count}" for kind, count in item.errors.items()) or "0",
        )
    return table


def save_levels(path: Path, settings: Mapping[str, Any], levels: Sequence[Level], *, complete: bool) -> None:
    """Write everything measured, whole or not at all. ``client`` is this machine, which may not be the server's.

    Raises:
        ConfigError: it cannot be written.
    """
    content = {
        "settings": dict(settings),
        "client": machine_facts(),
        "complete": complete,
        "summary": [LevelSummary.of(level).as_dict() for level in levels],
        "levels": [level.as_dict() for level in levels],
    }
    write_json(path, content)


def draw_levels(summaries: Sequence[LevelSummary], path: Path) -> None:
    """Throughput, time to the first token and inter-token latency by load, side by side.

    Raises:
        ConfigError: as :func:`pilotfish.plots.check_plot`, or the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    labels = [item.label for item in summaries]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    axes[0].plot(labels, [item.tokens_per_second for item in summaries], marker="o")
    axes[0].set_ylabel("output tokens/s")
    _percentiles(axes[1], labels, [item.ttft_ms for item in summaries], "time to first token, ms")
    _percentiles(axes[2], labels, [item.itl_ms for item in summaries], "inter-token latency, ms")
    for one in axes:
        one.set_xlabel("arrivals a second" if any("/s" in label for label in labels) else "requests at once")
        one.set_ylim(bottom=0)
        one.grid(alpha=0.3)
    save_figure(figure, path)


def _percentiles(axes: Axes, labels: Sequence[str], values: Sequence[Latencies], title: str) -> None:
    for name, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
        points = [getattr(item, name) for item in values]
        axes.plot(list(labels), [float("nan") if p is None else p for p in points], style, marker="o", label=name)
    axes.set_ylabel(title)
    axes.legend()


def _three(values: Latencies, form: str) -> str:
    return " / ".join(_number(value, form) for value in (values.p50, values.p95, values.p99))


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)
