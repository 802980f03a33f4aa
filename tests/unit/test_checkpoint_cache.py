"""The cache of converted GGUF files: found by content, written whole or not at all, by any number of processes."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import pilotfish.models.checkpoint as checkpoint_module
from helpers_gguf import tensors_of, tiny_model, write_gguf
from pilotfish.errors import CheckpointError
from pilotfish.models.checkpoint import load_weights, resolve_model
from pilotfish.models.weights.cache import cache_root, cached_folder, file_sha256


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("PILOTFISH_CACHE", "~/own")
    assert cache_root() == Path("/home/someone/own")
    monkeypatch.delenv("PILOTFISH_CACHE")
    assert cache_root() == Path("/xdg/pilotfish")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path("/home/someone/.cache/pilotfish")


def test_a_file_is_converted_once_for_each_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model)
    stages: list[float] = []
    first = resolve_model(str(path), dtype="float32", progress=lambda what, fraction: stages.append(fraction))
    assert (stages[0], stages[-1]) == (0.0, 1.0)
    expected = {name: torch.from_numpy(values) for name, values in tensors_of(model).items()}
    weights = load_weights(first, {name: tuple(tensor.shape) for name, tensor in expected.items()})
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    rounded = resolve_model(str(path), dtype="bfloat16")
    assert rounded.path != first.path
    assert rounded.tensors()["model.norm.weight"].dtype == torch.bfloat16

    monkeypatch.setattr(checkpoint_module, "convert_gguf", lambda *args: pytest.fail("converted again"))
    copy = tmp_path / "elsewhere" / "copy.gguf"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    for again in (path, copy):
        assert resolve_model(str(again), dtype="float32").path == first.path
    assert hashlib.sha256(path.read_bytes()).hexdigest() in first.path.name


def test_a_changed_file_is_converted_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    first = resolve_model(str(path), dtype="float32")
    write_gguf(path, tiny_model("llama", rms_norm_eps=1e-3))
    second = resolve_model(str(path), dtype="float32")
    assert (first.config.rms_norm_eps, second.config.rms_norm_eps) == (1e-5, 1e-3)


def test_a_truncated_file_is_not_cached(tmp_path: Path, root: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    path.write_bytes(path.read_bytes()[:-5000])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"m\.gguf: tensor .* truncated"):
            resolve_model(str(path))
    assert [entry.name for entry in (root / "gguf").iterdir()] == ["hashes"]


def test_two_writers_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "entry"
    both_are_writing = threading.Barrier(2, timeout=10)
    scratches: list[Path] = []

    def fill(scratch: Path) -> None:
        (scratch / "file").write_text(scratch.name)
        scratches.append(scratch)
        both_are_writing.wait()

    results: list[Path] = []
    writers = [threading.Thread(target=lambda: results.append(cached_folder(folder, fill))) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert results == [folder, folder]
    assert len(set(scratches)) == 2
    assert (folder / "file").read_text() in [scratch.name for scratch in scratches]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fill(scratch: Path) -> None:
        (scratch / "half").write_text("half")
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match=r"^broken$"):
        cached_folder(tmp_path / "cache" / "entry", fill)
    assert not list((tmp_path / "cache").iterdir())


def test_leftovers_of_killed_processes_go(tmp_path: Path) -> None:
    old, young, other = (tmp_path / name for name in (".entry-old", ".entry-young", ".other-old"))
    two_days_ago = time.time() - 48 * 3600
    for leftover in (old, young, other):
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"1")
    for leftover in (old, other):
        os.utime(leftover, (two_days_ago, two_days_ago))
    cached_folder(tmp_path / "entry", lambda scratch: None)
    assert {path.name for path in tmp_path.iterdir()} == {".entry-young", ".other-old", "entry"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be written to the cache folder .*PILOTFISH_CACHE.*--no-cache"):
        resolve_model(str(path))
    resolve_model(str(path), cache=False).close()


def test_hash_memo(tmp_path: Path) -> None:
    path, memos = tmp_path / "data", tmp_path / "memos"
    path.write_bytes(b"one")
    assert file_sha256(path, memos) == hashlib.sha256(b"one").hexdigest()
    (memo,) = memos.iterdir()
    memo.write_text(memo.read_text().replace(hashlib.sha256(b"one").hexdigest(), "remembered"))
    assert file_sha256(path, memos) == "remembered"
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert file_sha256(path, memos) == hashlib.sha256(b"two").hexdigest()
    memo.write_text("not JSON")
    assert file_sha256(path, memos) == hashlib.sha256(b"two").hexdigest()
