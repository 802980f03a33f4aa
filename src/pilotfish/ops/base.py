"""The op set: everything a model or the sampler computes outside attention.

A model receives an ``Ops`` as an argument and calls nothing else, so the same model file runs on the torch reference
(:mod:`pilotfish.ops.reference`), on the native CPU kernels (:mod:`pilotfish.ops.native`) and, recorded once, as a
replayed list of kernel calls. T tokens, K inputs, N outputs, H hidden size, V vocabulary, R rows of logits.

All ops are row-wise: an output row depends on its input row alone, down to the bit (batch invariance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Linear", "NoiseKeys", "Ops"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer's weight in the layout of the ops that packed it. Opaque to everyone else."""

    in_features: int
    out_features: int
    data: Any
    bias: Any = None


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """Keys of the sampling noise, one per row of logits: see :mod:`pilotfish.ops.noise` for the generator.

    Attributes:
        seeds: int64 [R], the request's seed (the bits of an unsigned 64-bit number).
        sample_indices: int32 [R], which of the request's ``n`` completions.
        positions: int32 [R], the sequence position of the token that is drawn (the prompt's first token is 0).
    """

    seeds: Tensor
    sample_indices: Tensor
    positions: Tensor


class Ops(Protocol):
    """Row-wise tensor ops of one backend. Activations and weights have ``dtype``; logits are float32."""

    name: str
    dtype: torch.dtype

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Take a [N, K] weight (any float dtype, cast to ``dtype``) and a [N] bias into this backend's layout."""
        ...

    def embedding(self, token_ids: Tensor, table: Linear) -> Tensor:
        """Rows of the [V, H] table that ``pack_linear`` took: int32 [T] -> [T, H]."""
        ...

    def linear(self, x: Tensor, weight: Linear, out_dtype: torch.dtype | None = None) -> Tensor:
        """``x @ weight.T + bias``, accumulated in float32: [T, K] -> [T, N] in ``out_dtype`` (default ``dtype``)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, in float32: [T, H] or per head [T, heads, D]; may be strided
        over T. Returns a new contiguous tensor of the same shape."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``residual + x`` rounded to ``dtype``, and its norm: returns (normed [T, H], new residual [T, H]).
        The residual may be updated in place; use only the returned one."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x`` rounded to ``dtype``: [T, H] each -> a fresh [T, H]. Neither operand changes."""
        ...

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """Columns side by side: [T, A], [T, B], ... -> a fresh [T, A + B + ...]; a copy where there is one input.
        ValueError for no input."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for gate_up = [gate | up]: [T, 2 I] -> [T, I], in float32 inside."""
        ...

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x[rows]``: [T, H], int32 [R] -> [R, H]."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Most likely token of each row, the lowest id among equals: float32 [R, V] -> int32 [R]."""
        ...

    def noise_argmax(self, logits: Tensor, inv_temperature: Tensor, noise: NoiseKeys) -> Tensor:
        """``argmax(logits * inv_temperature + gumbel)`` per row, lowest id among equals; a row whose inverse
        temperature is 0 gets the plain argmax without noise (greedy).

        float32 [R, V], float32 [R] -> int32 [R]. Entries of -inf are never chosen unless all are.
        """
        ...
