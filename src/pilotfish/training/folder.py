"""Folders that are written to, checked before anything is computed for them."""

from __future__ import annotations

from pathlib import Path

from pilotfish.errors import ConfigError

__all__ = ["check_folder"]


def check_folder(out: Path) -> None:
    """See that ``out`` is a folder or can become one.

    Raises:
        ConfigError: it is a file, or would lie in one.
    """
    there = next(path for path in (out, *out.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(
            f"out={str(out)!r}: must be a folder, or the name of a new one; {there} is a file. Choose another"
        )
