"""Helpers of the kernel tests: calling one native kernel by raw addresses, and the layouts of KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish import _native

ISAS: list[str] = _native.supported_isas()
DTYPES = [torch.float32, torch.bfloat16]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Kernels:
    """Calls kernels by name on a team of threads, one program a call."""

    def __init__(self, isa: str, num_threads: int = 2) -> None:
        self.isa = isa
        self.num_threads = num_threads
        self._team = _native.Team(num_threads, spin_us=50)

    def call(self, name: str, rows: int, **arguments: object) -> None:
        """Runs one kernel; tensors among the arguments become addresses."""
        program = _native.Program(self._team, self.isa)
        raw = {key: x.data_ptr() if isinstance(x, Tensor) else x for key, x in arguments.items()}
        getattr(program, name)(**raw)
        program.run(rows)


def strided(x: Tensor, extra: int) -> Tensor:
    """The same numbers in rows that lie ``extra`` elements further apart, with NaN between them."""
    rows = torch.full((x.shape[0], x.shape[1] + extra), float("nan"), dtype=x.dtype)
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def to_pages_k(k: Tensor) -> Tensor:
    """[pages, heads, page_size, d_pad] -> the native layout of K (native/kernels.h)."""
    pages, heads, size, dim = k.shape
    if k.dtype == torch.float32:
        return k.reshape(pages, heads, size // 16, 16, dim).transpose(3, 4).contiguous()
    return k.reshape(pages, heads, size // 16, 16, dim // 2, 2).transpose(3, 4).contiguous()


def from_pages_k(pages: Tensor) -> Tensor:
    """Inverse of :func:`to_pages_k`."""
    shape = pages.shape
    return pages.transpose(3, 4).reshape(shape[0], shape[1], shape[2] * 16, -1)


def to_pages_v(v: Tensor) -> Tensor:
    """[pages, heads, page_size, d_pad] -> the native layout of V (native/kernels.h)."""
    pages, heads, size, dim = v.shape
    if v.dtype == torch.float32:
        return v.contiguous()
    return v.reshape(pages, heads, size // 2, 2, dim).transpose(3, 4).contiguous()


def from_pages_v(pages: Tensor) -> Tensor:
    """Inverse of :func:`to_pages_v`."""
    if pages.dtype == torch.float32:
        return pages
    shape = pages.shape
    return pages.transpose(3, 4).reshape(shape[0], shape[1], shape[2] * 2, -1)


def int32(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


@dataclass
class Heads:
    """The shape of one attention layer."""

    num_q: int
    num_kv: int
    dim: int
    page_size: int
    dtype: torch.dtype
    first_key: int = 0

    @property
    def d_pad(self) -> int:
        return (self.dim + 31) // 32 * 32

    def layer(self, k: Tensor, v: Tensor) -> _native.KVLayer:
        return _native.KVLayer(
            dtype=dtype_name(self.dtype),
            num_q_heads=self.num_q,
            num_kv_heads=self.num_kv,
            head_dim=self.dim,
            d_pad=self.d_pad,
            page_size=self.page_size,
            k=k.data_ptr(),
            v=v.data_ptr(),
            first_key=self.first_key,
        )


class Pool:
    """Random K and V of some sequences, in shuffled pages; every slot that no sequence uses is NaN, and so are the
    slots before ``heads.first_key``."""

    def __init__(self, heads: Heads, lengths: Sequence[int], seed: int = 0) -> None:
        self.heads = heads
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-length // heads.page_size) for length in lengths]
        order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
        self.pages: list[list[int]] = []
        shape = (len(order), heads.num_kv, heads.page_size, heads.d_pad)
        k, v = torch.zeros(shape, dtype=heads.dtype), torch.zeros(shape, dtype=heads.dtype)
        k[..., : heads.dim] = float("nan")
        v[..., : heads.dim] = float("nan")
        self.k: list[Tensor] = []  # of each sequence [length, heads, dim]
        self.v: list[Tensor] = []
        for length, count in zip(lengths, needed, strict=True):
            pages, order = order[:count], order[count:]
            self.pages.append(pages)
            for pool, dense in ((k, self.k), (v, self.v)):
                x = torch.randn(length, heads.num_kv, heads.dim, generator=generator).to(heads.dtype)
                dense.append(x)
                for i, page in enumerate(pages):
                    part = x[i * heads.page_size : (i + 1) * heads.page_size]
                    pool[page, :, : part.shape[0], : heads.dim] = part.transpose(0, 1)
                pool[pages[0], :, : heads.first_key, : heads.dim] = float("nan")
        self.native_k, self.native_v = to_pages_k(k), to_pages_v(v)
        self.layer = heads.layer(self.native_k, self.native_v)

    def attend(
        self, kernels: Kernels, queries: Sequence[tuple[int, int, Tensor]], masks: Tensor | None = None
    ) -> Tensor:
        """Attention of some sequences' tails.

        Args:
            kernels: who computes.
            queries: (sequence, kv_len, q [tokens, Hq, D]) each; the tokens are the last ones before kv_len.
            masks: int64 [all tokens, words], see ``ForwardBatch.tree_mask``.

        Returns:
            [all tokens, Hq, D].
        """
        heads = self.heads
        counts = [q.shape[0] for _, _, q in queries]
        q = torch.cat([q for _, _, q in queries]).reshape(sum(counts), -1)
        q = strided(q.contiguous(), 8)
        out = torch.full((sum(counts), heads.num_q * heads.dim + 8), 7.0, dtype=heads.dtype)
        used = [self.pages[seq][: -(-kv_len // heads.page_size)] for seq, kv_len, _ in queries]
        arrays = {
            "query_start": int32([0, *torch.tensor(counts).cumsum(0).tolist()]),
            "kv_len": int32([kv_len for _, kv_len, _ in queries]),
            "page_start": int32([0, *torch.tensor([len(pages) for pages in used]).cumsum(0).tolist()]),
            "pages": int32([page for pages in used for page in pages]),
        }
        batch = _native.Batch()
        batch.set_arrays(positions=0, slots=0, **{name: x.data_ptr() for name, x in arrays.items()})
        batch.set_size(num_tokens=sum(counts), num_seqs=len(queries))
        if masks is not None:
            batch.set_tree(mask=masks.data_ptr(), words=masks.shape[1])
        max_kv_len = max(kv_len for _, kv_len, _ in queries)
        size = _native.attention_scratch_bytes(self.layer, sum(counts), len(queries), max_kv_len, kernels.num_threads)
        guard = 256
        scratch = torch.full((size + 64 + guard,), 0xFF, dtype=torch.uint8)  # NaN as floats
        aligned = -scratch.data_ptr() % 64
        kernels.call(
            "attention",
            sum(counts),
            batch=batch,
            layer=self.layer,
            q=q,
            q_stride=q.stride(0),
            out=out,
            out_stride=out.stride(0),
            scale=heads.dim**-0.5,
            scratch=scratch.data_ptr() + aligned,
        )
        assert (scratch[aligned + size :] == 0xFF).all(), "scratch overrun"
        assert (out[:, heads.num_q * heads.dim :] == 7.0).all(), "output overrun"
        return out[:, : heads.num_q * heads.dim].reshape(sum(counts), heads.num_q, heads.dim)

    def reference(self, seq: int, kv_len: int, q: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Dense attention in float64, and the sum of the weights' magnitudes times V's: what rounding scales with.

        Args:
            seq, kv_len, q: as in :meth:`attend`.
            visible: bool [tokens, kv_len]. What lies before ``heads.first_key`` is hidden besides; a token that sees
                nothing gets zeros.
        """
        visible = visible & (torch.arange(kv_len) >= self.heads.first_key)
        group = self.heads.num_q // self.heads.num_kv
        k = self.k[seq][:kv_len].double().repeat_interleave(group, dim=1)
        v = self.v[seq][:kv_len].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,khd->htk", q.double(), k) * self.heads.dim**-0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
        return torch.einsum("htk,khd->thd", weights, v), torch.einsum("htk,khd->thd", weights, v.abs())


def causal(num_queries: int, kv_len: int) -> Tensor:
    """bool [num_queries, kv_len]: the tail's tokens see all before them and themselves."""
    return torch.ones(num_queries, kv_len, dtype=torch.bool).tril(kv_len - num_queries)
