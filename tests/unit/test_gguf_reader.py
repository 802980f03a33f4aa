"""The GGUF header reader: the same as the gguf package's, and an error for every way a file can be cut or broken."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from helpers_gguf import tiny_model, write_gguf
from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.weights.gguf_reader import GGUFFile


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", model)


def test_reads_what_the_gguf_package_reads(small_gguf: Path) -> None:
    reference = gguf.GGUFReader(small_gguf)
    with GGUFFile.open(small_gguf) as file:
        expected = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
        assert file.metadata == expected
        assert len(expected["tokenizer.ggml.tokens"]) > 256
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert ours.kind == tensor.tensor_type
            assert file.data(ours).tobytes() == tensor.data.tobytes()


def test_reads_every_type_of_value(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🐟")
    writer.add_array("floats", [0.5, -2.0])
    writer.add_array("texts", ["a", "b c"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "u8": 200,
            "i8": -100,
            "u16": 60000,
            "i16": -30000,
            "u32": 2**32 - 1,
            "i32": -(2**31),
            "u64": 2**64 - 1,
            "i64": -(2**63),
            "f32": float(np.float32(0.1)),
            "f64": 0.1,
            "yes": True,
            "text": "naïve 🐟",
            "floats": [0.5, -2.0],
            "texts": ["a", "b c"],
        }


def test_every_truncation_is_an_error_that_names_the_file(small_gguf: Path, tmp_path: Path) -> None:
    whole = small_gguf.read_bytes()
    with GGUFFile.open(small_gguf) as file:
        tensors = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    data_start, last = tensors[0].offset, tensors[-1]
    path = tmp_path / "cut.gguf"
    for length in [*range(0, data_start, 53), data_start - 1, data_start]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile.open(path)
    path.write_bytes(whole[: last.offset + last.num_bytes - 1])
    with pytest.raises(CheckpointError, match=rf"cut\.gguf: tensor {last.name} ends at byte .* truncated"):
        GGUFFile.open(path)


def test_no_broken_byte_gives_another_kind_of_error(small_gguf: Path, tmp_path: Path) -> None:
    whole = bytearray(small_gguf.read_bytes())
    with GGUFFile.open(small_gguf) as file:
        data_start = min(tensor.offset for tensor in file.tensors.values())
    random = np.random.default_rng(0)
    path = tmp_path / "broken.gguf"
    messages = []
    for offset in [*range(64), *random.integers(0, data_start, 200)]:
        broken = bytearray(whole)
        broken[offset] ^= int(random.integers(1, 256))
        path.write_bytes(broken)
        try:
            GGUFFile.open(path).close()
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("broken.gguf: " in message for message in messages)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        GGUFFile.open(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedModelError, match="GGUF version 1 is not supported"):
        GGUFFile.open(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedModelError, match=r"version 50331648 .*little endian"):
        GGUFFile.open(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"other\.gguf: cannot be read"):
        GGUFFile.open(path)
    with pytest.raises(CheckpointError, match=r"absent\.gguf: cannot be read"):
        GGUFFile.open(tmp_path / "absent.gguf")


def test_a_huge_count_is_an_error_at_once(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k"
    array_of_ints = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32, 2**62)
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array_of_ints + bytes(16))
    with pytest.raises(CheckpointError, match=r"metadata key 'k' claims 4,611,686,018,427,387,904 items"):
        GGUFFile.open(path)


def test_arrays_outlive_the_file(small_gguf: Path) -> None:
    with GGUFFile.open(small_gguf) as file:
        tensor = file.tensors["output_norm.weight"]
        data = file.data(tensor)
        copy = data.tobytes()
    assert data.tobytes() == copy
