"""Differentiable attention over whole texts, and over the chains of drafts that start at their rows.

Another backend of the same ``plan`` and ``run``. A *text* step runs all rows of some samples, causally. A *chain* step
k runs one row for each text row j of a chosen set: the head's k-th draft from there, at position j + k. It sees what
the engine's head sees when it drafts: the text rows up to j, which hold true states of the target, and then the chain's
own rows of steps 1 to k, which hold recycled ones (training-time test of EAGLE-3, arXiv:2503.01840; consistent with
inference in the KV too).

The keys of a chain's own rows take the places j + 1 to j + k in the row of scores, where the text's keys are invisible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.attention import ForwardBatch, KVShape, RopeTable
from pilotfish.training.ops import row_blocks

__all__ = ["ChainAttention", "ChainPlan", "TextPlan"]


class ChainAttention:
    """Makes plans over whole texts. It has no pages: a plan keeps the keys and values that its chains need.

    Args:
        shape: of the heads; ``page_size`` is not used.
    """

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape

    def plan(self, batch: ForwardBatch) -> TextPlan:
        """Plan step 0 over whole samples.

        Raises:
            ValueError: a sequence has KV entries besides this batch's tokens, or the batch has a tree.
        """
        lengths = batch.query_start.diff()
        if batch.tree_mask is not None or not torch.equal(lengths, batch.kv_len):
            raise ValueError("training attends over whole texts: kv_len must be the query tokens, and no tree_mask")
        return TextPlan(self.shape, batch)


@dataclass(frozen=True, slots=True)
class _Padding:
    """Ragged rows [N] as padded rows [B, L] and back. Padded rows repeat some row, and are cut off again.

    Attributes:
        row_of: int64 [B * L], the ragged row that each padded one is.
        place_of: int64 [N], where each ragged row is among the padded ones.
        num_seqs: B.
    """

    row_of: Tensor
    place_of: Tensor
    num_seqs: int

    @classmethod
    def of(cls, lengths: Tensor) -> _Padding:
        longest = int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        offsets = torch.arange(longest)
        row_of = (starts.unsqueeze(1) + torch.minimum(offsets, (lengths - 1).clamp(min=0).unsqueeze(1))).flatten()
        present = (offsets < lengths.unsqueeze(1)).flatten()
        return cls(row_of.clamp(max=max(int(lengths.sum()) - 1, 0)), present.nonzero().squeeze(1), lengths.shape[0])

    def pad(self, x: Tensor) -> Tensor:
        """[N, heads, D] -> [B, L, heads, D]."""
        padded: Tensor = _Take.apply(x, self.row_of, self.place_of)  # type: ignore[no-untyped-call]
        return padded.view(self.num_seqs, -1, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [N, C]."""
        return x.flatten(0, 1).index_select(0, self.place_of)


class TextPlan:
    """Step 0. See :class:`pilotfish.attention.AttentionPlan`."""

    def __init__(self, shape: KVShape, batch: ForwardBatch) -> None:
        self._shape = shape
        self._positions = batch.positions.long()
        self._lengths = batch.query_start.diff().long()
        self._starts = batch.query_start[:-1].long()
        self._padding = _Padding.of(self._lengths)
        longest = int(self._lengths.max())
        self._limits = torch.arange(longest).unsqueeze(0)  # alike for all samples
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None) -> Tensor:
        q, k, v = (self._padding.pad(x) for x in _rotated(self._shape, q, k, v, rope, self._positions))
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))  # [B, Hkv, L, D]
        self._keys[layer] = (k, v)
        out: Tensor = _Attend.apply(q, k, v, self._limits)  # type: ignore[no-untyped-call]
        return self._padding.unpad(out)

    def chains(self, rows: Tensor) -> _Chains:
        """Chains that start at the text rows ``rows`` (int64 [R], ascending): call ``step`` once for each draft."""
        sequence = torch.searchsorted(self._starts, rows, right=True) - 1
        lengths = torch.bincount(sequence, minlength=self._starts.shape[0])
        padding = _Padding.of(lengths)
        first = padding.row_of
        # Where in its text each padded row is; a sample without any row repeats another's, and is cut off again.
        limits = (rows - self._starts[sequence])[first].view(padding.num_seqs, -1)
        return _Chains(self._shape, padding, limits, self._keys)


@dataclass(slots=True)
class _Chains:
    """The chains of a text plan, with the keys and values of the steps so far."""

    shape: KVShape
    padding: _Padding
    limits: Tensor
    text_keys: dict[int, tuple[Tensor, Tensor]]
    own_keys: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def step(self, positions: Tensor) -> ChainPlan:
        """Plan the next draft of all chains: int64 [R] rope positions."""
        return ChainPlan(self, positions)


class ChainPlan:
    """One draft of each chain. See :class:`pilotfish.attention.AttentionPlan`; T is R, the number of chains."""

    def __init__(self, chains: _Chains, positions: Tensor) -> None:
        self._chains = chains
        self._positions = positions.long()

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None) -> Tensor:
        chains = self._chains
        padding = chains.padding
        q, k, v = (padding.pad(x) for x in _rotated(chains.shape, q, k, v, rope, self._positions))
        own = chains.own_keys.setdefault(layer, [])
        own.append((k, v))
        flat = [x for pair in own for x in pair]
        text_k, text_v = chains.text_keys[layer]
        out: Tensor = _Attend.apply(q, text_k, text_v, chains.limits, *flat)  # type: ignore[no-untyped-call]
        return padding.unpad(out)


def _rotated(
    shape: KVShape, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split into heads [T, heads, D]; q comes scaled by D ** -0.5."""
    scale = shape.head_dim**-0.5
    q = q.reshape(-1, shape.num_q_heads, shape.head_dim)
    k = k.reshape(-1, shape.num_kv_heads, shape.head_dim)
    v = v.reshape(-1, shape.num_kv_heads, shape.head_dim)
    if rope is None:
        return q * scale, k, v
    cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
    rotated_q: Tensor = _Rotate.apply(q, cos * scale, sin * scale)  # type: ignore[no-untyped-call]
    rotated_k: Tensor = _Rotate.apply(k, cos, sin)  # type: ignore[no-untyped-call]
    return rotated_q, rotated_k, v


class _Rotate(torch.autograd.Function):
    """Rotary embedding (Su et al., RoFormer; halves paired as in HF) of [T, heads, D] by [T, 1, D / 2] tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    for block in row_blocks(x.shape[0], x.shape[1] * x.shape[2]):
        first, second = x[block, :, :half].float(), x[block, :, half:].float()
        c, s = cos[block], sin[block]
        out[block, :, :half] = first * c - second * s
        out[block, :, half:] = second * c + first * s
    return out


class _Take(torch.autograd.Function):
    """``x[row_of]``, where the gradient of x's row i is that of row ``place_of[i]`` alone: all others are padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_of: Tensor, place_of: Tensor) -> Tensor:
        ctx.save_for_backward(place_of)
        return x.index_select(0, row_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_of,) = ctx.saved_tensors
        return grads[0].index_select(0, place_of), None, None


class _Attend(torch.autograd.Function):
    """Softmax attention of q [B, n, Hq, D] (scaled) over text keys [B, Hkv, L, D] and n own keys of each row.

    Row i of sample b sees text keys up to ``limits[b, i]`` and, in this order, the own keys: ``own`` is k and v in
    turn, [B, n, Hkv, D] each. Returns [B, n, Hq * D].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, limits: Tensor, *own: Tensor) -> Tensor:
        num_seqs, num_rows, num_q_heads, head_dim = q.shape
        num_kv_heads, num_keys = k.shape[1:3]
        group = num_q_heads // num_kv_heads
        own_k, own_v = own[0::2], own[1::2]
        steps = len(own_k)
        # One product for a KV head and the query heads that share it: [B, Hkv, G n, D].
        rows = q.view(num_seqs, num_rows, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).contiguous()
        keys = F.pad(k, (0, 0, 0, steps)) if steps else k
        scores = torch.matmul(rows.flatten(2, 3), keys.transpose(2, 3))
        scores = scores.view(num_seqs, num_kv_heads, group, num_rows, num_keys + steps)
        places = limits.unsqueeze(-1) + torch.arange(1, steps + 1)  # [B, n, steps]
        index = places[:, None, None].expand(num_seqs, num_kv_heads, group, num_rows, steps)
        if steps:
            scores.scatter_(-1, index, torch.stack([_dot(rows, x) for x in own_k], -1).to(scores.dtype))
        columns = torch.arange(num_keys + steps)
        hidden = torch.zeros(limits.shape + columns.shape, dtype=q.dtype)
        hidden.masked_fill_(columns > (limits + steps).unsqueeze(-1), -torch.inf)
        scores += hidden[:, None, None]
        weights = torch.softmax(scores, dim=-1)
        own_weights = weights.gather(-1, index)  # [B, Hkv, G, n, steps]
        if steps:
            weights.scatter_(-1, index, 0.0)
        weights = weights[..., :num_keys]
        out = torch.matmul(weights.flatten(2, 3), v).view(rows.shape)
        for i, x in enumerate(own_v):
            out += own_weights[..., i : i + 1] * _spread(x)
        ctx.save_for_backward(rows, k, v, weights, own_weights, out, *own)
        return out.permute(0, 3, 1, 2, 4).reshape(num_seqs, num_rows, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, k, v, weights, own_weights, out, *own = ctx.saved_tensors
        own_k, own_v = own[0::2], own[1::2]
        num_seqs, num_kv_heads, group, num_rows, head_dim = rows.shape
        grad_out = grads[0].view(num_seqs, num_rows, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).contiguous()
        total = (grad_out.float() * out).sum(-1, keepdim=True)  # sum of weight * d weight over a row's keys

        grad_scores = torch.matmul(grad_out.flatten(2, 3), v.transpose(2, 3)).view(weights.shape)
        grad_scores.sub_(total.to(grad_scores.dtype)).mul_(weights)  # weights are 0 in the places of own keys
        flat = grad_scores.flatten(2, 3)
        grad_rows = torch.matmul(flat, k).view(rows.shape)
        grad_k = torch.matmul(flat.transpose(2, 3), rows.flatten(2, 3))
        grad_v = torch.matmul(weights.flatten(2, 3).transpose(2, 3), grad_out.flatten(2, 3))

        grad_own: list[Tensor] = []
        for i, (key, value) in enumerate(zip(own_k, own_v, strict=True)):
            weight = own_weights[..., i : i + 1]
            grad_score = (_dot(grad_out, value).unsqueeze(-1) - total) * weight.float()
            grad_score = grad_score.to(rows.dtype)
            grad_rows += grad_score * _spread(key)
            grad_own += [_gather(grad_score * rows), _gather(weight * grad_out)]
        grad_q = grad_rows.permute(0, 3, 1, 2, 4).reshape(num_seqs, num_rows, -1, head_dim)
        return grad_q, grad_k, grad_v, None, *grad_own


def _spread(x: Tensor) -> Tensor:
    """[B, n, Hkv, D] -> [B, Hkv, 1, n, D], beside grouped queries."""
    return x.transpose(1, 2).unsqueeze(2)


def _gather(x: Tensor) -> Tensor:
    """Sum over the query heads of a group: [B, Hkv, G, n, D] -> [B, n, Hkv, D]."""
    return x.sum(2).transpose(1, 2)


def _dot(rows: Tensor, own: Tensor) -> Tensor:
    """[B, Hkv, G, n, D] times each row's own [B, n, Hkv, D] -> float32 [B, Hkv, G, n]."""
    return (rows * _spread(own)).sum(-1, dtype=torch.float32)
