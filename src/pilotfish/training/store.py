"""Captured text on disk: tokens, which of them are to be learnt, and the target's hidden states. Never probabilities.

A capture is a folder with ``manifest.json`` and safetensors shards. T tokens and N samples of a shard, H hidden size:

============  ==================  ==================================================================================
``token_ids``   int32 [T]           samples one after another
``loss_mask``   uint8 [T]           1 where the token is to be learnt: the target wrote it
``starts``      int64 [N + 1]       where samples begin
``rows``        int64 [N]           the line of the data file that each sample is of, from 0
``hidden``      bfloat16 [T, H]     the target's state after its final norm; zeros where it was never computed (the
                                  last token of an answer has none)
``aux``         bfloat16 [T, A H]   states that enter the manifest's ``aux_layers``; only if there are any
============  ==================  ==================================================================================

The metadata entry ``sources`` is a JSON list of N strings: where each prompt is from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pilotfish.errors import CheckpointError, ConfigError

__all__ = ["CaptureReader", "CaptureWriter", "Manifest", "Sample", "ShardEntry", "is_capture"]

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """What a shard holds."""

    file: str
    num_samples: int
    num_tokens: int
    num_supervised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a capture was made of and how far it is.

    Attributes:
        target: fields of :class:`pilotfish.models.heads.TargetStamp`.
        dtype: that the target ran in.
        aux_layers: ids of the layers whose input states are stored, in the convention of Pilotfish's heads.
        sampling: how answers were chosen; ``keep_answers`` if they were given.
        data: name and sha256 of the data file.
        shards: in the order they were written.
        complete: nothing is missing.
        num_prompts: samples of the whole capture; None: not known, of captures of earlier versions.
    """

    target: Mapping[str, Any]
    dtype: str
    aux_layers: tuple[int, ...]
    sampling: Mapping[str, Any]
    data: Mapping[str, Any]
    shards: tuple[ShardEntry, ...] = ()
    complete: bool = False
    num_prompts: int | None = None
    version: int = FORMAT_VERSION

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_supervised(self) -> int:
        """Tokens to be learnt."""
        return sum(shard.num_supervised for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Write ``manifest.json``; a reader never sees half of it."""
        counts = {name: getattr(self, name) for name in ("num_samples", "num_tokens", "num_supervised")}
        content = {**asdict(self), **counts}
        temporary = folder / f"{_MANIFEST}.tmp"
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / _MANIFEST)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read it.

        Raises:
            CheckpointError: the folder is no capture, or one of another format.
        """
        file = folder / _MANIFEST
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            version = content["version"]
            if version != FORMAT_VERSION:
                raise CheckpointError(f"{file}: version={version!r}: this Pilotfish reads version {FORMAT_VERSION}")
            return cls(
                target=content["target"],
                dtype=content["dtype"],
                aux_layers=tuple(content["aux_layers"]),
                sampling=content["sampling"],
                data=content["data"],
                shards=tuple(ShardEntry(**shard) for shard in content["shards"]),
                complete=content["complete"],
                num_prompts=content.get("num_prompts"),
            )
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder}: is no capture: it has no {_MANIFEST} (see pilotfish capture)") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: cannot be read as a capture's manifest: {error!r}") from error


def is_capture(folder: Path) -> bool:
    """Whether a capture was begun there."""
    return (folder / _MANIFEST).exists()


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and its answer. L tokens.

    Attributes:
        token_ids: int32 [L].
        loss_mask: uint8 [L].
        hidden: bfloat16 [L, H].
        aux: bfloat16 [L, A H], or None.
        row: line of the data file.
        source: where the prompt is from, maybe "".
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    hidden: Tensor
    aux: Tensor | None
    row: int
    source: str


@dataclass(slots=True)
class CaptureWriter:
    """Collects samples and writes a shard whenever there are enough.

    Args:
        folder: of the capture; must exist.
        manifest: so far; kept up to date on disk.
        shard_tokens: tokens in a shard, at least.
    """

    folder: Path
    manifest: Manifest
    shard_tokens: int = 100_000
    _samples: list[Sample] = field(default_factory=list)
    _num_tokens: int = 0

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._num_tokens += len(sample.token_ids)
        if self._num_tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what there is. The manifest names a shard only after it is whole."""
        if not self._samples:
            return
        samples = self._samples
        name = f"shard-{len(self.manifest.shards):05d}.safetensors"
        lengths = [len(sample.token_ids) for sample in samples]
        tensors = {
            "token_ids": torch.from_numpy(np.concatenate([sample.token_ids for sample in samples])),
            "loss_mask": torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])),
            "starts": torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int64)),
            "rows": torch.tensor([sample.row for sample in samples], dtype=torch.int64),
            "hidden": torch.cat([sample.hidden for sample in samples]),
        }
        if self.manifest.aux_layers:
            tensors["aux"] = torch.cat([sample.aux for sample in samples if sample.aux is not None])
        sources = json.dumps([sample.source for sample in samples])
        (self.folder / name).write_bytes(save(tensors, metadata={"sources": sources}))
        entry = ShardEntry(name, len(samples), sum(lengths), sum(int(sample.loss_mask.sum()) for sample in samples))
        self._update(shards=(*self.manifest.shards, entry))
        self._samples, self._num_tokens = [], 0

    def close(self, *, complete: bool) -> None:
        """Write the rest."""
        self.flush()
        self._update(complete=complete)

    def _update(self, **changes: Any) -> None:
        self.manifest = replace(self.manifest, **changes)
        self.manifest.save(self.folder)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A bfloat16 tensor [T, width] in a file, from byte ``offset`` on.

    Read, not mapped: pages that a run has touched would count as its memory, up to the size of the capture.
    """

    file: Path
    offset: int
    width: int

    def read(self, start: int, end: int) -> Tensor:
        """Rows ``[start, end)``.

        Raises:
            CheckpointError: the file has become shorter.
        """
        rows = np.empty((end - start, self.width), np.int16)
        with self.file.open("rb") as file:
            file.seek(self.offset + start * self.width * rows.itemsize)
            if file.readinto(rows.data) != rows.nbytes:
                raise CheckpointError(f"{self.file}: was cut off since it was opened")
        return torch.from_numpy(rows).view(torch.bfloat16)


def _find_states(file: Path, names: Sequence[str]) -> dict[str, _Rows]:
    """Where tensors lie in a safetensors file: behind 8 bytes that say how long the header is, and the header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    for name in names:
        if header[name]["dtype"] != "BF16":
            raise ValueError(f"{name} is of dtype {header[name]['dtype']}: must be BF16")
    return {name: _Rows(file, 8 + size + header[name]["data_offsets"][0], header[name]["shape"][1]) for name in names}


class CaptureReader:
    """The samples of one or several captures of the same target, in the order they were written.

    A sample's states are read from disk when they are used.

    Args:
        folders: of the captures.

    Raises:
        ConfigError: a folder is given twice.
        CheckpointError: a folder is no capture, a shard is missing or damaged, or the captures are of different
            targets or layers.

    Attributes:
        folders: of the captures.
        manifests: one a folder.
        lengths: int64 [N], tokens of each sample.
        num_supervised: int64 [N], tokens to be learnt of each.
        sources: [N].
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        _check_different(folders)
        self.folders = list(folders)
        self.manifests = [Manifest.load(folder) for folder in folders]
        first = self.manifests[0]
        for folder, manifest in zip(folders[1:], self.manifests[1:], strict=True):
            for name in ("target", "aux_layers"):
                if getattr(manifest, name) != getattr(first, name):
                    raise CheckpointError(
                        f"{folder}: {name}={getattr(manifest, name)!r} is not that of {folders[0]}: "
                        f"{getattr(first, name)!r}. Captures that are used together must be of one target."
                    )
        self.sources: list[str] = []
        self._states: list[dict[str, _Rows]] = []  # of each shard
        self._places: list[tuple[int, int, int]] = []  # shard, start, end
        self._tokens: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8]] = []
        rows: list[NDArray[np.int64]] = []
        for folder, manifest in zip(folders, self.manifests, strict=True):
            for entry in manifest.shards:
                rows.append(self._open(folder / entry.file, manifest))
        self.rows: NDArray[np.int64] = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        self.lengths: NDArray[np.int64] = np.array([end - start for _, start, end in self._places], np.int64)
        self.num_supervised: NDArray[np.int64] = np.array(
            [int(self._masks[shard][start:end].sum()) for shard, start, end in self._places], np.int64
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.manifests[0].aux_layers

    def __len__(self) -> int:
        return len(self._places)

    def token_ids(self, index: int) -> NDArray[np.int32]:
        """Of one sample: int32 [L]."""
        shard, start, end = self._places[index]
        return self._tokens[shard][start:end]

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        """Of one sample: uint8 [L]."""
        shard, start, end = self._places[index]
        return self._masks[shard][start:end]

    def place(self, index: int) -> str:
        """Where a sample is from, for messages."""
        shard, start, _ = self._places[index]
        file, line = self._states[shard]["hidden"].file, int(self.rows[index]) + 1
        return f"{file}: the sample at its token {start} (line {line} of the data)"

    def __getitem__(self, index: int) -> Sample:
        shard, start, end = self._places[index]
        states = self._states[shard]
        return Sample(
            self._tokens[shard][start:end],
            self._masks[shard][start:end],
            states["hidden"].read(start, end),
            states["aux"].read(start, end) if self.aux_layers else None,
            int(self.rows[index]),
            self.sources[index],
        )

    def _open(self, file: Path, manifest: Manifest) -> NDArray[np.int64]:
        try:
            with safe_open(file, framework="np") as handle:
                starts = handle.get_tensor("starts")
                tokens, mask = handle.get_tensor("token_ids"), handle.get_tensor("loss_mask")
                rows: NDArray[np.int64] = handle.get_tensor("rows")
                sources = json.loads(handle.metadata()["sources"])
                _check_shard(handle, manifest, starts, tokens, mask)
            if not len(rows) == len(sources) == len(starts) - 1:
                raise ValueError(f"{len(starts) - 1} samples, {len(rows)} rows and {len(sources)} sources")
            number = len(self._states)
            self._states.append(_find_states(file, ("hidden", "aux") if manifest.aux_layers else ("hidden",)))
            self._tokens.append(tokens)
            self._masks.append(mask)
            self._places.extend((number, a, b) for a, b in pairwise(starts.tolist()))
            self.sources.extend(sources)
            return rows
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: is not a shard of a capture: {error}") from error


def _check_different(folders: Sequence[Path]) -> None:
    """Raises ConfigError where a folder is given twice: its samples would count twice, and be held out and learnt."""
    seen: dict[Path, Path] = {}
    for folder in folders:
        if folder.resolve() in seen:
            first = seen[folder.resolve()]
            raise ConfigError(f"data={str(folder)!r}: is the capture {str(first)!r} again; give each folder once")
        seen[folder.resolve()] = folder


def _check_shard(
    handle: Any, manifest: Manifest, starts: NDArray[Any], tokens: NDArray[Any], mask: NDArray[Any]
) -> None:
    """Raises ValueError where the shard's tensors do not fit each other or the target."""
    total = int(starts[-1])
    if starts[0] != 0 or (np.diff(starts) <= 0).any():
        raise ValueError("starts must ascend from 0")
    hidden_size, vocab_size = manifest.target.get("hidden_size"), manifest.target.get("vocab_size")
    states = {"hidden": 1, "aux": len(manifest.aux_layers)} if manifest.aux_layers else {"hidden": 1}
    shapes = {name: list(handle.get_slice(name).get_shape()) for name in states}
    for name, count in states.items():
        if shapes[name][0] != total or (hidden_size is not None and shapes[name][1] != count * hidden_size):
            raise ValueError(f"{name} has shape {shapes[name]}: must be [{total}, {count} * {hidden_size}]")
    if len(tokens) != total or len(mask) != total:
        raise ValueError(f"{len(tokens)} token_ids and {len(mask)} of loss_mask: must be {total} of each")
    if total and (int(tokens.min()) < 0 or (vocab_size is not None and int(tokens.max()) >= vocab_size)):
        raise ValueError(f"token_ids from {tokens.min()} to {tokens.max()}: must be from 0 to {vocab_size} - 1")
