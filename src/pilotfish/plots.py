"""Figures of matplotlib as files; matplotlib is optional, and no dependency of the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "save_figure"]


def check_plot(path: Path) -> None:
    """Find out before a long run, not after it, that its plot cannot be drawn.

    Raises:
        ConfigError: matplotlib is missing, or it does not write files of that ending.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError(
            f"plot={str(path)!r}: needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in endings:
        raise ConfigError(f"plot={str(path)!r}: must end in one of .{', .'.join(endings)}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the path's ending names.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r}: cannot be written: {error.strerror}") from error
