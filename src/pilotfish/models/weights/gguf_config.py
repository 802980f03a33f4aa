"""What a GGUF file's metadata says about the model, as the ``config.json`` of a Hugging Face folder.

The keys are those of llama.cpp's converter (gguf's ``constants.Keys``). A value that Pilotfish does not compute is
written under the Hugging Face key that :meth:`ModelConfig.from_hf` refuses, so that both formats give the same error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.weights.gguf_reader import GGUFFile

__all__ = ["ROPE_FACTORS_TENSOR", "generation_config", "hf_config"]

ROPE_FACTORS_TENSOR = "rope_freqs.weight"
"""Llama 3's rope scaling, as one divisor for each rotary frequency; float32, [head_dim / 2]."""

_CLASSES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_DEFAULT_ROPE_THETA = 10000.0

# Of every Llama 3.1, 3.2 and 3.3; llama.cpp's converter assumes the same values where a config lacks them.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT = 8192


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """The ``config.json`` that describes this file's model.

    Raises:
        UnsupportedModelError: an architecture, or a part of it, that is not converted.
        CheckpointError: metadata that is missing or of the wrong kind.
    """
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _CLASSES:
        raise UnsupportedModelError(
            f"{gguf.path}: architecture {architecture!r} is not supported; supported are {', '.join(_CLASSES)}"
        )
    _refuse_parts(gguf, architecture)
    keys = _Keys(gguf, architecture)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    rope_dim = keys.optional_integer("rope.dimension_count")
    head_dim = keys.optional_integer("attention.key_length")
    if head_dim is None:
        # Files of llama.cpp's early days have the head's width here only.
        head_dim = rope_dim if rope_dim is not None and architecture == "llama" else hidden_size // num_heads
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": _embedding_rows(gguf),
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.optional_integer("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", default=_DEFAULT_ROPE_THETA),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": any(".attn_q.bias" in name for name in gguf.tensors),
        "torch_dtype": "float32",
        **generation_config(gguf),
    }
    if rope_dim is not None and rope_dim != head_dim:
        config["partial_rotary_factor"] = rope_dim / head_dim
    scaling = _rope_scaling(gguf, keys, config["rope_theta"], head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def generation_config(gguf: GGUFFile) -> dict[str, Any]:
    """The ``generation_config.json``: BOS, and the tokens that end a completion (EOS, end of turn, end of message)."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(gguf.metadata[key] for key in keys if key in gguf.metadata))
    return {
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }


def _refuse_parts(gguf: GGUFFile, architecture: str) -> None:
    metadata = gguf.metadata
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{gguf.path}: is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge"
        )
    for key in (f"{architecture}.expert_count", f"{architecture}.attention.sliding_window"):
        if metadata.get(key):
            asked = f"{gguf.path}: {key}={metadata[key]}"
            raise UnsupportedModelError(f"{asked} is not supported: only dense models with full attention are")
    key_length = metadata.get(f"{architecture}.attention.key_length")
    value_length = metadata.get(f"{architecture}.attention.value_length")
    if key_length != value_length and None not in (key_length, value_length):
        raise UnsupportedModelError(
            f"{gguf.path}: attention.key_length={key_length} and attention.value_length={value_length}: "
            "only equal ones are supported"
        )


def _embedding_rows(gguf: GGUFFile) -> int:
    # The tokenizer may know fewer tokens than the embedding has rows.
    tensor = gguf.tensors.get("token_embd.weight")
    if tensor is None:
        raise CheckpointError(f"{gguf.path}: tensor token_embd.weight is missing")
    return tensor.shape[0]


def _rope_scaling(gguf: GGUFFile, keys: _Keys, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if ROPE_FACTORS_TENSOR in gguf.tensors:
        tensor = gguf.tensors[ROPE_FACTORS_TENSOR]
        factors = gguf.data(tensor).view(np.float32).copy() if tensor.kind.name == "F32" else np.empty(0, np.float32)
        return _llama3_scaling(gguf, factors, theta, head_dim)
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor", default=1.0)}
    return None if kind == "linear" and scaling["factor"] == 1.0 else scaling


def _llama3_scaling(
    gguf: GGUFFile, factors: npt.NDArray[np.float32], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """Find the parameters of Llama 3's scaling that give the file's factors; refuse factors that none gives."""
    if factors.shape == (head_dim // 2,) and np.all(factors == 1):
        return None
    factor = float(factors.max(initial=1.0))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": _LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
    }
    expected = _llama3_factors(factor, theta, head_dim)
    if factors.shape != (head_dim // 2,) or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError(
            f"{gguf.path}: {ROPE_FACTORS_TENSOR} is not Llama 3's rope scaling (low_freq_factor "
            f"{_LLAMA3_LOW_FREQ_FACTOR:g}, high_freq_factor {_LLAMA3_HIGH_FREQ_FACTOR:g}, original context "
            f"{_LLAMA3_ORIGINAL_CONTEXT}), which is the only one supported; use the model's safetensors"
        )
    return scaling


def _llama3_factors(factor: float, theta: float, head_dim: int) -> Sequence[float]:
    low_wavelength = _LLAMA3_ORIGINAL_CONTEXT / _LLAMA3_LOW_FREQ_FACTOR
    high_wavelength = _LLAMA3_ORIGINAL_CONTEXT / _LLAMA3_HIGH_FREQ_FACTOR
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(factor)
        else:
            smooth = (_LLAMA3_ORIGINAL_CONTEXT / wavelength - _LLAMA3_LOW_FREQ_FACTOR) / (
                _LLAMA3_HIGH_FREQ_FACTOR - _LLAMA3_LOW_FREQ_FACTOR
            )
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


class _Keys:
    """Typed look-ups of an architecture's metadata keys."""

    def __init__(self, gguf: GGUFFile, architecture: str) -> None:
        self._gguf = gguf
        self._architecture = architecture

    def get(self, name: str) -> Any:
        return self._gguf.metadata.get(f"{self._architecture}.{name}")

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def integer(self, name: str) -> int:
        value = self.get(name)
        # Some converters write one count for each layer, though all are equal.
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._bad(name, "an integer of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, float) or not math.isfinite(value):
            raise self._bad(name, "a finite number")
        # 1e-05 was stored as the float32 beside it: write the shortest number that reads back as the same float32.
        return float(str(np.float32(value)))

    def _bad(self, name: str, allowed: str) -> CheckpointError:
        key = f"{self._architecture}.{name}"
        return CheckpointError(f"{self._gguf.path}: {key}={self.get(name)!r}: must be {allowed}")
