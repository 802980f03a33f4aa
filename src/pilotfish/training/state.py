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
from pilotfish.training.folder import check_folder
from pilotfish.training.store import is_capture

__all__ = ["LOG_FILE", "STATE_FILE", "Progress", "check_out", "cut_log", "forget_run", "load_state", "save_state"]

LOG_FILE = "log.jsonl"
STATE_FILE = "training.pt"
_VERSION = 1
_START_ANEW = "A run cannot go on without it: train anew, with --overwrite or into another folder"
_RESULTS = (STATE_FILE, LOG_FILE, "config.json", "model.safetensors")
"""What a run leaves: none of it may be lost by mistake."""


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


def check_out(out: Path, *, resume: bool, overwrite: bool) -> None:
    """See that a run may write to ``out``.

    Raises:
        ConfigError: it is no folder, or holds a run or a model that nobody said to go on with or to replace.
    """
    if resume and overwrite:
        raise ConfigError("resume=True and overwrite=True: a run is either gone on with or replaced; give one of them")
    check_folder(out)
    if is_capture(out):
        raise ConfigError(f"out={str(out)!r}: holds a capture. Choose another folder with --out")
    found = [name for name in _RESULTS if (out / name).exists()]
    if found and not (resume or overwrite):
        raise ConfigError(
            f"out={str(out)!r}: holds {', '.join(found)} already: --resume goes on with that run, --overwrite "
            "replaces it, or choose another folder with --out"
        )


def forget_run(out: Path) -> None:
    """Delete log and state of the run that is replaced, so that nobody resumes what is no longer of one piece."""
    for name in (STATE_FILE, LOG_FILE):
        (out / name).unlink(missing_ok=True)


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
        theirs = dict(content["identity"])
    except Exception as error:  # whatever unpickling raises
        raise CheckpointError(f"{file}: cannot be read: {error}. {_START_ANEW}") from error
    if version != _VERSION:
        raise CheckpointError(f"{file}: version={version!r}: this Pilotfish reads version {_VERSION}")
    for name, value in identity.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"resume=True: the run in {out} has {name}={theirs.get(name)!r}, and {name}={value!r} was asked for: "
                "give the same, or train anew into another folder"
            )
    try:
        return _restore(content, parameters, optimizer)
    except Exception as error:  # a file of parts that may be missing or of any type
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{file}: is damaged: {reason}. {_START_ANEW}") from error


def _restore(
    content: Mapping[str, Any], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Progress:
    with torch.no_grad():
        for name, tensor in parameters.items():
            stored = content["parameters"][name]
            _check_shape(name, stored, tensor)
            tensor.copy_(stored)
    optimizer.load_state_dict(content["optimizer"])
    for parameter, moments in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            _check_shape(name, moments[name], parameter)
    torch.set_rng_state(content["generator"])
    return Progress(**content["progress"])


def _check_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(like.shape)}")


def cut_log(file: Path, step: int) -> None:
    """Drop what was logged after the saved state: it is computed again. So is a last line that was cut off.

    Raises:
        CheckpointError: another line is none of a log; names it.
    """
    if not file.is_file():
        return
    *lines, _ = file.read_bytes().split(b"\n")  # behind the last end of a line is nothing, or half a line
    kept = [line for number, line in enumerate(lines, start=1) if _step_of(line, f"{file}:{number}") <= step]
    file.write_bytes(b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes, place: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{place}: is no entry of a run's log: must be a JSON object with step. Delete the line, or the file: "
            "only the record of earlier steps is in it"
        ) from error
