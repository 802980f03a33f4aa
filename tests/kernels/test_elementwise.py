"""The row-wise kernels against torch in float64, on odd sizes and strided rows, and bit for bit row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers_kernels import DTYPES, ISAS, Kernels, dtype_name, int32, strided
from pilotfish import _native
from pilotfish.ops.native import NativeOps
from pilotfish.ops.recorder import record

SIZES = [(1, 576), (3, 8), (5, 1), (7, 33), (2, 200), (40, 64)]  # rows, dim


def random(rows: int, dim: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, dim, generator=generator)).to(dtype)


def output(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    return strided(torch.zeros(rows, dim, dtype=dtype), 5)


def assert_nothing_behind_rows(out: Tensor) -> None:
    behind = out.as_strided((out.shape[0] - 1, 5), (out.stride(0), 1), out.storage_offset() + out.shape[1])
    assert behind.isnan().all(), "wrote behind a row"


def check(out: Tensor, expected: Tensor) -> None:
    rtol = 2**-8 if out.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-7)
    assert_nothing_behind_rows(out)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), SIZES)
@pytest.mark.parametrize("groups", [1, 3])
def test_rms_norm(isa: str, dtype: torch.dtype, rows: int, dim: int, groups: int) -> None:
    x, w = strided(random(rows, groups * dim, dtype, 1, 3.0), 7), random(1, dim, dtype, 2)
    out = output(rows, groups * dim, dtype)
    arguments = {"dtype": dtype_name(dtype), "weight": w, "groups": groups, "dim": dim, "eps": 1e-5}
    strides = {"x_stride": x.stride(0), "out_stride": out.stride(0)}
    Kernels(isa).call("rms_norm", rows, x=x, out=out, **arguments, **strides)
    check(out, norm(x.reshape(rows, groups, dim), w, 1e-5).reshape(rows, -1))
    for row in range(rows):
        alone = output(1, groups * dim, dtype)
        Kernels(isa, 1).call("rms_norm", 1, x=x[row:], out=alone, **arguments, **strides)
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), SIZES)
def test_add_rms_norm(isa: str, dtype: torch.dtype, rows: int, dim: int) -> None:
    x, residual = strided(random(rows, dim, dtype, 1), 7), strided(random(rows, dim, dtype, 2), 2)
    w, out = random(1, dim, dtype, 3), output(rows, dim, dtype)
    total = x + residual
    Kernels(isa).call(
        "add_rms_norm",
        rows,
        dtype=dtype_name(dtype),
        x=x,
        x_stride=x.stride(0),
        residual=residual,
        residual_stride=residual.stride(0),
        weight=w,
        out=out,
        out_stride=out.stride(0),
        dim=dim,
        eps=1e-6,
    )
    assert torch.equal(residual, total)
    check(out, norm(total, w, 1e-6))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), SIZES)
def test_add(isa: str, dtype: torch.dtype, rows: int, dim: int) -> None:
    x, residual = strided(random(rows, dim, dtype, 1), 7), strided(random(rows, dim, dtype, 2, 9.0), 2)
    kept = x.clone(), residual.clone()
    out = output(rows, dim, dtype)
    Kernels(isa).call(
        "add",
        rows,
        dtype=dtype_name(dtype),
        x=x,
        x_stride=x.stride(0),
        residual=residual,
        residual_stride=residual.stride(0),
        out=out,
        out_stride=out.stride(0),
        dim=dim,
    )
    assert torch.equal(out, (x.double() + residual.double()).to(dtype))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    assert_nothing_behind_rows(out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(33,), (576, 576), (1, 40, 7), (3, 0, 5)], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_concat(isa: str, dtype: torch.dtype, dims: tuple[int, ...], rows: int) -> None:
    xs = [strided(random(rows, dim, dtype, i), 3 + i) for i, dim in enumerate(dims)]
    out = output(rows, sum(dims), dtype)
    Kernels(isa).call(
        "concat",
        rows,
        dtype=dtype_name(dtype),
        xs=[x.data_ptr() for x in xs],
        x_strides=[x.stride(0) for x in xs],
        dims=list(dims),
        out=out,
        out_stride=out.stride(0),
    )
    assert torch.equal(out, torch.cat(xs, dim=1))
    assert_nothing_behind_rows(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_add_and_concat_recorded_equal_torch_and_eager(isa: str, dtype: torch.dtype) -> None:
    """Views of one wide buffer, as a model splits them; fewer rows than were recorded leave the others alone."""
    ops = NativeOps(dtype, _native.Team(2), isa)
    wide, other = random(9, 100, dtype, 1), random(9, 40, dtype, 2)

    def function() -> Tensor:
        copy = ops.concat([wide[:, 5:45]])
        total = ops.add(copy, other)
        return ops.concat([total, wide[:, 60:], ops.add(total, total)])

    def by_torch() -> Tensor:
        total = wide[:, 5:45] + other
        return torch.cat([total, wide[:, 60:], total + total], dim=1)

    assert torch.equal(function(), by_torch())
    recording = record(ops, function, rows=9, inputs=[wide, other])
    recording.output.fill_(3.0)
    assert torch.equal(recording.run(4), by_torch()[:4])
    assert recording.output[4:].eq(3.0).all()
    wide.copy_(random(9, 100, dtype, 3))  # the next batch, in the same place
    assert torch.equal(recording.run(9), by_torch())
    assert set(recording.program.profile_ns) == {"add", "concat"}


def test_add_and_concat_copy_where_memory_is_not_in_rows() -> None:
    ops = NativeOps(torch.float32, _native.Team(1))
    x, y = random(6, 5, torch.float32, 1).T, random(5, 6, torch.float32, 2)
    assert torch.equal(ops.add(x, y), x + y)
    assert torch.equal(ops.concat([y, x]), torch.cat([y, x], dim=1))
    copy = ops.concat([y])
    assert copy.data_ptr() != y.data_ptr()
    assert torch.equal(copy, y)
    assert ops.concat([y[:0], y[:0]]).shape == (0, 12)


def test_add_and_concat_refuse_what_does_not_fit() -> None:
    ops = NativeOps(torch.float32, _native.Team(1))
    x = random(4, 6, torch.float32, 1)
    with pytest.raises(ValueError, match=r"concat got no tensor"):
        ops.concat([])
    with pytest.raises(ValueError, match=r"concat got \[\[4, 6\], \[3, 6\]\]: must have equally many rows"):
        ops.concat([x, x[:3]])
    with pytest.raises(ValueError, match=r"xs\[1\] is torch\.bfloat16 \[4, 6\]"):
        ops.concat([x, x.bfloat16()])
    with pytest.raises(ValueError, match=r"add got x \[3, 6\], residual \[4, 6\]"):
        ops.add(x[:3], x)
    with pytest.raises(ValueError, match=r"x is torch\.float32 \[4, 5\]: must be torch\.float32 \[rows, 6\]"):
        ops.add(x[:, :5], x)
    with pytest.raises(ValueError, match=r"concat got 2 tensors, 1 strides and 2 widths"):
        _native.Program(ops.team, ops.isa).concat("float32", [0, 0], [6], [6, 6], 0, 12)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), [*SIZES, (1, 1536), (3, 1000)])
def test_silu_mul(isa: str, dtype: torch.dtype, rows: int, dim: int) -> None:
    gate_up = strided(random(rows, 2 * dim, dtype, 1, 8.0), 3)
    gate_up[0, 0] = -200.0  # where e^-x overflows
    out = output(rows, dim, dtype)
    Kernels(isa).call(
        "silu_mul",
        rows,
        dtype=dtype_name(dtype),
        gate_up=gate_up,
        stride=gate_up.stride(0),
        out=out,
        out_stride=out.stride(0),
        dim=dim,
    )
    gate, up = gate_up[:, :dim].double(), gate_up[:, dim:].double()
    check(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinity_stay(isa: str) -> None:
    for dtype in DTYPES:
        gate_up = torch.ones(1, 80, dtype=dtype)
        gate_up[0, 3], gate_up[0, 37], gate_up[0, 45] = float("nan"), float("inf"), float("nan")
        out = torch.zeros(1, 40, dtype=dtype)
        Kernels(isa).call(
            "silu_mul", 1, dtype=dtype_name(dtype), gate_up=gate_up, stride=80, out=out, out_stride=40, dim=40
        )
        assert out[0].isnan().nonzero().flatten().tolist() == [3, 5]
        assert out[0, 37] == float("inf")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 33, 576])
def test_gather_rows(isa: str, dtype: torch.dtype, dim: int) -> None:
    x, index = strided(random(9, dim, dtype, 1), 3), int32([8, 0, 0, 5, 7])
    out = output(5, dim, dtype)
    Kernels(isa).call(
        "gather_rows",
        5,
        dtype=dtype_name(dtype),
        x=x,
        x_stride=x.stride(0),
        index=index,
        out=out,
        out_stride=out.stride(0),
        dim=dim,
    )
    assert torch.equal(out, x[index.long()])
