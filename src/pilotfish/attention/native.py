"""Paged attention on the native CPU kernels.

Keys are stored transposed, 16 tokens a block, and values in pairs of tokens, so that a page is an AMX tile without any
shuffling (the exact layout: native/kernels.h). The plan of a batch is the addresses of its arrays; its ``run`` appends
two kernel calls to the sink of the ops it was made with, so the same plan runs at once or is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pilotfish import _native
from pilotfish.attention.base import AttentionPlan, ForwardBatch, KVShape, RopeTable, check_first_key
from pilotfish.errors import ConfigError
from pilotfish.ops.native import NativeOps, dtype_name

__all__ = ["NativeAttention", "NativePlan"]

_PAGE_GRAIN = 16  # tokens in a block of keys
_HEAD_GRAIN = 32  # head dimensions in a block: one k-step of a tile product


class NativeAttention:
    """:class:`pilotfish.attention.AttentionBackend` over KV pages in huge-page memory, zeroed.

    Args:
        ops: decides threads, instruction set, and whether plans run at once or are recorded.
        shape: of the KV pool.
        num_pages: pages of the pool, in every layer.
        max_tokens: most tokens of a batch.
        max_seqs: most sequences of a batch.
        max_kv_len: longest sequence, in tokens.
        first_key: 0, or 1 to hide the key of position 0 from every query (see ``AttentionBackend``). A query at
            position 0 then sees nothing and gets zeros.

    Raises:
        ConfigError: ``page_size`` is not a multiple of 16, heads don't group, or the dtype is not the ops'.
        ValueError: ``first_key`` is neither 0 nor 1.
    """

    def __init__(
        self,
        ops: NativeOps,
        shape: KVShape,
        num_pages: int,
        *,
        max_tokens: int,
        max_seqs: int,
        max_kv_len: int,
        first_key: int = 0,
    ) -> None:
        _check(ops, shape)
        check_first_key(first_key)
        self.ops = ops
        self.shape = shape
        self.num_layers = shape.num_layers
        self.num_pages = num_pages
        self.page_size = shape.page_size
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.max_kv_len = max_kv_len
        self.first_key = first_key
        d_pad = -(-shape.head_dim // _HEAD_GRAIN) * _HEAD_GRAIN
        plane = num_pages * shape.num_kv_heads * shape.page_size * d_pad * shape.dtype.itemsize
        self._pool = _native.HugeBuffer(max(2 * shape.num_layers * plane, 1))
        self.layers = [
            _native.KVLayer(
                dtype_name(shape.dtype),
                shape.num_q_heads,
                shape.num_kv_heads,
                shape.head_dim,
                d_pad,
                shape.page_size,
                self._pool.address + 2 * layer * plane,
                self._pool.address + (2 * layer + 1) * plane,
                first_key,
            )
            for layer in range(shape.num_layers)
        ]
        scratch = _native.attention_scratch_bytes(
            self.layers[0], max_tokens, max_seqs, max_kv_len, ops.team.num_threads
        )
        self.scratch = _native.HugeBuffer(max(scratch, 1))

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV pool, padding included."""
        return self._pool.num_bytes

    def plan(self, batch: ForwardBatch) -> NativePlan:
        if batch.num_tokens > self.max_tokens or batch.num_seqs > self.max_seqs:
            raise ValueError(
                f"A batch of {batch.num_tokens} tokens in {batch.num_seqs} sequences: this backend was made for "
                f"max_tokens={self.max_tokens}, max_seqs={self.max_seqs}"
            )
        longest = int(batch.kv_len.max()) if batch.num_seqs else 0
        if longest > self.max_kv_len:
            raise ValueError(f"A sequence of {longest} tokens: this backend was made for max_kv_len={self.max_kv_len}")
        return NativePlan(self, batch)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        source, target = (x.to(torch.int32).contiguous() for x in (source, target))
        if source.shape != target.shape:
            raise ValueError(f"copy_slots got {source.shape[0]} sources and {target.shape[0]} targets: must be equal")
        program = _native.Program(self.ops.team, self.ops.isa)
        for layer in self.layers:
            program.copy_slots(layer, source.data_ptr(), target.data_ptr())
        program.run(source.shape[0])


class NativePlan(AttentionPlan):
    """A batch's arrays, as the kernels take them.

    The kernels read the arrays when they run: a plan over buffers that stay where they are, recorded once, serves every
    batch that is written into them, after ``resize``.
    """

    def __init__(self, backend: NativeAttention, batch: ForwardBatch) -> None:
        arrays = (batch.positions, batch.slots, batch.query_start, batch.kv_len, batch.page_start, batch.pages)
        for x in arrays:
            if x.dtype != torch.int32 or not x.is_contiguous():
                raise ValueError(f"A batch's arrays must be contiguous int32, got {x.dtype} {list(x.shape)}")
        self.backend = backend
        self.batch = batch
        self.native_batch = _native.Batch()
        self.native_batch.set_arrays(*(x.data_ptr() for x in arrays))
        self.resize(batch.num_tokens, batch.num_seqs, batch.tree_mask)

    def resize(self, num_tokens: int, num_seqs: int, tree_mask: Tensor | None = None) -> None:
        """Run from now on over the first tokens and sequences of the arrays, with this tree mask (None: causal)."""
        if not (0 <= num_tokens <= self.batch.num_tokens and 0 <= num_seqs <= self.batch.num_seqs):
            raise ValueError(
                f"resize got {num_tokens} tokens in {num_seqs} sequences: this plan's arrays hold "
                f"{self.batch.num_tokens} and {self.batch.num_seqs}"
            )
        self._tree_mask = tree_mask.contiguous() if tree_mask is not None else None  # kept alive
        address, words = (0, 0) if self._tree_mask is None else (self._tree_mask.data_ptr(), self._tree_mask.shape[1])
        self.native_batch.set_tree(address, words)
        self.native_batch.set_size(num_tokens, num_seqs)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: RopeTable | None) -> Tensor:
        shape = self.backend.shape
        sink = self.backend.ops.sink
        rows = self.batch.num_tokens
        q = self._rows("q", q, shape.num_q_heads)
        k = self._rows("k", k, shape.num_kv_heads)
        v = self._rows("v", v, shape.num_kv_heads)
        cos, sin = (0, 0) if rope is None else _rope_addresses(rope, shape.head_dim)
        out = sink.empty((rows, shape.num_q_heads * shape.head_dim), shape.dtype)
        program = sink.begin()
        kv = self.backend.layers[layer]
        program.rope_append(
            self.native_batch,
            kv,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            cos,
            sin,
        )
        program.attention(
            self.native_batch,
            kv,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.shape[1],
            shape.head_dim**-0.5,
            self.backend.scratch.address,
        )
        sink.end(program, rows, q, k, v, out)
        return out

    def _rows(self, name: str, x: Tensor, num_heads: int) -> Tensor:
        shape = self.backend.shape
        wanted = (self.batch.num_tokens, num_heads * shape.head_dim)
        if x.shape != wanted or x.dtype != shape.dtype:
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}: must be {shape.dtype} {list(wanted)}")
        return x if x.stride(1) == 1 else self.backend.ops.sink.contiguous(x)


def _rope_addresses(rope: RopeTable, head_dim: int) -> tuple[int, int]:
    for x in (rope.cos, rope.sin):
        if x.dtype != torch.float32 or x.shape[1:] != (head_dim // 2,) or not x.is_contiguous():
            raise ValueError(
                f"A rope table is {x.dtype} {list(x.shape)}: must be float32 [positions, {head_dim // 2}], contiguous"
            )
    return rope.cos.data_ptr(), rope.sin.data_ptr()


def _check(ops: NativeOps, shape: KVShape) -> None:
    if shape.page_size < _PAGE_GRAIN or shape.page_size % _PAGE_GRAIN:
        raise ConfigError(
            f"page_size={shape.page_size}: the native kernels store keys in blocks of {_PAGE_GRAIN} tokens. "
            f"Set page_size to a multiple of {_PAGE_GRAIN}."
        )
    if shape.num_q_heads % shape.num_kv_heads:
        raise ConfigError(
            f"{shape.num_q_heads} query heads, {shape.num_kv_heads} KV heads: the query heads must be a multiple"
        )
    if shape.dtype != ops.dtype:
        raise ConfigError(f"KV dtype {shape.dtype} with ops of {ops.dtype}: they must be equal for native attention")
