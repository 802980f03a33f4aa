"""The one batch layout of every forward pass, and the two calls of an attention backend: plan once, run in each layer.

The argument lists follow FlashInfer's ragged/paged layout (``qo_indptr`` is ``query_start``, ``kv_indptr`` is
``page_start``, ``kv_indices`` is ``pages``), so that a CUDA backend is a thin adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["AttentionBackend", "AttentionPlan", "ForwardBatch", "KVShape", "RopeTable"]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one forward pass, ragged: prefill, chunk, decode, verify, tree and draft look alike.

    T tokens, S sequences. Sequence s owns the tokens ``query_start[s]:query_start[s + 1]``; they are the last ones of
    its ``kv_len[s]`` KV entries, which lie in the pages ``pages[page_start[s]:page_start[s + 1]]`` in order.

    Attributes:
        token_ids: int32 [T].
        positions: int32 [T], for rope.
        slots: int32 [T], where each token's K and V go: ``page * page_size + offset``.
        query_start: int32 [S + 1].
        kv_len: int32 [S], KV entries including this batch's own tokens.
        page_start: int32 [S + 1].
        pages: int32 [page_start[S]].
        tree_mask: None for causal tails. Else uint64 [T, W]: bit j of row t (word j // 64) says that token t sees
            token j of its own query tail (its ancestors and itself); the rest of the KV is visible to all.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start: Tensor
    kv_len: Tensor
    page_start: Tensor
    pages: Tensor
    tree_mask: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.kv_len.shape[0]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines of rotary position embedding, float32 [max_model_len, rotary_dim / 2] each.

    Dimension i of the first half of a head is rotated with dimension i of the second half (the Hugging Face layout).
    """

    cos: Tensor
    sin: Tensor


class AttentionPlan(Protocol):
    """Everything a batch's attention needs that does not depend on the layer."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None) -> Tensor:
        """Rotate q and k (unless ``rope`` is None), write k and v to the layer's pages, attend.

        Args:
            layer: index into the KV pool.
            q: [T, Hq * D], may be a strided view; may be rotated in place.
            k: [T, Hkv * D], as q.
            v: [T, Hkv * D].
            rope: tables of this model.

        Returns:
            [T, Hq * D], contiguous, in q's dtype. Softmax scale is D ** -0.5.
        """
        ...


class AttentionBackend(Protocol):
    """Owns a KV pool's tensors (layout is its own business) and makes plans over it.

    Our backends take a ``first_key``, the first KV entry of a sequence that queries attend to. It is 0 but for heads
    that have no row for position 0: there it is 1, and what lies in a sequence's first slot never matters.
    """

    num_layers: int
    num_pages: int
    page_size: int

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Prepare one forward pass over ``batch``."""
        ...

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy K and V of all layers from slots ``source`` to slots ``target`` (int32 [N] each): tree compaction."""
        ...


def check_first_key(first_key: int) -> None:
    """Raises ValueError unless ``first_key`` is 0 or 1."""
    if first_key not in (0, 1):
        raise ValueError(
            f"first_key={first_key}: must be 0 (queries attend to all keys) or 1 (the key of position 0 is hidden)"
        )


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides the size of a KV pool."""

    num_layers: int
    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes over all layers, K and V (without a backend's padding)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.page_size * self.dtype.itemsize
