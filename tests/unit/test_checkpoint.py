"""Names become checkpoints, and a checkpoint gives exactly the tensors that a model expects or says which is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import pilotfish.models.checkpoint as module
from helpers_gguf import byte_level_vocabulary, tensors_of, tiny_model, write_gguf
from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.checkpoint import BuiltInModel, load_weights, resolve_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
EXPECTED = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor] | None = None, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if tensors is not None:
        save_file(dict(tensors), folder / "model.safetensors")
    return folder


def good_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.arange(8 if len(shape) == 1 else 32).float()[: torch.Size(shape).numel()].view(shape).to(dtype)
            for name, shape in EXPECTED.items()}  # fmt: skip


def load(folder: Path, dtype: Any = "float32") -> dict[str, Tensor]:
    return load_weights(resolve_model(str(folder), dtype=dtype), EXPECTED)


def test_folder(tmp_path: Path) -> None:
    checkpoint = resolve_model(str(write_folder(tmp_path / "m", good_tensors())), dtype="float32")
    assert (checkpoint.name, checkpoint.path, checkpoint.source) == (str(tmp_path / "m"), *[tmp_path / "m"] * 2)
    assert checkpoint.config.eos_token_ids == (2,)
    weights = load_weights(checkpoint, EXPECTED)
    assert list(weights) == list(EXPECTED)
    for name, tensor in good_tensors().items():
        assert torch.equal(weights[name], tensor)


def test_shards(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    shards = {name: f"model-{index}.safetensors" for index, name in enumerate(EXPECTED)}
    for name, shard in shards.items():
        save_file({name: good_tensors()[name]}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    for name, tensor in load(folder).items():
        assert torch.equal(tensor, good_tensors()[name])

    index.write_text(json.dumps({"weight_map": dict.fromkeys(EXPECTED, "model-0.safetensors")}))
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors: tensor model\.norm\.weight is missing, though"):
        load(folder)
    index.write_text(json.dumps({"weight_map": shards}))
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: is missing, though .*index\.json lists it"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read as a safetensors index"):
        load(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_in_the_dtype_asked_for(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    for name, tensor in load(write_folder(tmp_path / "m", good_tensors(stored)), dtype).items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor.float(), good_tensors()[name])


def test_tensors_are_lazy_and_stay_valid(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", good_tensors())
    tensors = resolve_model(str(folder), dtype="float32").tensors()
    assert len(tensors) == 2
    assert tensors.shape_of("model.norm.weight") == (4,)
    (folder / "model.safetensors").unlink()
    assert torch.equal(tensors["model.norm.weight"], good_tensors()["model.norm.weight"])
    with pytest.raises(KeyError):
        tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.norm.weight": None},
            r"m: tensor model\.norm\.weight is missing; the config promises it with shape \[4\]",
        ),
        (
            {"model.norm.weight": None, "model.embed_tokens.weight": None, "other": torch.ones(1)},
            r"tensor model\.embed_tokens\.weight \(and 1 more\) is missing",
        ),
        (
            {"model.norm.bias": torch.ones(4)},
            r"model\.safetensors: tensor model\.norm\.bias of shape \[4\] is not part of a llama model",
        ),
        (
            {"model.norm.weight": torch.ones(5)},
            r"model\.safetensors: tensor model\.norm\.weight has shape \[5\], but the config promises \[4\]",
        ),
        ({"model.norm.weight": torch.ones(4, dtype=torch.int8)}, "model.norm.weight has the dtype int8; supported are"),
    ],
)
def test_wrong_tensors_are_named(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in (good_tensors() | changes).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        load(write_folder(tmp_path / "m", tensors))


def test_known_leftovers_are_ignored(tmp_path: Path) -> None:
    leftovers = {"lm_head.weight": torch.ones(8, 4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    assert load(write_folder(tmp_path / "m", good_tensors() | leftovers)).keys() == EXPECTED.keys()
    untied = CONFIG | {"tie_word_embeddings": False}
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight of shape \[8, 4\] is not part"):
        load(write_folder(tmp_path / "untied", good_tensors() | leftovers, untied))


def test_truncated_safetensors(tmp_path: Path) -> None:
    file = write_folder(tmp_path / "m", good_tensors()) / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 40, len(whole) // 2):  # within the header
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a whole safetensors file: .*again"):
            load(file.parent)
    for length in (len(whole) - 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        cut = r"model\.safetensors: tensor [\w.]+ is cut off: this is not a whole safetensors file: .*again"
        with pytest.raises(CheckpointError, match=cut) as caught:
            load(file.parent)
    assert any(f"tensor {name} is" in str(caught.value) for name in good_tensors())


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"m: holds no weights; expected model\.safetensors"):
        load(folder)
    torch.save(good_tensors(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds pytorch_model\.bin but no safetensors; .*Convert the model"):
        load(folder)


def test_config_that_is_no_json_object(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", good_tensors())
    for content in ("{", "[1]", "\xff"):
        (folder / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"m/config\.json: "):
            resolve_model(str(folder))


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", good_tensors())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert resolve_model(str(folder)).config.eos_token_ids == (3, 2)


def test_eos_of_the_tokenizer_is_the_last_resort(tmp_path: Path) -> None:
    checkpoint = resolve_model(str(write_gguf(tmp_path / "m.gguf", tiny_model("llama"))), cache=False)
    for file in ("generation_config.json", "config.json"):
        content = json.loads((checkpoint.path / file).read_text())
        del content["eos_token_id"]
        (checkpoint.path / file).write_text(json.dumps(content))
    assert resolve_model(str(checkpoint.path)).config.eos_token_ids == (2,)
    checkpoint.close()


@pytest.mark.parametrize("name", ["nothing-here", "./nothing/here", "/nothing/here", "a/b/c", "owner/model.gguf", ""])
def test_names_that_stand_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "snapshot_download", lambda *args, **kwargs: pytest.fail("went to the network"))
    allowed = r"expected a Hugging Face folder .*Qwen/Qwen3-0\.6B, or a built-in name \(smollm2-135m\)"
    if name == "":  # the working directory, which is a folder but no model
        with pytest.raises(CheckpointError, match=rf"holds no config\.json; {allowed}"):
            resolve_model(name)
    else:
        with pytest.raises(CheckpointError, match=rf"^model '{name}': there is no such file or folder; {allowed}"):
            resolve_model(name)


def test_other_files_and_dtypes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt: is not a GGUF file; expected a Hugging Face folder"):
        resolve_model(str(tmp_path / "notes.txt"))
    with pytest.raises(CheckpointError, match="dtype='float16': must be one of bfloat16, float32"):
        resolve_model(str(tmp_path), dtype="float16")  # type: ignore[arg-type]


def test_hub_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def fake(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options))
        return str(write_folder(tmp_path / "snapshot", good_tensors()))

    monkeypatch.setattr(module, "snapshot_download", fake)
    checkpoint = resolve_model("some-owner/Some_Model-1.5B", dtype="float32")
    assert load_weights(checkpoint, EXPECTED).keys() == EXPECTED.keys()
    ((hub_id, options),) = asked
    assert hub_id == "some-owner/Some_Model-1.5B"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_hub_failure_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hub_id: str, **options: Any) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(module, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("some-owner/some-model")
    message = str(caught.value)
    assert "downloading some-owner/some-model from the Hugging Face Hub failed: OSError: no route to host" in message
    assert "a .gguf file" in message
    assert "\n" not in message


def test_built_in_name_without_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = BuiltInModel(distribution="no-such-distribution", hub_id="owner/model")
    monkeypatch.setattr(module, "BUILT_IN_MODELS", {"short": built_in})
    monkeypatch.setattr(module, "snapshot_download", lambda hub_id, **_: str(write_folder(tmp_path / hub_id)))
    assert resolve_model("short").path == tmp_path / "owner/model"


def test_folder_with_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    with_gguf = resolve_model(str(tmp_path), cache=False)
    assert with_gguf.source == path
    with_gguf.close()
    write_gguf(tmp_path / "n.gguf", tiny_model("llama"))
    with pytest.raises(CheckpointError, match=r"holds several GGUF files \(m\.gguf, n\.gguf\); name one of them"):
        resolve_model(str(tmp_path), cache=False)


def test_wrong_tensors_of_a_gguf_name_the_gguf(tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = {name: values.shape for name, values in tensors_of(model).items()}
    path = write_gguf(tmp_path / "m.gguf", model, leave_out=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_weights(resolve_model(str(path), cache=False), expected)
    narrower = expected | {"model.norm.weight": (255,)}
    whole = resolve_model(str(write_gguf(tmp_path / "n.gguf", model)), cache=False)
    with pytest.raises(CheckpointError, match=r"n\.gguf: tensor model\.norm\.weight has shape \[256\].*\[255\]"):
        load_weights(whole, narrower)


def test_unsupported_gguf_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), vocabulary=byte_level_vocabulary(pre="unheard-of"))
    for cache in (False, True):
        with pytest.raises(UnsupportedModelError, match=r"m\.gguf: tokenizer\.ggml\.pre='unheard-of' is not supported"):
            resolve_model(str(path), cache=cache)
    assert not list((tmp_path / "tmp").iterdir())
    assert [entry.name for entry in (tmp_path / "cache" / "gguf").iterdir()] == ["hashes"]


def test_without_cache_the_folder_goes_with_the_checkpoint(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    checkpoint = resolve_model(str(path), dtype="float32", cache=False)
    folder = checkpoint.path
    weights = load_weights(checkpoint, {name: v.shape for name, v in tensors_of(tiny_model("llama")).items()})
    stored = load_file(folder / "model.safetensors")
    checkpoint.close()
    checkpoint.close()
    assert not folder.exists()
    for name, tensor in stored.items():
        assert torch.equal(weights[name], tensor)
    folder = resolve_model(str(path), cache=False).path  # the checkpoint itself is garbage at once
    assert not folder.exists()
