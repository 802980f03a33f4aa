"""The torch attention against a dense float64 softmax, over ragged batches, page sizes, head groups and masks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helpers import make_batch, pages_for, tree_bits
from pilotfish.attention import AttentionBackend, ForwardBatch, KVShape, RopeTable
from pilotfish.attention.reference import ReferenceAttention

DIM = 10


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_pool(
    page_size: int = 16,
    q_heads: int = 6,
    kv_heads: int = 2,
    num_pages: int = 64,
    dtype: torch.dtype = torch.float32,
    first_key: int = 0,
) -> ReferenceAttention:
    return ReferenceAttention(KVShape(2, kv_heads, q_heads, DIM, page_size, dtype), num_pages, first_key)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """float64 attention of one sequence: q [n, Hq D], k and v [L, Hkv D], visible [n, L] -> [n, Hq D]."""
    q, k, v = (x.double().view(x.shape[0], -1, DIM) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q, k) * DIM**-0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).flatten(1)


def causal(num_rows: int, num_keys: int) -> Tensor:
    return torch.arange(num_keys) <= torch.arange(num_keys - num_rows, num_keys).unsqueeze(1)


class Sequences:
    """Random q, k, v of whole sequences, fed to a backend in passes."""

    def __init__(self, lengths: Sequence[int], page_size: int, q_heads: int, kv_heads: int) -> None:
        self.lengths, self.page_size = lengths, page_size
        self.q = [randn(n, q_heads * DIM, seed=3 * i) for i, n in enumerate(lengths)]
        self.k = [randn(n, kv_heads * DIM, seed=3 * i + 1) for i, n in enumerate(lengths)]
        self.v = [randn(n, kv_heads * DIM, seed=3 * i + 2) for i, n in enumerate(lengths)]
        self.pages = pages_for(lengths, page_size)

    def run(self, backend: AttentionBackend, past: Sequence[int], upto: Sequence[int], layer: int = 0) -> list[Tensor]:
        """Outputs of the tokens past[s]:upto[s] of each sequence."""
        new = [[0] * (b - a) for a, b in zip(past, upto, strict=True)]
        plan = backend.plan(make_batch(new, self.pages, self.page_size, past))
        q, k, v = (
            torch.cat([x[a:b] for x, a, b in zip(parts, past, upto, strict=True)]) for parts in (self.q, self.k, self.v)
        )
        out = plan.run(layer, q, k, v, None)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        return list(torch.split(out, [len(row) for row in new]))

    def expected(self, s: int, first_key: int = 0) -> Tensor:
        """Of the tokens from ``first_key`` on."""
        q, k, v = (x[s][first_key:] for x in (self.q, self.k, self.v))
        return dense(q, k, v, causal(q.shape[0], q.shape[0]))


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_ragged_passes_match_dense_attention(page_size: int, q_heads: int, kv_heads: int) -> None:
    sequences = Sequences([1, 130, 64, 17], page_size, q_heads, kv_heads)
    backend = make_pool(page_size, q_heads, kv_heads, num_pages=400)
    middle = [1, 70, 63, 1]
    first = sequences.run(backend, [0] * 4, middle)
    second = sequences.run(backend, middle, sequences.lengths)  # the first has no query tokens left
    for s in range(4):
        torch.testing.assert_close(
            torch.cat([first[s], second[s]]).double(), sequences.expected(s), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("page_size", [1, 16])
def test_first_key_is_hidden_from_every_query(page_size: int) -> None:
    """The rest of a sequence attends as if it began at position 1, whatever lies in the first slot."""
    sequences = Sequences([2, 130, 64, 17, 600], page_size, 6, 2)
    backend = make_pool(page_size, num_pages=900, first_key=1)
    backend.keys.fill_(torch.nan)
    backend.values.fill_(torch.nan)
    middle = [2, 70, 63, 1, 1]
    first = sequences.run(backend, [1] * 5, middle)
    second = sequences.run(backend, middle, sequences.lengths)
    for s in range(5):
        out = torch.cat([first[s], second[s]]).double()
        torch.testing.assert_close(out, sequences.expected(s, first_key=1), rtol=1e-5, atol=1e-5)


def test_first_key_is_hidden_in_trees_and_a_query_that_sees_nothing_gets_zeros() -> None:
    sequences = Sequences([3, 40], 16, 6, 2)
    backend = make_pool(first_key=1)
    sequences.run(backend, [0, 0], [0, 39])
    # Position 0 is the root of both children here.
    bits = torch.cat([tree_bits([-1, 0, 0], 1), tree_bits([-1], 1)])
    batch = make_batch([[0] * 3, [0]], sequences.pages, 16, [0, 39], tree_mask=bits)
    q, k, v = (torch.cat([x[0], x[1][39:]]) for x in (sequences.q, sequences.k, sequences.v))
    out = backend.plan(batch).run(0, q, k, v, None)
    assert out[0].eq(0).all()
    # Each child sees itself alone; query heads 0 to 2 use KV head 0.
    own = v[1:3].view(2, 2, 1, DIM).expand(-1, -1, 3, -1).reshape(2, -1)
    torch.testing.assert_close(out[1:3], own, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[3:].double(), sequences.expected(1, first_key=1)[38:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first_key", [0, 1])
def test_a_row_has_the_same_bits_in_any_pass_and_batch(first_key: int) -> None:
    sequences = Sequences([150, 40, 75], 16, 6, 2)
    whole = sequences.run(make_pool(first_key=first_key), [0] * 3, sequences.lengths)
    backend = make_pool(first_key=first_key)
    parts: list[list[Tensor]] = [[], [], []]
    past = [0, 0, 0]
    for upto in ([1, 40, 20], [66, 40, 21], [67, 40, 75], [150, 40, 75]):
        for s, out in enumerate(sequences.run(backend, past, upto)):
            parts[s].append(out)
        past = upto
    for s in range(3):
        assert torch.equal(torch.cat(parts[s]), whole[s])


def test_layers_do_not_share_keys() -> None:
    sequences = Sequences([20], 16, 6, 2)
    backend = make_pool()
    (expected,) = sequences.run(backend, [0], [20], layer=1)
    Sequences([20, 20], 16, 6, 2).run(backend, [0, 0], [20, 20], layer=0)
    (again,) = sequences.run(backend, [19], [20], layer=1)
    assert torch.equal(again, expected[19:])


def test_strided_inputs_are_read_and_left_alone() -> None:
    sequences = Sequences([20], 16, 6, 2)
    qkv = torch.cat([sequences.q[0], sequences.k[0], sequences.v[0]], -1)
    kept = qkv.clone()
    q, k, v = torch.split(qkv, [6 * DIM, 2 * DIM, 2 * DIM], -1)
    rope = RopeTable(cos=randn(20, DIM // 2), sin=randn(20, DIM // 2, seed=1))
    plan = make_pool().plan(make_batch([[0] * 20], sequences.pages, 16))
    expected = make_pool().plan(make_batch([[0] * 20], sequences.pages, 16))
    strided = plan.run(0, q, k, v, rope)
    assert torch.equal(strided, expected.run(0, q.contiguous(), k.contiguous(), v.contiguous(), rope))
    assert torch.equal(qkv, kept)


def test_rope_turns_halves_of_a_head_by_position() -> None:
    """Rotating q and k beforehand by complex numbers and passing no table gives the same."""
    num_tokens, positions = 9, [4, 9, 2, 3, 0, 7, 1, 1, 8]
    angles = randn(12, DIM // 2, seed=9) * 3
    sequences = Sequences([num_tokens], 16, 6, 2)
    q, k, v = sequences.q[0], sequences.k[0], sequences.v[0]

    def turn(x: Tensor) -> Tensor:
        first, second = x.double().view(num_tokens, -1, DIM).chunk(2, -1)
        turned = torch.complex(first, second) * torch.exp(1j * angles[positions].double().unsqueeze(1))
        return torch.cat([turned.real, turned.imag], -1).flatten(1).float()

    batch = make_batch([[0] * num_tokens], sequences.pages, 16, positions=[positions])
    table = RopeTable(cos=angles.cos(), sin=angles.sin())
    out = make_pool().plan(batch).run(0, q, k, v, table)
    torch.testing.assert_close(out, make_pool().plan(batch).run(0, turn(q), turn(k), v, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_nodes", "words"), [(7, 1), (64, 1), (70, 2), (130, 3)])
def test_tree_tail_sees_the_past_and_its_ancestors(num_nodes: int, words: int) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    parents = [int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(num_nodes)]
    past = 37
    length = past + num_nodes
    sequences = Sequences([length, 25], 16, 6, 2)
    backend = make_pool()
    sequences.run(backend, [0, 0], [past, 24])
    # A second sequence with one query token: its node sees itself and its past.
    bits = torch.cat([tree_bits(parents, words), tree_bits([-1], words)])
    batch = make_batch([[0] * num_nodes, [0]], sequences.pages, 16, [past, 24], tree_mask=bits)
    q, k, v = (torch.cat([x[0][past:], x[1][24:]]) for x in (sequences.q, sequences.k, sequences.v))
    out = backend.plan(batch).run(0, q, k, v, None)

    visible = torch.ones(num_nodes, length, dtype=torch.bool)
    for i in range(num_nodes):
        ancestors, node = set(), i
        while node >= 0:
            ancestors.add(node)
            node = parents[node]
        visible[i, past:] = torch.tensor([j in ancestors for j in range(num_nodes)])
    expected = dense(q[:num_nodes], sequences.k[0], sequences.v[0], visible)
    torch.testing.assert_close(out[:num_nodes].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[num_nodes:].double(), sequences.expected(1)[24:], rtol=1e-5, atol=1e-5)


def test_bfloat16_pool_rounds_only_inputs_and_output() -> None:
    sequences = Sequences([50], 16, 6, 2)
    q, k, v = (x[0].bfloat16() for x in (sequences.q, sequences.k, sequences.v))
    out = make_pool(dtype=torch.bfloat16).plan(make_batch([[0] * 50], sequences.pages, 16)).run(0, q, k, v, None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), dense(q, k, v, causal(50, 50)), rtol=2**-8, atol=1e-5)


def test_copy_slots_goes_pair_by_pair_through_all_layers() -> None:
    backend = make_pool(page_size=4, num_pages=2)
    marks = torch.arange(8.0).view(1, 2, 4, 1, 1)
    backend.keys += marks
    backend.values += 10 * marks
    backend.copy_slots(torch.tensor([5, 2, 0], dtype=torch.int32), torch.tensor([2, 0, 7], dtype=torch.int32))
    expected = torch.tensor([5.0, 1, 5, 3, 4, 5, 6, 5])
    for layer in range(2):
        assert torch.equal(backend.keys[layer, ..., 0, 0].flatten(), expected)
        assert torch.equal(backend.values[layer, ..., 1, 3].flatten(), 10 * expected)


def replace(batch: ForwardBatch, **changes: Tensor) -> ForwardBatch:
    fields = {name: getattr(batch, name) for name in ForwardBatch.__slots__}
    return ForwardBatch(**{**fields, **changes})


def test_disagreeing_lengths_are_errors_with_the_values() -> None:
    batch = make_batch([[1, 2, 3]], [[0]], 16)
    with pytest.raises(ValueError, match=r"sequence 0 has 3 query tokens, kv_len=17 and 1 pages of 16 tokens"):
        make_pool().plan(replace(batch, kv_len=torch.tensor([17], dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"3 query tokens, kv_len=2"):
        make_pool().plan(replace(batch, kv_len=torch.tensor([2], dtype=torch.int32)))
    mask = torch.zeros(65, 1, dtype=torch.uint64)
    with pytest.raises(ValueError, match=r"tree_mask has 1 words of 64 bits for a query tail of 65 tokens"):
        make_pool().plan(make_batch([[0] * 65], [list(range(5))], 16, tree_mask=mask))


def test_impossible_pools_are_errors() -> None:
    with pytest.raises(ValueError, match=r"num_q_heads=5 is not a multiple of num_kv_heads=2"):
        make_pool(q_heads=5)
    with pytest.raises(ValueError, match=r"num_pages=0"):
        make_pool(num_pages=0)
    for first_key in (-1, 2):
        with pytest.raises(ValueError, match=rf"first_key={first_key}: must be 0 .* or 1"):
            make_pool(first_key=first_key)
