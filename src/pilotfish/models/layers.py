"""What the model files share: rotary tables, fused projections, the gated MLP. The rest is written out in each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pilotfish.attention import KVShape, RopeTable
from pilotfish.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from pilotfish.ops import Linear, Ops

__all__ = ["gated_mlp", "kv_shape", "pack_fused", "rope_table", "split_qkv"]


def rope_table(config: ModelConfig, max_model_len: int | None = None) -> RopeTable:
    """Cosines and sines of every position up to the model's context length, or to ``max_model_len`` if that is less.

    In float32 step by step as transformers computes them: at large positions another rounding order would show.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case LinearRopeScaling(factor=factor):
            frequencies = frequencies / factor
        case Llama3RopeScaling() as scaling:
            frequencies = _llama3_frequencies(frequencies, scaling)
        case None:
            pass
    length = config.max_position_embeddings
    if max_model_len is not None:
        length = min(length, max_model_len)
    angles = torch.arange(length, dtype=torch.float32).unsqueeze(1) * frequencies
    return RopeTable(cos=angles.cos(), sin=angles.sin())


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's rule: by the turns that a dimension makes over the original context, keep, divide or blend."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    divided = frequencies / scaling.factor
    blended = (1 - kept) * divided + kept * frequencies
    return torch.where(
        turns < scaling.low_freq_factor, divided, torch.where(turns > scaling.high_freq_factor, frequencies, blended)
    )


def kv_shape(config: ModelConfig, page_size: int, dtype: torch.dtype) -> KVShape:
    """What a KV pool for a model, or for a head of this shape, must hold.

    Args:
        config: of the model.
        page_size: tokens in a page.
        dtype: of keys and values.
    """
    return KVShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        num_q_heads=config.num_q_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
    )


def pack_fused(ops: Ops, weights: Mapping[str, Tensor], names: Sequence[str], bias: bool = False) -> Linear:
    """One linear layer of several that read the same input, outputs in the order of ``names``.

    ``weights`` is read by name only when it is needed: a checkpoint's mapping loads each tensor on access, so that the
    peak of memory is one packed copy of the model and the tensors of one layer.

    Args:
        names: module names; ``NAME.weight`` [N_i, K] and, with ``bias``, ``NAME.bias`` [N_i] are taken.
    """
    weight = torch.cat([weights[f"{name}.weight"] for name in names])
    return ops.pack_linear(weight, torch.cat([weights[f"{name}.bias"] for name in names]) if bias else None)


def split_qkv(qkv: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a fused projection's output [T, (Hq + 2 Hkv) D]: q [T, Hq D], k [T, Hkv D], v [T, Hkv D]."""
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = torch.split(qkv, [q_size, kv_size, kv_size], dim=-1)
    return q, k, v


def gated_mlp(ops: Ops, x: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """SwiGLU (Shazeer, arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``, [T, H] -> [T, H]."""
    return ops.linear(ops.silu_mul(ops.linear(x, gate_up)), down)
