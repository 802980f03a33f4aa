"""The op set of the trainer: differentiable, one matrix product a linear layer, bfloat16 or float32.

Parameters are float32 masters; what a head casts them to (:attr:`TrainOps.dtype`) keeps its graph, which is autocast
written out. Norms and activations are computed in float32 and rounded once, as the engine's kernels do it, but in
blocks of rows that stay in the cache: as chains of whole-tensor float32 ops they would take longer than the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.ops import Linear, NoiseKeys

__all__ = ["TrainOps", "row_blocks"]

_BLOCK_ELEMENTS = 1 << 17
"""Elements of a block of rows: half a MiB in float32, so that a block and its temporaries fit into a core's L2."""


def row_blocks(num_rows: int, width: int) -> Iterator[slice]:
    """Slices of rows that cover ``num_rows`` rows of ``width`` elements, in blocks of about 128k elements."""
    step = max(1, _BLOCK_ELEMENTS // width)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


class TrainOps:
    """Differentiable :class:`pilotfish.ops.Ops` of torch on the CPU.

    Args:
        dtype: of activations and of the products' operands; ``torch.bfloat16`` or ``torch.float32``.
    """

    name = "train"

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype={dtype}: must be torch.float32 or torch.bfloat16")
        self.dtype = dtype

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Cast [N, K] and [N]; gradients flow to what was cast."""
        out_features, in_features = weight.shape
        return Linear(
            in_features=in_features,
            out_features=out_features,
            data=weight.to(self.dtype),
            bias=None if bias is None else bias.to(self.dtype),
        )

    def embedding(self, token_ids: Tensor, table: Linear) -> Tensor:
        return F.embedding(token_ids, table.data)

    def linear(self, x: Tensor, weight: Linear, out_dtype: torch.dtype | None = None) -> Tensor:
        return F.linear(x, weight.data, weight.bias).to(out_dtype or self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _SiluMul.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """Columns side by side, in a fresh tensor."""
        return torch.cat(list(xs), dim=-1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x``, rounded to ``dtype``."""
        return residual + x

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1).to(torch.int32)

    def noise_argmax(self, logits: Tensor, inv_temperature: Tensor, noise: NoiseKeys) -> Tensor:
        """Training never samples.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("TrainOps does not sample: run the head on the engine's ops for that")


class _RmsNorm(torch.autograd.Function):
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        out = torch.empty_like(rows)
        scales = torch.empty(rows.shape[0], 1)
        weight32 = weight.float()
        for block in row_blocks(rows.shape[0], width):
            x32 = rows[block].float()
            scale = (torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_() / width + eps).rsqrt_()
            scales[block] = scale
            # A float32 cast is the very tensor: the input must not change.
            out[block] = (x32 * scale).mul_(weight32)
        ctx.save_for_backward(rows, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scales = ctx.saved_tensors
        width = rows.shape[-1]
        grad_out = grads[0].reshape(-1, width)
        grad_rows = torch.empty_like(rows)
        grad_weight = torch.zeros(width)
        weight32 = weight.float()
        for block in row_blocks(rows.shape[0], width):
            scale = scales[block]
            unit = rows[block].float() * scale
            grad = grad_out[block].float()
            grad_weight += (grad * unit).sum(0)
            grad = grad * weight32
            # What changes only the length of x changes nothing: the part along x goes.
            along = (grad * unit).sum(-1, keepdim=True) / width
            grad_rows[block] = grad.sub_(unit.mul_(along)).mul_(scale)
        return grad_rows.view(grads[0].shape), grad_weight.to(weight.dtype), None


class _SiluMul(torch.autograd.Function):
    """silu(gate) * up for [gate | up]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(gate_up.shape[0], width)
        for block in row_blocks(gate_up.shape[0], width):
            gate, up = gate_up[block, :width].float(), gate_up[block, width:]
            out[block] = F.silu(gate).mul_(up)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        width = gate_up.shape[-1] // 2
        result = torch.empty_like(gate_up)
        for block in row_blocks(gate_up.shape[0], width):
            gate, up = gate_up[block, :width].float(), gate_up[block, width:].float()
            grad = grads[0][block].float()
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            result[block, width:] = silu * grad
            # d silu(g) / dg = s + silu (1 - s)
            result[block, :width] = (sigmoid + silu * (1 - sigmoid)).mul_(up).mul_(grad)
        return result
