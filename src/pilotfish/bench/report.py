"""Figures as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from pilotfish.bench.run import BASELINE
from pilotfish.bench.summary import OVERALL, Summary
from pilotfish.plots import check_plot, save_figure

__all__ = ["draw", "scheme_label", "table"]

_COLUMNS = ("tokens/s", "ratio", "tokens/step", "mean length", "accepted", "TTFT ms", "ITL p50", "ITL p99", "identical")


def table(summaries: Sequence[Summary]) -> Table:
    """One line a batch size, category and scheme."""
    result = Table(title="speculation, in turn within one run")
    result.add_column("batch", justify="right")
    result.add_column("category")
    result.add_column("scheme")
    for name in _COLUMNS:
        result.add_column(name, justify="right")
    before: tuple[int, str] | None = None
    for item in summaries:
        place = (item.batch, item.category)
        if before is not None and place != before:
            result.add_section()
        head = (str(item.batch), item.category) if place != before else ("", "")
        before = place
        result.add_row(*head, scheme_label(item), *_cells(item), style="bold" if item.category == OVERALL else None)
    return result


def scheme_label(item: Summary) -> str:
    """The scheme's name, and what must not be overlooked about it."""
    return item.scheme if item.exact else f"{item.scheme} (LOSSY)"


def _cells(item: Summary) -> list[str]:
    return [
        f"{item.tokens_per_second:.1f}",
        _number(item.ratio, ".2f"),
        f"{item.tokens_per_step:.2f}",
        _number(item.mean_accepted_length, ".2f"),
        _number(item.acceptance, ".0%"),
        _number(item.ttft_ms_p50, ".0f"),
        _number(item.itl_ms_p50, ".1f"),
        _number(item.itl_ms_p99, ".1f"),
        "-" if item.num_identical is None else f"{item.num_identical}/{item.num_requests}",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Speedups over ``none`` (without it: tokens/s) by category, one panel a batch size.

    Raises:
        ConfigError: as :func:`pilotfish.plots.check_plot`, or the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    batches = list(dict.fromkeys(item.batch for item in summaries))
    schemes = list(dict.fromkeys(item.scheme for item in summaries))
    relative = any(item.ratio is not None for item in summaries)
    shown = [scheme for scheme in schemes if scheme != BASELINE] if relative and len(schemes) > 1 else schemes
    categories = list(dict.fromkeys(item.category for item in summaries))
    figure = Figure(figsize=(max(6.0, 0.9 * len(categories) + 2), 3.2 * len(batches)), layout="constrained")
    for number, batch in enumerate(batches, start=1):
        axes = figure.add_subplot(len(batches), 1, number)
        width = 0.8 / len(shown)
        for i, scheme in enumerate(shown):
            values = {item.category: item for item in summaries if item.batch == batch and item.scheme == scheme}
            heights = [(values[c].ratio if relative else values[c].tokens_per_second) or 0.0 for c in values]
            places = [categories.index(c) + (i - (len(shown) - 1) / 2) * width for c in values]
            axes.bar(places, heights, width, label=scheme_label(next(iter(values.values()))))
        if relative:
            axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
        axes.set_ylabel(f"tokens/s, relative to {BASELINE}" if relative else "tokens/s")
        axes.set_title(f"batch {batch}")
        axes.legend()
    save_figure(figure, path)
