"""A run's state on disk: everything that a resumed run needs to give what an uninterrupted one gives."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotfish.errors import CheckpointError, ConfigError

__all__ = ["LOG_FILE", "STATE_FILE", "Progress", "cut_log", "load_state", "save_state"]

LOG_FILE = "log.jsonl"
STATE_FILE = "training.pt"
_VERSION = 1


@dataclass(slots=True)
class Progress:
    """Where a run is.

    Attributes:
        step: optimizer steps done.
        epoch: from 0.
        batch: batches of this epoch that are done, on each process.
        seconds: of training.
        tokens: captured tokens seen, prompts included, over all processes.
        supervised: those of them to be learnt.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    supervised: int = 0


def save_state(
    out: Path,
    identity: Mapping[str, Any],
    progress: Progress,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write it; whoever reads meanwhile gets a whole file.

    Args:
        out: the run's folder.
        identity: what must be the same for a run that goes on with it.
        progress: so far.
        parameters: by name.
        optimizer: over them.
    """
    content = {
        "version": _VERSION,
        "identity": dict(identity),
        "progress": asdict(progress),
        "parameters": {name: tensor.detach() for name, tensor in parameters.items()},
        "optimizer": optimizer.state_dict(),
        "generator": torch.get_rng_state(),
    }
    scratch = out / f"{STATE_FILE}.writing"
    torch.save(content, scratch)
    os.replace(scratch, out / STATE_FILE)


def load_state(
    out: Path, identity: Mapping[str, Any], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Progress:
    """Read it into ``parameters`` and ``optimizer``, in place.

    Raises:
        ConfigError: there is none, or it is of a run with another identity: names what differs.
        CheckpointError: it cannot be read.
    """
    file = out / STATE_FILE
    if not file.is_file():
        raise ConfigError(f"resume=True: {out} holds no {STATE_FILE} to go on from")
    try:
        content = torch.load(file, weights_only=True)
        version = content["version"]
    except Exception as error:  # whatever unpickling raises
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if version != _VERSION:
        raise CheckpointError(f"{file}: version={version!r}: this Pilotfish reads version {_VERSION}")
    theirs = content["identity"]
    for name, value in identity.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"resume=True: the run in {out} has {name}={theirs.get(name)!r}, and {name}={value!r} was asked for: "
                "give the same, or train anew into another folder"
            )
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(content["parameters"][name])
    optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["generator"])
    return Progress(**content["progress"])


def cut_log(file: Path, step: int) -> None:
    """Drop what was logged after the saved state: it is computed again."""
    if not file.is_file():
        return
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= step]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
