"""Reads the header of a GGUF file: metadata, and where each tensor's bytes are.

The gguf package's reader makes three numpy arrays for every string of the vocabulary (seconds for 50,000 tokens) and
trusts the counts it finds; this one decodes straight from the mapped file in a tenth of a second and checks every
read against the file's end, so that a truncated or corrupt file is an error and never a long loop. Names and block
sizes of the tensor types, and their dequantisation, are the gguf package's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pilotfish.errors import CheckpointError, UnsupportedModelError

__all__ = ["GGUFFile", "GGUFTensor"]

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4

_SCALAR_FORMATS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: as in the file, e.g. ``blk.0.attn_q.weight``.
        shape: outermost dimension first, as torch has it (the file stores it innermost first).
        kind: how the values are encoded.
        offset: of the first byte, from the start of the file.
        num_bytes: of the encoded values.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(slots=True)
class GGUFFile:
    """An open GGUF file; a context manager that unmaps it.

    Attributes:
        path: of the file.
        metadata: key to value: int, float, bool, str, or a list of one of these.
        tensors: name to tensor, in the file's order.
    """

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GGUFTensor] = field(default_factory=dict)
    _data: mmap.mmap | None = None

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map ``path`` and read its header.

        Raises:
            CheckpointError: not a GGUF file, truncated, or corrupt.
            UnsupportedModelError: a version or byte order that is not read.
        """
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        gguf = cls(path=path, _data=data)
        try:
            gguf._read_header(_Cursor(path, data))
        except BaseException:
            gguf.close()
            raise
        return gguf

    def data(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's encoded bytes: one dimension, read-only, valid until :meth:`close`."""
        assert self._data is not None, "the file is closed"
        return np.frombuffer(self._data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def close(self) -> None:
        """Unmap the file, or let the last array that views it do so."""
        data, self._data = self._data, None
        if data is not None:
            # While an array from data() is alive, the mapping stays and goes with it.
            with contextlib.suppress(BufferError):
                data.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self, cursor: _Cursor) -> None:
        if cursor.take(4, "the magic number") != _MAGIC:
            raise CheckpointError(f"{self.path}: is not a GGUF file (it does not begin with 'GGUF')")
        (version,) = cursor.unpack("I", "the version")
        if version not in _SUPPORTED_VERSIONS:
            # A big-endian file shows its version in the upper bytes.
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version} is not supported (2 and 3 are, little endian); "
                "convert the model again with a current llama.cpp"
            )
        num_tensors, num_keys = cursor.unpack("QQ", "the tensor and key counts")
        for index in range(num_keys):
            key = cursor.string(f"metadata key {index} of {num_keys}")
            if key in self.metadata:
                raise CheckpointError(f"{self.path}: metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(f"metadata key {key!r}")
        infos = [self._read_tensor_info(cursor, index, num_tensors) for index in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment={alignment!r}: must be a power of two")
        data_start = (cursor.offset + alignment - 1) // alignment * alignment
        for info in infos:
            tensor = GGUFTensor(info.name, info.shape, info.kind, data_start + info.offset, info.num_bytes)
            end = tensor.offset + tensor.num_bytes
            if end > cursor.size:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name} ends at byte {end:,} of a file of {cursor.size:,} bytes: "
                    "the file is truncated; download it again"
                )
            self.tensors[tensor.name] = tensor

    def _read_tensor_info(self, cursor: _Cursor, index: int, num_tensors: int) -> GGUFTensor:
        """One entry of the tensor list; its offset still counts from the start of the tensor data."""
        name = cursor.string(f"the name of tensor {index} of {num_tensors}")
        what = f"the description of tensor {name}"
        (num_dims,) = cursor.unpack("I", what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{self.path}: tensor {name} has {num_dims} dimensions: must be 1 to {_MAX_DIMS}")
        shape = tuple(int(dim) for dim in reversed(cursor.unpack(f"{num_dims}Q", what)))
        raw_kind, offset = cursor.unpack("IQ", what)
        try:
            kind = GGMLQuantizationType(raw_kind)
        except ValueError:
            raise UnsupportedModelError(f"{self.path}: tensor {name} has the unknown type {raw_kind}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise CheckpointError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} values: must be a multiple of {block_size} for "
                f"{kind.name}"
            )
        num_values = 1
        for dim in shape:
            num_values *= dim
        return GGUFTensor(name, shape, kind, offset, num_values // block_size * block_bytes)


class _Cursor:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.offset = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        end = self.offset + num_bytes
        if end > self.size:
            raise CheckpointError(
                f"{self.path}: ends at byte {self.size:,} within {what} (which needs {num_bytes:,} bytes from byte "
                f"{self.offset:,}): the file is truncated or corrupt; download it again"
            )
        taken = self.data[self.offset : end]
        self.offset = end
        return taken

    def unpack(self, format: str, what: str) -> tuple[Any, ...]:
        return struct.unpack("<" + format, self.take(struct.calcsize("<" + format), what))

    def string(self, what: str) -> str:
        (length,) = self.unpack("Q", what)
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 text ({error}): the file is corrupt") from error

    def value(self, what: str) -> Any:
        """A metadata value with its type before it."""
        kind = self._value_kind(what)
        if kind != GGUFValueType.ARRAY:
            return self._reader(kind, what)()
        kind = self._value_kind(what)
        (count,) = self.unpack("Q", what)
        if kind in _SCALAR_FORMATS:
            return list(self.unpack(f"{self._plausible(count, what)}{_SCALAR_FORMATS[kind]}", what))
        read = self._reader(kind, what)
        return [read() for _ in range(count)]

    def _plausible(self, count: int, what: str) -> int:
        # Before struct is asked for a format of that many items.
        if count > self.size - self.offset:
            raise CheckpointError(
                f"{self.path}: {what} claims {count:,} items in a file of {self.size:,} bytes: the file is corrupt"
            )
        return count

    def _value_kind(self, what: str) -> GGUFValueType:
        (raw,) = self.unpack("I", what)
        try:
            return GGUFValueType(raw)
        except ValueError:
            raise CheckpointError(f"{self.path}: {what} has the unknown type {raw}: the file is corrupt") from None

    def _reader(self, kind: GGUFValueType, what: str) -> Callable[[], Any]:
        if kind == GGUFValueType.STRING:
            return lambda: self.string(what)
        if kind in _SCALAR_FORMATS:
            format = _SCALAR_FORMATS[kind]
            return lambda: self.unpack(format, what)[0]
        raise UnsupportedModelError(f"{self.path}: {what} is an array of arrays, which no supported model has")
