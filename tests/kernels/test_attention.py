"""Paged attention, rope and the KV cache's writes against dense float64, and bit for bit against themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers_kernels import (
    DTYPES,
    ISAS,
    Heads,
    Kernels,
    Pool,
    causal,
    from_pages_k,
    from_pages_v,
    int32,
    strided,
    to_pages_k,
    to_pages_v,
)
from pilotfish import _native

SHAPES = [  # query heads, kv heads, head dim, page size
    (9, 3, 64, 16),
    (8, 1, 40, 32),
    (4, 4, 128, 16),
    (14, 2, 96, 48),
    (5, 5, 17, 16),
]


def queries(heads: Heads, count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, heads.num_q, heads.dim, generator=generator)).to(heads.dtype)


def check(out: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """bfloat16 rounds each weight and the output once, by up to 2^-8 of it; float32's sums are good to some 1e-6."""
    bound = (2**-7 if out.dtype == torch.bfloat16 else 4e-6) * magnitude + 1e-6
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), f"error {(error / magnitude).max():.2e} of the magnitude"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_batch_matches_dense(isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    heads = Heads(*shape, dtype)
    sizes = [(1, 1), (300, 1), (17, 17), (529, 30), (256, 1), (257, 5), (48, 2)]  # KV entries, queries
    pool = Pool(heads, [kv_len for kv_len, _ in sizes])
    batch = [(s, kv_len, queries(heads, count, seed=s)) for s, (kv_len, count) in enumerate(sizes)]
    out = pool.attend(Kernels(isa), batch)
    start = 0
    for seq, kv_len, q in batch:
        expected, magnitude = pool.reference(seq, kv_len, q, causal(q.shape[0], kv_len))
        check(out[start : start + q.shape[0]], expected, magnitude)
        start += q.shape[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_key_is_hidden_from_every_query(isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """K and V of position 0 are NaN; sequences of one group, of whole and broken chunks, and of three and five."""
    heads = Heads(*shape, dtype, first_key=1)
    sizes = [(2, 1), (300, 1), (17, 16), (529, 30), (256, 1), (257, 256), (1041, 3)]  # KV entries, queries
    pool = Pool(heads, [kv_len for kv_len, _ in sizes])
    batch = [(s, kv_len, queries(heads, count, seed=s)) for s, (kv_len, count) in enumerate(sizes)]
    start = 0
    out = pool.attend(Kernels(isa), batch)
    for seq, kv_len, q in batch:
        expected, magnitude = pool.reference(seq, kv_len, q, causal(q.shape[0], kv_len))
        check(out[start : start + q.shape[0]], expected, magnitude)
        start += q.shape[0]
    for num_threads in (1, 3):
        assert torch.equal(pool.attend(Kernels(isa, num_threads), batch), out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [1, 20, 300])
def test_a_query_that_sees_no_key_gets_zeros(isa: str, dtype: torch.dtype, kv_len: int) -> None:
    """The query of position 0, which callers with first_key=1 never have, does no harm to the rows of its tile."""
    heads = Heads(6, 2, 64, 16, dtype, first_key=1)
    pool = Pool(heads, [kv_len, 40])
    q, other = queries(heads, kv_len), queries(heads, 2, seed=2)
    out = pool.attend(Kernels(isa), [(0, kv_len, q), (1, 40, other)])
    assert out[0].eq(0).all()
    check(out[:kv_len], *pool.reference(0, kv_len, q, causal(kv_len, kv_len)))
    check(out[kv_len:], *pool.reference(1, 40, other, causal(2, 40)))


def test_first_key_is_0_or_1() -> None:
    for first_key in (-1, 2):
        with pytest.raises(ValueError, match=rf"first_key={first_key}: must be 0 or 1"):
            Pool(Heads(1, 1, 16, 16, torch.float32, first_key=first_key), [1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("first_key", [0, 1])
def test_bits_do_not_depend_on_the_batch(
    isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int], first_key: int
) -> None:
    heads = Heads(*shape, dtype, first_key)
    length, count = 707, 45
    pool = Pool(heads, [length, 300, 40])
    q = queries(heads, count)
    one, two, three = (Kernels(isa, n) for n in (1, 2, 3))
    first = length - count  # tokens before the queries
    alone = torch.cat([pool.attend(one, [(0, first + i + 1, q[i : i + 1])]) for i in range(count)])
    for kernels in (one, two, three):
        assert torch.equal(pool.attend(kernels, [(0, length, q)]), alone)
        split = [pool.attend(kernels, [(0, first + e, q[b:e])]) for b, e in ((0, 16), (16, 19), (19, count))]
        assert torch.equal(torch.cat(split), alone)
        last = (0, length, q[-1:])
        others = [(1, 300, queries(heads, 70)), (2, 40, queries(heads, 1))]
        assert torch.equal(pool.attend(kernels, [others[0], last, others[1]])[70:71], alone[-1:])
        assert torch.equal(pool.attend(kernels, [last]), alone[-1:])
        assert torch.equal(pool.attend(kernels, [last] * 7), alone[-1:].expand(7, -1, -1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [5, 16])
@pytest.mark.parametrize("first_key", [0, 1])
def test_many_threads_share_one_row(isa: str, num_threads: int, first_key: int) -> None:
    heads = Heads(2, 1, 32, 16, torch.float32, first_key)
    pool = Pool(heads, [2100])
    row = [(0, 2100, queries(heads, 1))]
    out = pool.attend(Kernels(isa, num_threads), row)
    assert out.isfinite().all()
    assert torch.equal(out, pool.attend(Kernels(isa, 1), row))


def random_tree(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ancestor bits int64 [count, words] of a random tree, and the same as bool [count, count]."""
    generator = torch.Generator().manual_seed(seed)
    sees = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        parent = int(torch.randint(-1, node, (1,), generator=generator))
        if parent >= 0:
            sees[node] |= sees[parent]
    return pack_bits(sees), sees


def pack_bits(sees: Tensor) -> Tensor:
    words = torch.zeros(sees.shape[0], (sees.shape[1] + 63) // 64, dtype=torch.int64)
    for row, column in sees.nonzero().tolist():
        bit = column % 64
        words[row, column // 64] |= -(1 << 63) if bit == 63 else 1 << bit
    return words


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_len", "count"), [(20, 20), (300, 63), (262, 9), (600, 70), (530, 130)])
@pytest.mark.parametrize("first_key", [0, 1])
def test_tree_matches_dense(isa: str, dtype: torch.dtype, kv_len: int, count: int, first_key: int) -> None:
    heads = Heads(6, 2, 64, 16, dtype, first_key)
    pool = Pool(heads, [kv_len])
    q = queries(heads, count)
    masks, sees = random_tree(count, seed=count)
    out = pool.attend(Kernels(isa), [(0, kv_len, q)], masks)
    visible = torch.cat([torch.ones(count, kv_len - count, dtype=torch.bool), sees], dim=1)
    check(out, *pool.reference(0, kv_len, q, visible))
    assert torch.equal(out, pool.attend(Kernels(isa, 1), [(0, kv_len, q)], masks))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chain_shaped_tree_has_the_bits_of_causal(isa: str, dtype: torch.dtype) -> None:
    heads = Heads(9, 3, 64, 16, dtype)
    pool = Pool(heads, [518, 40])
    batch = [(0, 518, queries(heads, 67)), (1, 40, queries(heads, 3))]
    masks = torch.zeros(70, 2, dtype=torch.int64)
    masks[:67] = pack_bits(torch.ones(67, 67, dtype=torch.bool).tril())
    masks[67:, :1] = pack_bits(torch.ones(3, 3, dtype=torch.bool).tril())
    kernels = Kernels(isa)
    assert torch.equal(pool.attend(kernels, batch, masks), pool.attend(kernels, batch))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("dim", "page_size", "rope"), [(64, 16, True), (34, 32, True), (17, 16, False), (128, 48, True)]
)
def test_rope_append(isa: str, dtype: torch.dtype, dim: int, page_size: int, rope: bool) -> None:
    heads = Heads(5, 2, dim, page_size, dtype)
    count, num_pages, half = 23, 4, dim // 2
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (
        strided(torch.randn(count, n * dim, generator=generator).to(dtype), 3)
        for n in (heads.num_q, heads.num_kv, heads.num_kv)
    )
    originals = [x.clone() for x in (q, k, v)]
    positions = torch.randint(0, 500, (count,), generator=generator)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:count]
    angles = torch.arange(500)[:, None] * 10000.0 ** (-torch.arange(half) / max(half, 1))
    cos, sin = angles.cos().float().contiguous(), angles.sin().float().contiguous()
    shape = (num_pages, heads.num_kv, page_size, heads.d_pad)
    pages_k, pages_v = (to(torch.full(shape, 3.0, dtype=dtype)) for to in (to_pages_k, to_pages_v))
    batch = _native.Batch()
    arrays = int32(positions), int32(slots)
    batch.set_arrays(arrays[0].data_ptr(), arrays[1].data_ptr(), 0, 0, 0, 0)
    batch.set_size(num_tokens=count, num_seqs=1)
    Kernels(isa).call(
        "rope_append",
        count,
        batch=batch,
        layer=heads.layer(pages_k, pages_v),
        q=q,
        q_stride=q.stride(0),
        k=k,
        k_stride=k.stride(0),
        v=v,
        v_stride=v.stride(0),
        cos=cos if rope else 0,
        sin=sin if rope else 0,
    )

    def rotated(x: Tensor) -> Tensor:
        x = x.reshape(count, -1, dim)
        if not rope:
            return x
        a, b = x[..., :half].double(), x[..., half:].double()
        c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1)

    tolerance = {"rtol": 2**-8, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    for x, original in ((q, originals[0]), (k, originals[1])):
        torch.testing.assert_close(x.reshape(count, -1, dim).double(), rotated(original).double(), **tolerance)
    expected_k, expected_v = (torch.full(shape, 3.0, dtype=dtype) for _ in range(2))
    page, offset = slots // page_size, slots % page_size
    expected_k[page, :, offset, :dim] = k.reshape(count, -1, dim)
    expected_v[page, :, offset, :dim] = originals[2].reshape(count, -1, dim)
    assert torch.equal(from_pages_k(pages_k), expected_k)
    assert torch.equal(from_pages_v(pages_v), expected_v)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_slots_in_order(isa: str, dtype: torch.dtype) -> None:
    heads = Heads(3, 3, 40, 32, dtype)
    shape = (3, heads.num_kv, heads.page_size, heads.d_pad)
    k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    source, target = [5, 7, 33, 95, 6], [4, 5, 34, 0, 7]  # 7 -> 5 after 5 -> 4
    pages_k, pages_v = to_pages_k(k), to_pages_v(v)
    arrays = int32(source), int32(target)
    Kernels(isa).call(
        "copy_slots", len(source), layer=heads.layer(pages_k, pages_v), source=arrays[0], target=arrays[1]
    )
    for x in (k, v):
        flat = x.transpose(1, 2).reshape(-1, heads.num_kv, heads.d_pad)
        for a, b in zip(source, target, strict=True):
            flat[b] = flat[a]
        x.copy_(flat.reshape(shape[0], heads.page_size, heads.num_kv, heads.d_pad).transpose(1, 2))
    assert torch.equal(from_pages_k(pages_k), k)
    assert torch.equal(from_pages_v(pages_v), v)
