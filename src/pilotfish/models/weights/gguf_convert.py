"""Converts a GGUF file into an ordinary Hugging Face folder.

Quantised tensors are dequantised (the gguf package's formulas) to float32, and rounded once to the requested dtype.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.weights.gguf_config import ROPE_FACTORS_TENSOR, generation_config, hf_config
from pilotfish.models.weights.gguf_reader import GGUFFile, GGUFTensor
from pilotfish.models.weights.gguf_tokenizer import build_tokenizer, tokenizer_config
from pilotfish.models.weights.safetensors_ import write_safetensors

__all__ = ["CONVERTER_VERSION", "convert_gguf"]

CONVERTER_VERSION = 1
"""Part of the cache key: raised whenever the converter writes something else for the same file."""

_KINDS = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)

_GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<suffix>weight|bias)")


def convert_gguf(path: Path, folder: Path, dtype: torch.dtype, progress: Callable[[float], None]) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` and the tokenizer's files.

    Args:
        path: of the GGUF file.
        folder: an empty folder.
        dtype: of the weights written. float32 is the exact dequantisation, bfloat16 its rounding to nearest even.
        progress: called with the fraction of the weights written, up to 1.

    Raises:
        CheckpointError: a truncated or corrupt file.
        UnsupportedModelError: an architecture, tensor type or tokenizer that is not converted.
    """
    with GGUFFile.open(path) as gguf:
        config = hf_config(gguf)
        num_tokens = len(gguf.metadata.get("tokenizer.ggml.tokens") or ())
        if num_tokens > config["vocab_size"]:
            raise CheckpointError(
                f"{path}: the tokenizer has {num_tokens} tokens, but token_embd.weight {config['vocab_size']} rows"
            )
        _write_json(folder / "config.json", config | {"torch_dtype": str(dtype).removeprefix("torch.")})
        _write_json(folder / "generation_config.json", generation_config(gguf))
        build_tokenizer(gguf).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf))
        names = {
            hf_name(gguf, tensor): tensor for tensor in gguf.tensors.values() if tensor.name != ROPE_FACTORS_TENSOR
        }
        shapes = {name: tensor.shape for name, tensor in names.items()}
        tensors = _tensors(gguf, names, config, progress)
        write_safetensors(folder / "model.safetensors", dtype, shapes, tensors)


def hf_name(gguf: GGUFFile, tensor: GGUFTensor) -> str:
    """The Hugging Face name of a GGUF tensor.

    Raises:
        UnsupportedModelError: the tensor is of no supported architecture, or its type is not dequantised.
    """
    if tensor.kind not in _KINDS:
        raise UnsupportedModelError(
            f"{gguf.path}: tensor {tensor.name} has the type {tensor.kind.name}, which is not supported; supported are "
            f"{', '.join(kind.name for kind in _KINDS)}"
        )
    match = _TENSOR_NAME.fullmatch(tensor.name)
    layer = match["layer"] if match else None
    part = (_GLOBAL_NAMES if layer is None else _LAYER_NAMES).get(match["part"]) if match else None
    if match is None or part is None:
        raise UnsupportedModelError(
            f"{gguf.path}: tensor {tensor.name} is not part of a {gguf.metadata['general.architecture']} model that is "
            "supported"
        )
    return f"{part}.{match['suffix']}" if layer is None else f"model.layers.{layer}.{part}.{match['suffix']}"


def _tensors(
    gguf: GGUFFile, names: Mapping[str, GGUFTensor], config: Mapping[str, Any], progress: Callable[[float], None]
) -> Iterator[tuple[str, Tensor]]:
    total = sum(tensor.num_bytes for tensor in names.values())
    done = 0
    for name, tensor in names.items():
        values = _dequantised(gguf, tensor)
        if config["model_type"] == "llama" and re.search(r"self_attn\.[qk]_proj\.weight$", name):
            num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            if values.ndim != 2 or values.shape[0] % (2 * num_heads):
                raise CheckpointError(
                    f"{gguf.path}: tensor {tensor.name} has shape {list(tensor.shape)}: must be two-dimensional, with "
                    f"an even number of rows for each of {num_heads} heads"
                )
            values = _unpermuted(values, num_heads)
        yield name, torch.from_numpy(values)
        done += tensor.num_bytes
        progress(done / total)


def _dequantised(gguf: GGUFFile, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    data = gguf.data(tensor)
    if tensor.kind == GGMLQuantizationType.F32:
        return data.view(np.float32).reshape(tensor.shape).copy()
    if tensor.kind == GGMLQuantizationType.F16:
        return data.view(np.float16).reshape(tensor.shape).astype(np.float32)
    num_rows = int(np.prod(tensor.shape[:-1]))
    values: npt.NDArray[np.float32] = dequantize(data.reshape(num_rows, -1), tensor.kind)
    return values.reshape(tensor.shape)


def _unpermuted(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of a head, [num_heads * head_dim, in].

    llama.cpp rotates neighbours (2i, 2i + 1) in llama models, Hugging Face rotates (i, i + head_dim / 2); its
    converter moves row i of a head's first half to 2i and of the second half to 2i + 1.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
