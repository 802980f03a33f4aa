"""Ops on the native CPU kernels, run at once or recorded.

An op computes nothing by itself: it asks the ops' *sink* for memory and for a :class:`pilotfish._native.Program`, and
appends kernel calls to it. The usual sink, :class:`EagerSink`, runs them at once. Inside
``with ops.recording(recorder):`` the same calls go into one program that is replayed later
(:mod:`pilotfish.ops.recorder`), and a model that is written in ops does not notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from pilotfish import _native
from pilotfish.errors import BackendError, ConfigError
from pilotfish.ops.base import Linear, NoiseKeys

__all__ = ["EagerSink", "NativeOps", "Sink", "best_isa", "dtype_name", "fastest_path"]


class Sink(Protocol):
    """Where ops put their kernel calls and find memory for results."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result, contiguous, not initialised."""
        ...

    def contiguous(self, x: Tensor) -> Tensor:
        """``x`` with contiguous memory."""
        ...

    def begin(self) -> _native.Program:
        """The program that takes the next op's kernel calls."""
        ...

    def end(self, program: _native.Program, rows: int, *operands: Tensor) -> None:
        """The op is complete: it has that many rows, and reads or writes ``operands`` (weights included)."""
        ...


class EagerSink:
    """Runs every op at once, as torch does."""

    def __init__(self, team: _native.Team, isa: str) -> None:
        self.native_ns = 0
        self._team = team
        self._isa = isa

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def contiguous(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def begin(self) -> _native.Program:
        return _native.Program(self._team, self._isa)

    def end(self, program: _native.Program, rows: int, *operands: Tensor) -> None:
        program.run(rows)
        self.native_ns += program.native_ns


def best_isa(isa: str | None = None) -> str:
    """The instruction set to use: ``isa`` if this machine runs it, the best one for None or ``"auto"``.

    Raises:
        BackendError: the machine runs no native kernels, or not this instruction set.
    """
    supported = _native.supported_isas()
    if not supported:
        raise BackendError("No native kernels run on this CPU (they need AVX2 at least). Use backend='torch'.")
    if isa is None or isa == "auto":
        return supported[-1]
    if isa not in supported:
        raise BackendError(f"isa={isa!r}: this CPU runs {', '.join(supported)}. Use one of these, or isa='auto'.")
    return isa


def fastest_path(isa: str | None = None) -> str:
    """The fastest kernels that need no more than instruction set ``isa`` (None or ``"auto"``: than this CPU has).

    They are those of ``isa`` itself but for AVX512-BF16 on a CPU whose bf16 dot product is slow: there float32
    multiply-adds on widened weights, the ``avx512`` kernels, are faster.

    Raises:
        BackendError: as :func:`best_isa`.
    """
    best = best_isa(isa)
    return "avx512" if best == "avx512_bf16" and not _native.fast_dpbf16() else best


def dtype_name(dtype: torch.dtype) -> str:
    """The kernels' name of a dtype. Raises ConfigError for one they don't have."""
    if dtype == torch.bfloat16:
        return "bfloat16"
    if dtype == torch.float32:
        return "float32"
    raise ConfigError(f"dtype={dtype}: the native kernels have bfloat16 and float32")


class NativeOps:
    """:class:`pilotfish.ops.Ops` on the native kernels.

    Args:
        dtype: of weights and activations, bfloat16 or float32.
        team: the threads that run the kernels.
        isa: instruction set, by name; None takes the best one. Results depend on it (in the last bits) and on nothing
            else: not on threads, rows or batches.

    Raises:
        BackendError: this machine does not run the instruction set.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype, team: _native.Team, isa: str | None = None) -> None:
        self.dtype = dtype
        self.team = team
        self.isa = best_isa(isa)
        self._eager = EagerSink(team, self.isa)
        self.sink: Sink = self._eager
        self._dtype_name = dtype_name(dtype)
        self._arena = _native.Arena()

    @property
    def eager_ns(self) -> int:
        """Nanoseconds spent in kernels that were not recorded."""
        return self._eager.native_ns

    @contextmanager
    def recording(self, sink: Sink) -> Iterator[None]:
        """Send the kernel calls of all ops, and of attention plans made by these ops, to ``sink`` meanwhile.

        Not to be entered while another thread uses the same ops.
        """
        previous = self.sink
        self.sink = sink
        try:
            yield
        finally:
            self.sink = previous

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            shapes = f"weight {list(weight.shape)}" + ("" if bias is None else f", bias {list(bias.shape)}")
            raise ValueError(f"pack_linear got {shapes}: must be [N, K] and [N]")
        if weight.dtype not in (torch.bfloat16, torch.float32):
            weight = weight.to(torch.float32)
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        if bias is not None:
            bias = bias.to(torch.float32).contiguous()
        n, k = weight.shape
        packed = _native.pack_linear(
            self._arena,
            self.team,
            weight.data_ptr(),
            dtype_name(weight.dtype),
            n,
            k,
            weight.stride(0),
            self._dtype_name,
            0 if bias is None else bias.data_ptr(),
        )
        return Linear(k, n, packed)

    def embedding(self, token_ids: Tensor, table: Linear) -> Tensor:
        token_ids = self._vector("token_ids", token_ids, torch.int32)
        rows = token_ids.shape[0]
        out = self.sink.empty((rows, table.in_features), self.dtype)
        program = self.sink.begin()
        program.embedding(token_ids.data_ptr(), table.data, out.data_ptr(), table.in_features)
        self.sink.end(program, rows, token_ids, out)
        return out

    def linear(self, x: Tensor, weight: Linear, out_dtype: torch.dtype | None = None) -> Tensor:
        x = self._matrix("x", x, self.dtype, weight.in_features)
        rows, n = x.shape[0], weight.out_features
        dtype = out_dtype or self.dtype
        out = self.sink.empty((rows, n), dtype)
        program = self.sink.begin()
        program.linear(x.data_ptr(), x.stride(0), weight.data, out.data_ptr(), n, dtype_name(dtype))
        self.sink.end(program, rows, x, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dim = x.shape[-1]
        groups = x.shape[1] if x.ndim == 3 else 1
        self._check_weight(weight, dim)
        if x.ndim not in (2, 3) or x.dtype != self.dtype:
            raise ValueError(f"rms_norm got {x.dtype} {list(x.shape)}: must be {self.dtype} [T, H] or [T, heads, D]")
        if x.stride(-1) != 1 or (x.ndim == 3 and groups > 1 and x.stride(1) != dim):
            x = self.sink.contiguous(x)
        rows = x.shape[0]
        out = self.sink.empty(x.shape, self.dtype)
        program = self.sink.begin()
        program.rms_norm(
            self._dtype_name,
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            groups * dim,
            groups,
            dim,
            eps,
        )
        self.sink.end(program, rows, x, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dim = residual.shape[-1]
        x = self._matrix("x", x, self.dtype, dim)
        residual = self._matrix("residual", residual, self.dtype, dim)
        self._check_weight(weight, dim)
        if x.shape != residual.shape:
            raise ValueError(f"add_rms_norm got x {list(x.shape)}, residual {list(residual.shape)}: must be equal")
        rows = x.shape[0]
        out = self.sink.empty((rows, dim), self.dtype)
        program = self.sink.begin()
        program.add_rms_norm(
            self._dtype_name,
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            dim,
            dim,
            eps,
        )
        self.sink.end(program, rows, x, residual, out)
        return out, residual

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        residual = self._matrix("residual", residual, self.dtype)
        rows, dim = residual.shape
        x = self._matrix("x", x, self.dtype, dim)
        if x.shape[0] != rows:
            raise ValueError(f"add got x {list(x.shape)}, residual {list(residual.shape)}: must be equal")
        out = self.sink.empty((rows, dim), self.dtype)
        program = self.sink.begin()
        program.add(
            self._dtype_name,
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            out.data_ptr(),
            dim,
            dim,
        )
        self.sink.end(program, rows, x, residual, out)
        return out

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        if not xs:
            raise ValueError("concat got no tensor: must be at least one")
        xs = [self._matrix(f"xs[{i}]", x, self.dtype) for i, x in enumerate(xs)]
        rows, dims = xs[0].shape[0], [x.shape[1] for x in xs]
        if any(x.shape[0] != rows for x in xs):
            raise ValueError(f"concat got {[list(x.shape) for x in xs]}: must have equally many rows")
        out = self.sink.empty((rows, sum(dims)), self.dtype)
        program = self.sink.begin()
        program.concat(
            self._dtype_name, [x.data_ptr() for x in xs], [x.stride(0) for x in xs], dims, out.data_ptr(), out.shape[1]
        )
        self.sink.end(program, rows, *xs, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = self._matrix("gate_up", gate_up, self.dtype)
        rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.sink.empty((rows, dim), self.dtype)
        program = self.sink.begin()
        program.silu_mul(self._dtype_name, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), dim, dim)
        self.sink.end(program, rows, gate_up, out)
        return out

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        x = self._matrix("x", x, self.dtype)
        index = self._vector("rows", rows, torch.int32)
        count, dim = index.shape[0], x.shape[1]
        out = self.sink.empty((count, dim), self.dtype)
        program = self.sink.begin()
        program.gather_rows(self._dtype_name, x.data_ptr(), x.stride(0), index.data_ptr(), out.data_ptr(), dim, dim)
        self.sink.end(program, count, x, index, out)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        logits = self._matrix("logits", logits, torch.float32)
        rows, vocab = logits.shape
        out = self.sink.empty((rows,), torch.int32)
        program = self.sink.begin()
        program.argmax(logits.data_ptr(), logits.stride(0), vocab, out.data_ptr())
        self.sink.end(program, rows, logits, out)
        return out

    def noise_argmax(self, logits: Tensor, inv_temperature: Tensor, noise: NoiseKeys) -> Tensor:
        logits = self._matrix("logits", logits, torch.float32)
        rows, vocab = logits.shape
        scale = self._vector("inv_temperature", inv_temperature, torch.float32, rows)
        seeds = self._vector("seeds", noise.seeds, torch.int64, rows)
        samples = self._vector("sample_indices", noise.sample_indices, torch.int32, rows)
        positions = self._vector("positions", noise.positions, torch.int32, rows)
        out = self.sink.empty((rows,), torch.int32)
        program = self.sink.begin()
        program.noise_argmax(
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            scale.data_ptr(),
            seeds.data_ptr(),
            samples.data_ptr(),
            positions.data_ptr(),
            out.data_ptr(),
        )
        self.sink.end(program, rows, logits, scale, seeds, samples, positions, out)
        return out

    def _matrix(self, name: str, x: Tensor, dtype: torch.dtype, columns: int | None = None) -> Tensor:
        """``x`` as the kernels take it: [rows, columns] with a unit inner stride."""
        if x.ndim != 2 or x.dtype != dtype or (columns is not None and x.shape[1] != columns):
            wanted = f"[rows, {'columns' if columns is None else columns}]"
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}: must be {dtype} {wanted}")
        return x if x.stride(1) == 1 else self.sink.contiguous(x)

    def _vector(self, name: str, x: Tensor, dtype: torch.dtype, length: int | None = None) -> Tensor:
        if x.ndim != 1 or x.dtype != dtype or (length is not None and x.shape[0] != length):
            wanted = f"[{'rows' if length is None else length}]"
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}: must be {dtype} {wanted}")
        return x if x.stride(0) == 1 else self.sink.contiguous(x)

    def _check_weight(self, weight: Tensor, dim: int) -> None:
        if weight.dtype != self.dtype or weight.shape != (dim,) or weight.stride(0) != 1:
            got = f"{weight.dtype} {list(weight.shape)}"
            raise ValueError(f"norm weight is {got}: must be {self.dtype} [{dim}], contiguous")
