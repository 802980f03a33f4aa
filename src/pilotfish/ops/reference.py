"""The op set in plain torch: what every other backend is compared with, and the fallback where no kernel runs.

Obviously right comes first: arithmetic is in float32 whatever the dtype is, and each result is rounded once. Everything
except the two argmax ops is differentiable, and nothing writes into its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.ops import noise as sampling_noise
from pilotfish.ops.base import Linear, NoiseKeys

__all__ = ["TorchOps"]

_BLOCK_ROWS = 16
"""Rows of one matrix product. A BLAS chooses its kernel, and with it the order of a sum, by the shape of the product;
with one shape for every call, a row's bits do not depend on how many rows came with it."""


class TorchOps:
    """The :class:`pilotfish.ops.Ops` of torch on the CPU, for ``torch.float32`` or ``torch.bfloat16``.

    Batch invariance: matrix products are done in zero-padded blocks of 16 rows, so that every row goes through the same
    product in every batch. That makes rows equal to the bit where the BLAS treats all rows of a product alike (MKL on
    x86 does, see the tests), and equal within rounding elsewhere.
    """

    name = "torch"

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype={dtype}: must be torch.float32 or torch.bfloat16")
        self.dtype = dtype

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Round [N, K] to ``dtype`` and hold it in float32: more memory than bfloat16, no conversion on every call."""
        out_features, in_features = weight.shape
        if bias is not None and bias.shape != (out_features,):
            raise ValueError(f"bias of shape {tuple(bias.shape)} for a weight of shape {tuple(weight.shape)}")
        return Linear(
            in_features=in_features,
            out_features=out_features,
            data=weight.to(self.dtype).float(),
            bias=None if bias is None else bias.float(),
        )

    def embedding(self, token_ids: Tensor, table: Linear) -> Tensor:
        return F.embedding(token_ids, table.data).to(self.dtype)

    def linear(self, x: Tensor, weight: Linear, out_dtype: torch.dtype | None = None) -> Tensor:
        num_rows = x.shape[0]
        padding = -num_rows % _BLOCK_ROWS
        # The pad copies even where there is nothing to add, so that blocks are aligned alike in every call.
        padded = F.pad(x.float(), (0, 0, 0, padding))
        blocks = [F.linear(block, weight.data, weight.bias) for block in torch.split(padded, _BLOCK_ROWS)]
        return torch.cat(blocks)[:num_rows].to(out_dtype or self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float().contiguous()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * scale * weight.float()).to(self.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = self.add(x, residual)
        return self.rms_norm(residual, weight, eps), residual

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return (residual.float() + x.float()).to(self.dtype)

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        if not xs:
            raise ValueError("concat got no tensor: must be at least one")
        return torch.cat(tuple(xs), dim=-1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(self.dtype)

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1).to(torch.int32)

    def noise_argmax(self, logits: Tensor, inv_temperature: Tensor, noise: NoiseKeys) -> Tensor:
        gumbel = sampling_noise.gumbel(noise.seeds, noise.sample_indices, noise.positions, logits.shape[-1])
        scale = inv_temperature.unsqueeze(-1)
        # Not by arithmetic alone: a greedy row's -inf * 0 would be NaN.
        scores = torch.where(scale == 0, logits, logits * scale + gumbel)
        return self.argmax(scores)
