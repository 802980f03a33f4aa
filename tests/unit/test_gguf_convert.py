"""GGUF files become Hugging Face folders that transformers itself loads, with the same tensors and logits."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from helpers_gguf import byte_level_vocabulary, tensors_of, tiny_model, write_gguf
from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from pilotfish.models.weights.gguf_convert import convert_gguf
from pilotfish.models.weights.gguf_reader import GGUFFile

LAYER = "model.layers.0"


def convert(path: Path, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    folder.mkdir()
    convert_gguf(path, folder, dtype, lambda fraction: None)
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), "config.json")


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)]
)
@torch.no_grad()
def test_folder_gives_transformers_the_same_model(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(architecture, tied=tied)
    tensors = convert(write_gguf(tmp_path / "model.gguf", model), tmp_path / "hf")
    expected = tensors_of(model)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(tensors[name], torch.from_numpy(values)), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.arange(40)[None] * 7 % 288
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    config = config_of(tmp_path / "hf")
    assert config.architecture == architecture
    assert config.tie_word_embeddings is tied
    assert config.head_dim == (32 if architecture == "qwen3" else 64)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 5000.0)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_precision_is_exact(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    tensors = convert(write_gguf(tmp_path / "model.gguf", model, kind=kind), tmp_path / "hf")
    dtype = torch.float16 if kind == Kind.F16 else torch.bfloat16
    for name, values in tensors_of(model).items():
        expected = torch.from_numpy(values)
        assert torch.equal(tensors[name], expected.to(dtype).float() if expected.ndim > 1 else expected), name


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_values_are_within_a_step_of_the_original(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = convert(write_gguf(tmp_path / "model.gguf", model, kind=kind), tmp_path / "hf")
    for name, values in tensors_of(model).items():
        if values.ndim == 1:
            assert torch.equal(tensors[name], torch.from_numpy(values)), name
            continue
        blocks = values.reshape(-1, 32)
        error = np.abs(tensors[name].numpy().reshape(-1, 32) - blocks).max(1)
        span, largest = np.ptp(blocks, axis=1), np.abs(blocks).max(1)
        # Half a step; a whole one for the symmetric types, whose range ends a step early on one side.
        step = {
            Kind.Q8_0: largest / 127 / 2,
            Kind.Q4_0: largest / 8,
            Kind.Q4_1: span / 15 / 2,
            Kind.Q5_0: largest / 16,
            Kind.Q5_1: span / 31 / 2,
        }[kind]
        assert (error <= 1.02 * step + 1e-3 * largest).all(), name  # scale and minimum are stored as float16
        assert error.max() > 0


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Blocks of random bytes with scales that are small, finite numbers."""
    random = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
    scales = random.uniform(0.001, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q6_K:
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(rows, -1)


def decoded_block(kind: Kind, block: bytes) -> list[float]:
    """One K-quant block of 256 values, from the layout in ggml's ``ggml-common.h``; one value at a time."""
    if kind == Kind.Q6_K:
        low, high, scales = block[:128], block[128:192], struct.unpack("16b", block[192:208])
        (scale,) = struct.unpack("<e", block[208:])
        values = []
        for index in range(256):
            half, within = divmod(index, 128)
            quarter, column = divmod(within, 32)
            nibble = low[64 * half + 32 * (quarter % 2) + column] >> (4 * (quarter // 2)) & 15
            top = high[32 * half + column] >> (2 * quarter) & 3
            values.append(scale * scales[index // 16] * ((top << 4 | nibble) - 32))
        return values
    scale, min_scale = struct.unpack("<2e", block[:4])
    packed, rest = block[4:16], block[16:]
    high, nibbles = (rest[:32], rest[32:]) if kind == Kind.Q5_K else (bytes(32), rest)
    values = []
    for index in range(256):
        group, column = divmod(index, 32)
        if group < 4:
            factor, offset = packed[group] & 63, packed[group + 4] & 63
        else:
            factor = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            offset = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        quant = nibbles[32 * (group // 2) + column] >> (4 * (group % 2)) & 15 | (high[column] >> group & 1) << 4
        values.append(scale * factor * quant - min_scale * offset)
    return values


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_follow_the_block_layout(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("qwen2", num_hidden_layers=1)
    names = [name for name, values in tensors_of(model).items() if values.ndim == 2]
    shapes = {name: values.shape for name, values in tensors_of(model).items()}
    encoded = {name: random_blocks(kind, *shapes[name], seed=seed) for seed, name in enumerate(names)}
    tensors = convert(write_gguf(tmp_path / "model.gguf", model, kind=kind, encoded=encoded), tmp_path / "hf")
    name = f"{LAYER}.self_attn.k_proj.weight"  # [128, 256]: a block in each of 128 rows
    expected = [decoded_block(kind, row.tobytes()) for row in encoded[name]]
    np.testing.assert_allclose(tensors[name].numpy(), np.array(expected), rtol=1e-5, atol=1e-6)


def test_bfloat16_is_the_rounding_of_float32(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), kind=Kind.Q8_0)
    exact = convert(path, tmp_path / "float32")
    rounded = convert(path, tmp_path / "bfloat16", torch.bfloat16)
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        assert tensor.dtype == torch.float32
        assert rounded[name].dtype == torch.bfloat16
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16)), name


def test_progress_grows_to_one(tmp_path: Path) -> None:
    fractions: list[float] = []
    convert_gguf(write_gguf(tmp_path / "model.gguf", tiny_model("llama")), tmp_path, torch.float32, fractions.append)
    assert len(fractions) > 10
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def llama3_rope_factors(theta: float, factor: float) -> npt.NDArray[np.float32]:
    """What each frequency is divided by, from transformers' own scaling of a head of 64."""
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, 64, 2).float() / 64)
    return (plain / scaled).float().numpy()


def test_llama3_rope_factors_become_rope_scaling(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    factors = llama3_rope_factors(500000.0, 32.0)
    assert 1.0 in factors and factors.max() == pytest.approx(32.0)
    convert(write_gguf(tmp_path / "a.gguf", model, extra={"rope_freqs.weight": factors}), tmp_path / "hf")
    scaling = config_of(tmp_path / "hf").rope_scaling
    assert isinstance(scaling, Llama3RopeScaling)
    assert scaling.factor == pytest.approx(32.0)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    assert scaling.original_max_position_embeddings == 8192

    factors[10] *= 1.5
    broken = write_gguf(tmp_path / "b.gguf", model, extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match=r"b\.gguf: rope_freqs\.weight is not Llama 3's rope scaling"):
        convert(broken, tmp_path / "hf2")


def test_linear_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("qwen2")
    kind, factor = "qwen2.rope.scaling.type", "qwen2.rope.scaling.factor"
    write_gguf(path, model, strings={kind: "linear"}, floats={factor: 4.0})
    convert(path, tmp_path / "four")
    assert config_of(tmp_path / "four").rope_scaling == LinearRopeScaling(factor=4.0)
    write_gguf(path, model, strings={kind: "linear"}, floats={factor: 1.0})
    convert(path, tmp_path / "one")
    assert config_of(tmp_path / "one").rope_scaling is None
    write_gguf(path, model, strings={kind: "yarn"}, floats={factor: 4.0})
    convert(path, tmp_path / "yarn")
    with pytest.raises(UnsupportedModelError, match="'yarn' is not supported"):
        config_of(tmp_path / "yarn")


def test_end_of_turn_tokens_end_a_completion(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary(settings={"ggml.eot_token_id": 0, "ggml.eom_token_id": 2})
    convert(write_gguf(tmp_path / "model.gguf", tiny_model("llama"), vocabulary=vocabulary), tmp_path / "hf")
    assert config_of(tmp_path / "hf").eos_token_ids == (2, 0)
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"integers": {"llama.expert_count": 8}}, r"llama\.expert_count=8 is not supported: only dense models"),
        ({"integers": {"split.count": 3}}, r"is one of 3 parts; join them with llama-gguf-split"),
        ({"integers": {"llama.attention.key_length": 64, "llama.attention.value_length": 32}}, "value_length=32"),
        (
            {"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
            r"tensor blk\.0\.attn_sinks\.weight is not part",
        ),
        ({"extra": {"nonsense": np.ones(4, np.float32)}}, "tensor nonsense is not part of a llama model"),
        (
            {"kind": Kind.Q8_0, "extra": {"blk.0.x.weight": np.ones(4, np.float64)}},
            r"has the type F64.*supported are F32",
        ),
    ],
)
def test_unsupported_parts_are_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), **changes)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=rf"model\.gguf: .*{message}"):
        convert(path, tmp_path / "hf")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match="architecture 'gemma3' is not supported; supported are llama, qwen2"
    ):
        convert(tmp_path / "model.gguf", tmp_path / "hf")


def test_more_tokens_than_embedding_rows(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=200)
    with pytest.raises(CheckpointError, match=r"the tokenizer has 271 tokens, but token_embd\.weight 200 rows"):
        convert(write_gguf(tmp_path / "model.gguf", model), tmp_path / "hf")


def test_no_broken_header_byte_gives_another_kind_of_error(tmp_path: Path) -> None:
    """Whatever the metadata says after a byte has changed: a conversion, or one of our errors."""
    model = tiny_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    whole = write_gguf(tmp_path / "model.gguf", model).read_bytes()
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        data_start = min(tensor.offset for tensor in file.tensors.values())
    random = np.random.default_rng(1)
    # The tokens and merges fill most of the header; the keys before and the tensor list behind matter more.
    middle = data_start // 2
    offsets = [
        *random.integers(24, 900, 150),
        *random.integers(900, middle, 50),
        *random.integers(middle, data_start, 100),
    ]
    num_errors = 0
    path, folder = tmp_path / "broken.gguf", tmp_path / "hf"
    folder.mkdir()
    for offset in offsets:
        broken = bytearray(whole)
        broken[offset] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(broken)
        try:
            convert_gguf(path, folder, torch.float32, lambda fraction: None)
            config_of(folder)
        except CheckpointError:
            num_errors += 1
    assert 30 < num_errors < len(offsets)
