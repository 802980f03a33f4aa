"""Safetensors files: a lazy mapping over one file or a sharded set, and a writer that holds one tensor at a time.

Format: https://github.com/huggingface/safetensors#format (eight bytes of header length, a JSON header, the data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pilotfish.errors import CheckpointError

__all__ = ["SafetensorsMapping", "write_safetensors"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES: Mapping[torch.dtype, str] = {torch.float32: "F32", torch.bfloat16: "BF16"}


class SafetensorsMapping(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder by name.

    A look-up makes a tensor that views the mapped file: no bytes are read before they are used, and the pages belong
    to the operating system's file cache.
    """

    def __init__(self, folder: Path) -> None:
        """Open ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

        Raises:
            CheckpointError: no such file, a missing shard, a tensor twice or not at all, a truncated or corrupt file.
        """
        self._handles: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        index = folder / _INDEX_FILE
        if (folder / _SINGLE_FILE).is_file():
            self._add_file(folder / _SINGLE_FILE)
        elif index.is_file():
            weight_map = _read_weight_map(index)
            for shard in dict.fromkeys(weight_map.values()):
                self._add_file(folder / shard)
            for name, shard in weight_map.items():
                if self._files.get(name) != folder / shard:
                    raise CheckpointError(f"{folder / shard}: tensor {name} is missing, though {index.name} lists it")
        else:
            raise CheckpointError(_no_weights(folder))

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor ``name``."""
        return self._files[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the header alone."""
        return tuple(self._handles[self._files[name]].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        try:
            tensor: Tensor = self._handles[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _add_file(self, file: Path) -> None:
        try:
            handle: Any = safe_open(file, framework="pt", device="cpu")
            names = list(handle.keys())
        except FileNotFoundError as error:
            raise CheckpointError(f"{file}: is missing, though {_INDEX_FILE} lists it") from error
        except (SafetensorError, OSError, ValueError) as error:
            where = _first_tensor_cut_off(file)
            raise CheckpointError(
                f"{file}: {where}is not a whole safetensors file: {error}; download it again"
            ) from error
        self._handles[file] = handle
        for name in names:
            if name in self._files:
                raise CheckpointError(f"{file}: tensor {name} is also in {self._files[name]}")
            self._files[name] = file


def _first_tensor_cut_off(file: Path) -> str:
    """The first tensor that the file is too short for, to be put into a message; empty if the header is no help."""
    try:
        with file.open("rb") as opened:
            (header_bytes,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(header_bytes, file.stat().st_size)))
        data_bytes = file.stat().st_size - 8 - header_bytes
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        cut = [name for name, end in sorted(ends.items(), key=lambda item: int(item[1])) if end > data_bytes]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return ""
    return f"tensor {cut[0]} is cut off: this " if cut else ""


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: cannot be read as a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    return weight_map


def _no_weights(folder: Path) -> str:
    allowed = f"{_SINGLE_FILE}, or {_INDEX_FILE} and its shards"
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: holds {pickles[0]} but no safetensors; PyTorch pickles can run code and are not read. Convert "
            f"the model with transformers' save_pretrained, which writes {allowed}"
        )
    return f"{folder}: holds no weights; expected {allowed}"


def write_safetensors(
    file: Path, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write tensors one by one, so that a model larger than the memory can be converted.

    Args:
        file: to write.
        dtype: of every tensor in the file, float32 or bfloat16.
        shapes: name to shape, in the order of ``tensors``.
        tensors: yields each name of ``shapes`` with its tensor, which is cast to ``dtype``.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start = end
        end += torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # the data begins on a multiple of eight bytes
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)))
        out.write(encoded)
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            assert name == given and shape == tuple(tensor.shape), (name, shape, given, tensor.shape)
            flat = tensor.to(dtype).contiguous().view(-1).view(torch.uint8)
            out.write(flat.numpy().data)
