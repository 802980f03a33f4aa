"""The file of a run: everything that was measured, on what, with which settings; written so that it can be resumed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pilotfish.bench.records import Group
from pilotfish.bench.summary import summarise
from pilotfish.errors import ConfigError

__all__ = ["load_groups", "machine_facts", "save", "write_json"]


def machine_facts() -> dict[str, Any]:
    """What the figures depend on, and the settings do not say."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # another system than Linux: the short name will do
    return {"cpu": cpu, "cpus": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def save(path: Path, settings: Mapping[str, Any], groups: Sequence[Group], *, complete: bool) -> None:
    """Write the file, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    content = {
        "settings": dict(settings),
        "machine": machine_facts(),
        "complete": complete,
        "summary": [summary.as_dict() for summary in summarise(groups)],
        "groups": [group.as_dict() for group in groups],
    }
    write_json(path, content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of figures, whole or not at all. ConfigError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"json={str(path)!r}: cannot be written: {error.strerror}") from error


def load_groups(path: Path, settings: Mapping[str, Any]) -> list[Group]:
    """The groups of an earlier run; none if there is no file yet.

    Raises:
        ConfigError: the file is not one of ours, or was measured with other settings or on another machine.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_bytes())
        theirs, machine = content["settings"], content["machine"]
        groups = [Group.from_dict(group) for group in content["groups"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"json={str(path)!r}: is not a file of pilotfish bench: {error!r}") from error
    mine = json.loads(json.dumps(dict(settings)))
    for ours, other in ((mine, theirs), (machine_facts(), machine)):
        for name in sorted({*ours, *other}):
            if ours.get(name) != other.get(name):
                raise ConfigError(
                    f"json={str(path)!r}: was measured with {name}={other.get(name)!r}, this run has "
                    f"{ours.get(name)!r}. Resume with the same settings on the same machine, or choose another file."
                )
    return groups
