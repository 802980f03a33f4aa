"""The linear and embedding kernels: right, and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

import pytest
import torch

from pilotfish import _native
from pilotfish.errors import BackendError, ConfigError
from pilotfish.ops.native import NativeOps

DTYPES = [torch.bfloat16, torch.float32]
# (K, N): whole blocks; neither a multiple of 32; less than one block; K odd; an odd number of units for two threads.
SHAPES = [(64, 96), (75, 100), (7, 5), (33, 32), (160, 161), (576, 192)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 64, 70]


@pytest.fixture(scope="module", params=_native.supported_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def teams() -> dict[int, _native.Team]:
    return {n: _native.Team(n) for n in (1, 2, 3)}


def random_case(k: int, n: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * k + n)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator)
    return x, weight, bias


def tolerance(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Bound of a float32 sum's rounding error in any order: K times the rounding unit times the sum of |products|."""
    return (x.double().abs() @ weight.double().abs().T) * (x.shape[1] + 4) * 2.0**-24 + 1e-30


def test_this_machine_has_kernels() -> None:
    assert _native.supported_isas(), "no instruction set to test: the other tests here would not run"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_close_to_float64(
    isa: str, teams: dict[int, _native.Team], dtype: torch.dtype, k: int, n: int, with_bias: bool
) -> None:
    ops = NativeOps(dtype, teams[2], isa)
    x, weight, bias = random_case(k, n, 37, dtype)
    packed = ops.pack_linear(weight, bias if with_bias else None)
    want = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    got = ops.linear(x, packed, torch.float32)
    assert got.dtype == torch.float32
    assert ((got - want).abs() <= tolerance(x, weight) + want.abs() * 2.0**-23).all()
    # In bfloat16 out, it is the same sum rounded to the nearest even.
    assert torch.equal(ops.linear(x, packed, torch.bfloat16), got.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_bits_do_not_depend_on_rows_or_threads(
    isa: str, teams: dict[int, _native.Team], dtype: torch.dtype, k: int, n: int
) -> None:
    x, weight, bias = random_case(k, n, max(ROWS), dtype)
    # The same values in a strided view, and behind garbage that must not be read as inputs.
    wide = torch.full((max(ROWS), k + 13), torch.nan, dtype=dtype)
    strided = wide[:, 5 : 5 + k]
    strided.copy_(x)
    alone = None
    for num_threads, team in teams.items():
        ops = NativeOps(dtype, team, isa)
        packed = ops.pack_linear(weight, bias)
        if alone is None:
            alone = torch.cat([ops.linear(row.unsqueeze(0), packed, torch.float32) for row in x])
        for rows in ROWS:
            assert torch.equal(ops.linear(x[:rows], packed, torch.float32), alone[:rows]), (rows, num_threads)
            assert torch.equal(ops.linear(strided[-rows:], packed, torch.float32), alone[-rows:]), (rows, num_threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_outside_the_output(isa: str, teams: dict[int, _native.Team], dtype: torch.dtype) -> None:
    k, n, rows = 40, 45, 19
    x, weight, _ = random_case(k, n, rows, dtype)
    ops = NativeOps(dtype, teams[2], isa)
    packed = ops.pack_linear(weight)
    for out_dtype in (torch.bfloat16, torch.float32):
        frame = torch.full((rows + 2, n + 8), 7.0, dtype=out_dtype)
        program = _native.Program(teams[2], isa)
        name = "bfloat16" if out_dtype == torch.bfloat16 else "float32"
        program.linear(x.data_ptr(), k, packed.data, frame[1:, 4:].data_ptr(), n + 8, name)
        program.run(rows)
        assert torch.equal(frame[1:-1, 4:-4], ops.linear(x, packed, out_dtype))
        frame[1:-1, 4:-4] = 7.0
        assert (frame == 7.0).all()


def test_many_rows_by_many_units(isa: str, teams: dict[int, _native.Team]) -> None:
    """Enough weights for several cache groups of the prefill path, and rows that end in the middle of a block."""
    k, n, rows = 1536, 960, 83
    x, weight, _ = random_case(k, n, rows, torch.bfloat16)
    ops = NativeOps(torch.bfloat16, teams[2], isa)
    packed = ops.pack_linear(weight)
    got = ops.linear(x, packed, torch.float32)
    assert ((got - x.double() @ weight.double().T).abs() <= tolerance(x, weight)).all()
    for row in (0, 40, 82):
        assert torch.equal(ops.linear(x[row : row + 1], packed, torch.float32)[0], got[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_packing_rounds_as_torch_does(dtype: torch.dtype, source: torch.dtype) -> None:
    """Reading rows back by their ids gives the weight itself, from any float dtype and any strides."""
    ops = NativeOps(dtype, _native.Team(2))
    table = (torch.randn(77, 41, generator=torch.Generator().manual_seed(0)) * 100).to(source)
    ids = torch.tensor([76, 0, 31, 32, 0, 64], dtype=torch.int32)
    want = table.to(dtype)[ids.long()]
    assert torch.equal(ops.embedding(ids, ops.pack_linear(table)), want)
    transposed = table.T.contiguous().T
    assert torch.equal(ops.embedding(ids, ops.pack_linear(transposed)), want)
    assert torch.equal(ops.embedding(ids, ops.pack_linear(table[:, :40])), want[:, :40])


def test_nan_and_infinity_stay_what_they_are(isa: str, teams: dict[int, _native.Team]) -> None:
    ops = NativeOps(torch.bfloat16, teams[1], isa)
    weight = torch.eye(40, dtype=torch.bfloat16)
    x = torch.zeros(3, 40, dtype=torch.bfloat16)
    x[1, 3] = torch.nan
    x[2, 5] = torch.inf
    out = ops.linear(x, ops.pack_linear(weight))
    assert (out[0] == 0).all()
    assert out[1].isnan().all()  # NaN times zero is NaN
    assert out[2, 5] == torch.inf


def test_wrong_shapes_are_refused() -> None:
    ops = NativeOps(torch.float32, _native.Team(1))
    packed = ops.pack_linear(torch.zeros(8, 16))
    with pytest.raises(ValueError, match=r"x is torch\.float32 \[2, 15\].*\[rows, 16\]"):
        ops.linear(torch.zeros(2, 15), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        ops.linear(torch.zeros(2, 16, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match=r"bias \[9\]"):
        ops.pack_linear(torch.zeros(8, 16), torch.zeros(9))


def test_unknown_isa_and_dtype_are_refused() -> None:
    team = _native.Team(1)
    with pytest.raises(BackendError, match="this CPU runs"):
        NativeOps(torch.float32, team, "sse9")
    with pytest.raises(ConfigError, match=r"torch\.float16"):
        NativeOps(torch.float16, team)
