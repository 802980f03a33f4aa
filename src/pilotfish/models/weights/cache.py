"""The cache of converted GGUF files: one folder for each (file content, dtype, converter version).

Two processes may convert the same file at once: each writes a folder of its own and renames it; the second to finish
finds the place taken and drops its copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pilotfish.errors import CheckpointError

__all__ = ["cache_root", "cached_folder", "file_sha256"]

_LEFTOVER_AGE_S = 24 * 3600
"""No conversion takes a day: an unfinished folder of that age has no process behind it."""


def cache_root() -> Path:
    """``$PILOTFISH_CACHE``, else ``$XDG_CACHE_HOME/pilotfish``, else ``~/.cache/pilotfish``."""
    own = os.environ.get("PILOTFISH_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pilotfish"


def cached_folder(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``, filling it first if it does not exist.

    Args:
        folder: its final place.
        fill: writes the content into the empty folder that it is given.

    Raises:
        CheckpointError: the cache cannot be written; whatever ``fill`` raises.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fill(scratch)
            _rename_unless_taken(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the converted model cannot be written to the cache folder {folder}: {error}. Set PILOTFISH_CACHE to "
            "another folder, or load without the cache (use_cache=False, --no-cache)"
        ) from error
    return folder


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while converting have left."""
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it too, or has just finished
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE_S:
                shutil.rmtree(leftover, ignore_errors=True)


def _rename_unless_taken(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def file_sha256(path: Path, memo_folder: Path) -> str:
    """SHA-256 of a file's content in hex, remembered until the file changes.

    Hashing takes seconds for a model of several GB. The memo is believed while the file's device, inode, size and
    modification and change times are the same.
    """
    stat = path.stat()
    identity = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    memo_file = memo_folder / f"{place}.json"
    try:
        memo = json.loads(memo_file.read_text(encoding="utf-8"))
        if memo["identity"] == identity:
            return str(memo["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or not ours: hash again
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _write_memo(memo_file, {"identity": identity, "sha256": digest})
    return digest


def _write_memo(memo_file: Path, memo: dict[str, object]) -> None:
    try:
        memo_file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo_file.parent, delete=False, encoding="utf-8") as file:
            json.dump(memo, file)
        os.replace(file.name, memo_file)
    except OSError:
        pass  # the memo only saves time
