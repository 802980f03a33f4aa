"""The curves of a training run, from its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pilotfish.errors import ConfigError
from pilotfish.plots import check_plot, save_figure

__all__ = ["draw_log"]

_SMOOTHING = 0.05
"""Share of the run's steps that a point of the smoothed curves is a mean of."""


def draw_log(log: Path, path: Path) -> None:
    """Draw loss and accuracy of each draft over the steps.

    Args:
        log: a run's ``log.jsonl``.
        path: of the figure.

    Raises:
        ConfigError: as :func:`pilotfish.plots.check_plot`; the log cannot be read or has no steps; the figure cannot be
            written.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    try:
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{log}: cannot be read as the log of a run: {error}") from error
    steps = [entry for entry in entries if "loss" in entry]
    validations = [entry for entry in entries if "validation" in entry]
    if not steps:
        raise ConfigError(f"{log}: has no steps to draw")
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = [entry["step"] for entry in steps]
    left.plot(x, [entry["loss"] for entry in steps], color="0.8", linewidth=0.7)
    left.plot(x, _smoothed([entry["loss"] for entry in steps]), label="loss")
    for k in range(len(steps[0]["divergence"])):
        left.plot(x, _smoothed([entry["divergence"][k] for entry in steps]), linewidth=0.9, label=f"KL, draft {k + 1}")
    left.set_yscale("log")
    for k in range(len(steps[0]["accuracy"])):
        (line,) = right.plot(x, _smoothed([entry["accuracy"][k] for entry in steps]), label=f"draft {k + 1}")
        if validations:
            right.plot(
                [entry["step"] for entry in validations],
                [entry["validation"]["accuracy"][k] for entry in validations],
                linestyle="none",
                marker="o",
                color=line.get_color(),
            )
    right.set_title("top-1 accuracy" + (" (dots: held-out samples)" if validations else ""))
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.legend()
    save_figure(figure, path)


def _smoothed(values: list[Any]) -> list[float]:
    """Means over a window that ends at each step."""
    window = max(1, round(len(values) * _SMOOTHING))
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(0, i + 1 - window) for i in range(len(values))]
    return [(sums[i + 1] - sums[start]) / (i + 1 - start) for i, start in enumerate(starts)]
