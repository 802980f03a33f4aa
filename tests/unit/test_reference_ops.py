"""The torch ops against float64 arithmetic, their batch invariance, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pilotfish.ops import NoiseKeys, Ops
from pilotfish.ops.noise import gumbel
from pilotfish.ops.reference import TorchOps

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@pytest.fixture(params=DTYPES, ids=str)
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return TorchOps(request.param)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """``actual`` is ``exact`` (float64) rounded to ``dtype`` once, give or take float32 sums."""
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, rtol=ROUNDING[dtype], atol=1e-4)


def test_implements_the_protocol_and_refuses_other_dtypes() -> None:
    ops: Ops = TorchOps(torch.float32)
    assert ops.dtype == torch.float32
    with pytest.raises(ValueError, match=r"dtype=torch\.float16: must be torch\.float32 or torch\.bfloat16"):
        TorchOps(torch.float16)


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(ops: TorchOps, num_rows: int, with_bias: bool) -> None:
    x, w, b = randn(num_rows, 70, dtype=ops.dtype), randn(33, 70, seed=1, dtype=ops.dtype), randn(33, seed=2)
    packed = ops.pack_linear(w, b if with_bias else None)
    assert (packed.in_features, packed.out_features) == (70, 33)
    exact = x.double() @ w.double().T + (b.double() if with_bias else 0)
    assert_rounded(ops.linear(x, packed), exact, ops.dtype)
    assert_rounded(ops.linear(x, packed, out_dtype=torch.float32), exact, torch.float32)


def test_linear_reads_strided_rows_and_no_rows(ops: TorchOps) -> None:
    wide, packed = randn(20, 100, dtype=ops.dtype), ops.pack_linear(randn(24, 40, seed=1))
    assert torch.equal(ops.linear(wide[:, 30:70], packed), ops.linear(wide[:, 30:70].contiguous(), packed))
    assert ops.linear(wide[:0, :40], packed).shape == (0, 24)


def test_pack_linear_refuses_a_bias_of_another_length(ops: TorchOps) -> None:
    with pytest.raises(ValueError, match=r"bias of shape \(7,\) for a weight of shape \(8, 4\)"):
        ops.pack_linear(randn(8, 4), randn(7))


def test_embedding_gives_the_rows_that_were_packed(ops: TorchOps) -> None:
    table = randn(50, 24)
    out = ops.embedding(torch.tensor([3, 49, 0, 3], dtype=torch.int32), ops.pack_linear(table))
    assert torch.equal(out, table[[3, 49, 0, 3]].to(ops.dtype))


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rms_norm_of_rows_and_of_strided_heads(ops: TorchOps) -> None:
    x, weight = randn(9, 96, dtype=ops.dtype), randn(96, seed=1, dtype=ops.dtype)
    assert_rounded(ops.rms_norm(x, weight, 1e-3), exact_rms_norm(x, weight, 1e-3), ops.dtype)
    heads = x[:, 16:64].view(9, 3, 16)
    out = ops.rms_norm(heads, weight[:16], 1e-3)
    assert out.is_contiguous()
    assert_rounded(out, exact_rms_norm(heads, weight[:16], 1e-3), ops.dtype)


def test_rms_norm_eps_matters_for_tiny_rows(ops: TorchOps) -> None:
    x, weight = torch.full((1, 32), 2.0**-10, dtype=ops.dtype), torch.ones(32, dtype=ops.dtype)
    assert_rounded(ops.rms_norm(x, weight, 1e-6), exact_rms_norm(x, weight, 1e-6), ops.dtype)


def test_add_rms_norm_norms_the_rounded_sum(ops: TorchOps) -> None:
    x, residual = randn(5, 64, dtype=ops.dtype), randn(5, 64, seed=1, dtype=ops.dtype) * 3
    weight = randn(64, seed=2, dtype=ops.dtype)
    kept = residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, kept)  # a caller that trains may still need it
    assert torch.equal(total, (x.double() + residual.double()).to(ops.dtype))
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


def test_add_rounds_once_and_leaves_its_operands(ops: TorchOps) -> None:
    x, residual = randn(5, 64, dtype=ops.dtype), randn(5, 64, seed=1, dtype=ops.dtype) * 300
    kept = x.clone(), residual.clone()
    total = ops.add(x, residual)
    assert torch.equal(total, (x.double() + residual.double()).to(ops.dtype))
    total.zero_()  # a fresh tensor
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_concat_puts_columns_side_by_side(ops: TorchOps) -> None:
    wide, other = randn(5, 64, dtype=ops.dtype), randn(5, 3, seed=1, dtype=ops.dtype)
    out = ops.concat([wide[:, 10:30], other, wide])
    assert out.dtype == ops.dtype
    assert out.is_contiguous()
    assert torch.equal(out[:, :20], wide[:, 10:30])
    assert torch.equal(out[:, 20:23], other)
    assert torch.equal(out[:, 23:], wide)
    assert ops.concat((wide[:0], other[:0])).shape == (0, 67)


def test_concat_of_one_tensor_is_a_copy_and_of_none_an_error(ops: TorchOps) -> None:
    x = randn(4, 6, dtype=ops.dtype)
    copy = ops.concat([x])
    assert torch.equal(copy, x)
    copy.zero_()
    assert x.ne(0).all()
    with pytest.raises(ValueError, match="concat got no tensor"):
        ops.concat([])


def test_silu_mul(ops: TorchOps) -> None:
    gate_up = randn(6, 80, dtype=ops.dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    assert_rounded(ops.silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up, ops.dtype)


def test_gather_rows(ops: TorchOps) -> None:
    x = randn(8, 5, dtype=ops.dtype)
    assert torch.equal(ops.gather_rows(x, torch.tensor([7, 0, 7], dtype=torch.int32)), x[[7, 0, 7]])


def test_argmax_takes_the_lowest_id_among_equals(ops: TorchOps) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [1234, 77, 4999]] = 1.0
    logits[1] = -torch.inf
    logits[2, 4999] = 1e-30
    out = ops.argmax(logits)
    assert out.dtype == torch.int32
    assert out.tolist() == [77, 0, 4999]


def noise_keys(num_rows: int) -> NoiseKeys:
    return NoiseKeys(
        seeds=torch.arange(num_rows, dtype=torch.int64) - 2,
        sample_indices=torch.arange(num_rows, dtype=torch.int32) % 3,
        positions=torch.arange(num_rows, dtype=torch.int32) * 7,
    )


def test_noise_argmax_adds_scaled_logits_and_noise(ops: TorchOps) -> None:
    logits, keys = randn(6, 333) * 3, noise_keys(6)
    inv_temperature = torch.tensor([1.0, 0.5, 2.0, 10.0, 0.0, 1.0])
    noise = gumbel(keys.seeds, keys.sample_indices, keys.positions, 333)
    expected = (logits * inv_temperature[:, None] + noise).argmax(-1)
    expected[4] = logits[4].argmax()
    out = ops.noise_argmax(logits, inv_temperature, keys)
    assert out.dtype == torch.int32
    assert out.tolist() == expected.tolist()
    assert (out != logits.argmax(-1)).any()  # the noise does decide somewhere


def test_noise_argmax_never_takes_a_masked_token(ops: TorchOps) -> None:
    logits = torch.full((4, 500), -torch.inf)
    logits[:3, 321] = -1e4
    inv_temperature = torch.tensor([1.0, 0.0, 1e-3, 1.0])
    assert ops.noise_argmax(logits, inv_temperature, noise_keys(4)).tolist() == [321, 321, 321, 0]


ROW_OPS: dict[str, Callable[[TorchOps, Tensor], Tensor]] = {
    "linear": lambda ops, x: ops.linear(x, ops.pack_linear(randn(136, x.shape[1], seed=5), randn(136, seed=6))),
    "rms_norm": lambda ops, x: ops.rms_norm(x, randn(x.shape[1], seed=5), 1e-5),
    "add_rms_norm": lambda ops, x: torch.cat(ops.add_rms_norm(x, x.flip(-1), randn(x.shape[1], seed=5), 1e-5), -1),
    "add": lambda ops, x: ops.add(x, x.flip(-1) * 3),
    "concat": lambda ops, x: ops.concat([x[:, 1::2], ops.silu_mul(x), x]),
    "silu_mul": lambda ops, x: ops.silu_mul(x),
}


@pytest.mark.parametrize("name", ROW_OPS)
@pytest.mark.parametrize("width", [24, 576, 1538])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(ops: TorchOps, name: str, width: int) -> None:
    x = randn(50, width, dtype=ops.dtype)
    whole = ROW_OPS[name](ops, x)
    for start, stop in ((0, 1), (49, 50), (3, 20), (5, 37), (17, 33)):
        assert torch.equal(ROW_OPS[name](ops, x[start:stop]), whole[start:stop])
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ROW_OPS[name](ops, x[order]), whole[order])


@pytest.mark.parametrize("name", ROW_OPS)
def test_gradients_match_finite_differences(name: str) -> None:
    """A directional derivative in float32: the ops cast to it inside, so gradcheck's float64 would not see them."""
    ops = TorchOps(torch.float32)
    x, direction = randn(3, 24).requires_grad_(), randn(3, 24, seed=1)
    weights = randn(*ROW_OPS[name](ops, x).shape, seed=2)
    loss = (ROW_OPS[name](ops, x) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    step = 1e-2
    with torch.no_grad():
        up, down = (
            (ROW_OPS[name](ops, x + sign * step * direction).double() * weights).sum().item() for sign in (1, -1)
        )
    slope = (gradient * direction).sum().item()
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-2, abs=1e-2)


def test_packed_weights_stay_in_the_graph() -> None:
    ops = TorchOps(torch.float32)
    weight, bias = randn(8, 6).requires_grad_(), randn(8, seed=1).requires_grad_()
    x = randn(4, 6, seed=2)
    ops.linear(x, ops.pack_linear(weight, bias)).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(8, 6))
    torch.testing.assert_close(bias.grad, torch.full((8,), 4.0))
