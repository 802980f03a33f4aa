"""Paged attention in plain torch: what every other backend is compared with, and the fallback where no kernel runs.

Each sequence's keys and values are gathered from its pages; each block of its query rows does a masked softmax over
them in float32. Sums run over key chunks of a fixed size, in order: keys behind a row's horizon add exact zeros, so a
row's bits do not depend on how far the batch's other rows look, nor on how the sequence was cut into forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.attention.base import ForwardBatch, KVShape, RopeTable, check_first_key

__all__ = ["ReferenceAttention"]

_BLOCK_ROWS = 16
_CHUNK_KEYS = 64
_VALUE_GRAIN = 16  # columns of a product: of fewer than a vector, MKL sums even and odd rows in different orders on AMD


@dataclass(frozen=True, slots=True)
class _SequencePlan:
    """One sequence's part of a forward pass. n query rows, L keys; Np and Lp are padded to whole blocks and chunks.

    Attributes:
        rows: where its query rows are among the batch's tokens.
        slots: int64 [L], where its keys and values are in the pool, in sequence order.
        visible: bool [Np, Lp], which keys each row sees. Rows that are padding see none.
    """

    rows: slice
    slots: Tensor
    visible: Tensor


class ReferenceAttention:
    """A KV pool as two tensors [layers, pages, page_size, Hkv, D] in ``shape.dtype``, zero at first, and plans over it.

    Args:
        shape: of the pool and of the heads.
        num_pages: pages that sequences can share out.
        first_key: 0, or 1 to hide the key of position 0 from every query (see ``AttentionBackend``). A query at
            position 0 then sees nothing and gets zeros.

    Raises:
        ValueError: query heads are not a multiple of KV heads, there is no page, or ``first_key`` is neither 0 nor 1.
    """

    def __init__(self, shape: KVShape, num_pages: int, first_key: int = 0) -> None:
        check_first_key(first_key)
        if shape.num_q_heads % shape.num_kv_heads:
            raise ValueError(f"num_q_heads={shape.num_q_heads} is not a multiple of num_kv_heads={shape.num_kv_heads}")
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: a pool needs at least one page")
        self.shape = shape
        self.num_layers = shape.num_layers
        self.num_pages = num_pages
        self.page_size = shape.page_size
        self.first_key = first_key
        pool = (shape.num_layers, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(pool, dtype=shape.dtype)
        self.values = torch.zeros(pool, dtype=shape.dtype)

    def plan(self, batch: ForwardBatch) -> ReferencePlan:
        """Find each sequence's slots and what each of its rows sees. ValueError where lengths and pages disagree."""
        return ReferencePlan(self, batch)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy K and V of all layers, pair after pair: a slot may be a target and later a source."""
        for pool in (self.keys, self.values):
            slots = pool.flatten(1, 2)
            for i, j in zip(source.tolist(), target.tolist(), strict=True):
                slots[:, j] = slots[:, i]


class ReferencePlan:
    """See :class:`pilotfish.attention.AttentionPlan`. Runs without gradients: the pool is state, not a graph."""

    def __init__(self, backend: ReferenceAttention, batch: ForwardBatch) -> None:
        self._backend = backend
        self._positions = batch.positions.long()
        self._slots = batch.slots.long()
        self._sequences = _plan_sequences(batch, backend.page_size, backend.first_key)

    @torch.no_grad()
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None) -> Tensor:
        shape = self._backend.shape
        q = q.view(-1, shape.num_q_heads, shape.head_dim)
        k = k.view(-1, shape.num_kv_heads, shape.head_dim)
        v = v.view(-1, shape.num_kv_heads, shape.head_dim)
        if rope is not None:
            cos, sin = rope.cos[self._positions].unsqueeze(1), rope.sin[self._positions].unsqueeze(1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)

        keys = self._backend.keys[layer].flatten(0, 1)  # [slots, Hkv, D], a view of the pool
        values = self._backend.values[layer].flatten(0, 1)
        keys.index_copy_(0, self._slots, k.to(shape.dtype))
        values.index_copy_(0, self._slots, v.to(shape.dtype))

        out = torch.empty(q.shape, dtype=q.dtype)
        for sequence in self._sequences:
            own_values = values[sequence.slots].float()  # a copy
            own_values[: self._backend.first_key] = 0  # of weight 0, but 0 times NaN, which may lie there, is NaN
            out[sequence.rows] = _attend(
                q[sequence.rows].float(), keys[sequence.slots].float(), own_values, sequence.visible
            ).to(q.dtype)
        return out.flatten(1)


def _plan_sequences(batch: ForwardBatch, page_size: int, first_key: int) -> list[_SequencePlan]:
    starts, lengths, page_starts = batch.query_start.tolist(), batch.kv_len.tolist(), batch.page_start.tolist()
    offsets = torch.arange(page_size)
    sequences = []
    for s, num_keys in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        num_rows = rows.stop - rows.start
        pages = batch.pages[page_starts[s] : page_starts[s + 1]].long()
        if not 0 <= num_rows <= num_keys <= pages.numel() * page_size:
            raise ValueError(
                f"sequence {s} has {num_rows} query tokens, kv_len={num_keys} and {pages.numel()} pages of "
                f"{page_size} tokens: kv_len must count the query tokens, and the pages must hold kv_len tokens"
            )
        if num_rows == 0:
            continue
        slots = (pages.unsqueeze(1) * page_size + offsets).flatten()[:num_keys]
        tree = None if batch.tree_mask is None else batch.tree_mask[rows]
        sequences.append(_SequencePlan(rows, slots, _visible(num_rows, num_keys, tree, first_key)))
    return sequences


def _visible(num_rows: int, num_keys: int, tree: Tensor | None, first_key: int) -> Tensor:
    """bool [Np, Lp]: the last ``num_rows`` keys are the rows' own tokens, causal or by the bits of ``tree`` [n, W].
    Keys before ``first_key`` are hidden from all."""
    past = num_keys - num_rows
    if tree is None:
        tail = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    else:
        if tree.shape[1] * 64 < num_rows:
            raise ValueError(f"tree_mask has {tree.shape[1]} words of 64 bits for a query tail of {num_rows} tokens")
        bits = torch.arange(num_rows)
        # torch has no shifts of uint64; the sign bit that an int64 shift drags along is masked off.
        tail = (tree.view(torch.int64)[:, bits // 64] >> (bits % 64)) & 1 == 1
    visible = torch.zeros(num_rows + -num_rows % _BLOCK_ROWS, num_keys + -num_keys % _CHUNK_KEYS, dtype=torch.bool)
    visible[:num_rows, :past] = True
    visible[:num_rows, past:num_keys] = tail
    visible[:, :first_key] = False
    return visible


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] by cos, sin [T, 1, D / 2] (Su et al., RoFormer; halves paired as in HF)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v: float32 q [n, Hq, D], k and v [L, Hkv, D], visible [Np, Lp] -> [n, Hq, D]."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    padded_rows, padded_keys = visible.shape
    # Query head h attends with KV head h // group: a group's heads lie together in one product.
    grouped = F.pad(q, (0, 0, 0, 0, 0, padded_rows - num_rows)).view(padded_rows, num_kv_heads, -1, head_dim)
    k, v = (F.pad(x, (0, 0, 0, 0, 0, padded_keys - x.shape[0])).transpose(0, 1) for x in (k, v))
    v = F.pad(v, (0, -head_dim % _VALUE_GRAIN))
    # [Hkv, D, C] and [Hkv, C, D padded] each.
    key_chunks = [chunk.transpose(1, 2).contiguous() for chunk in torch.split(k, _CHUNK_KEYS, dim=1)]
    value_chunks = [chunk.contiguous() for chunk in torch.split(v, _CHUNK_KEYS, dim=1)]

    outputs = []
    for block, seen in zip(torch.split(grouped, _BLOCK_ROWS), torch.split(visible, _BLOCK_ROWS), strict=True):
        rows = block.permute(1, 2, 0, 3).flatten(1, 2).contiguous()  # [Hkv, group * 16, D]
        group = rows.shape[1] // _BLOCK_ROWS
        hidden = ~seen.repeat(group, 1)
        scores = torch.cat([torch.bmm(rows, chunk) for chunk in key_chunks], dim=-1) * head_dim**-0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        # Finite also for a row that sees nothing, so that its weights are exp(-inf) = 0.
        highest = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(scores - highest)

        total = torch.zeros(num_kv_heads, rows.shape[1], 1)
        weighted = torch.zeros(num_kv_heads, rows.shape[1], v.shape[-1])
        for w, value_chunk in zip(torch.split(weights, _CHUNK_KEYS, dim=-1), value_chunks, strict=True):
            w = w.contiguous()
            total = total + w.sum(dim=-1, keepdim=True)
            weighted = weighted + torch.bmm(w, value_chunk)
        total = total.masked_fill(total == 0, 1.0)  # of a row that sees nothing, whose output is 0
        out = (weighted / total)[..., :head_dim].reshape(num_kv_heads, group, _BLOCK_ROWS, head_dim)
        outputs.append(out.permute(2, 0, 1, 3).reshape(_BLOCK_ROWS, num_q_heads, head_dim))
    return torch.cat(outputs)[:num_rows]
