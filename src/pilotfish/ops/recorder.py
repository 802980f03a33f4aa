"""Recording ops into a program: the CPU's twin of a CUDA graph.

A model's forward is run once, with inputs of the largest size in buffers that stay where they are::

    recording = record(ops, lambda: model.forward(inputs, plan), rows=max_tokens, inputs=[inputs.token_ids, ...])
    ...                                  # write the batch into the input buffers
    plan.resize(num_tokens, num_seqs)    # a NativePlan over the same buffers
    hidden = recording.run(num_tokens)   # one native call; a [num_tokens, H] view that the next run overwrites

Ops over other rows are a recording of their own: ``rows=max_logits, inputs=[recording.output, rows]`` for
``model.logits(ops.gather_rows(hidden, rows))``.

Nothing is computed while recording. Because every kernel takes its number of rows when it runs, one recording serves
every number up to ``rows``. Only ops are recorded: a result that something else computed (``x + 1``) would be stale at
replay, so operands must be outputs of recorded ops (or views of them) or declared inputs; anything else is an error.

Results live in a workspace that is reused as soon as the last tensor that views a result is gone, as torch's own
allocator would, so a forward pass touches few megabytes and they stay in the cache.
"""

from __future__ import annotations

import math
import weakref
from bisect import insort
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pilotfish import _native
from pilotfish.ops.native import NativeOps

__all__ = ["Recorder", "Recording", "Workspace", "record"]

_ALIGNMENT = 64
_BUFFER_BYTES = 8 << 20


class Workspace:
    """Memory that tensors hold for as long as they, or views of them, live.

    First fit, lowest address first, so that what was used last is used again.
    """

    def __init__(self) -> None:
        self._buffers: list[_native.HugeBuffer] = []
        self._free: list[tuple[int, int]] = []  # (start, end) addresses, ascending, never touching

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, not initialised."""
        num_bytes = math.prod(shape) * dtype.itemsize
        block = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        start = self._take(block)
        buffer = next(b for b in self._buffers if b.address <= start < b.address + b.num_bytes)
        offset = start - buffer.address
        array = buffer.array()[offset : offset + num_bytes]
        # All views share one storage, which holds the array: the array dies with the last of them.
        release = weakref.finalize(array, _give_back, weakref.ref(self), start, start + block)
        release.atexit = False
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def owns(self, x: Tensor) -> bool:
        """Whether the tensor's memory is in this workspace."""
        address = x.data_ptr()
        return any(b.address <= address < b.address + b.num_bytes for b in self._buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes that this workspace has taken from the system (less are touched)."""
        return sum(b.num_bytes for b in self._buffers)

    @property
    def num_free_bytes(self) -> int:
        return sum(end - start for start, end in self._free)

    def _take(self, num_bytes: int) -> int:
        for i, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                self._free[i : i + 1] = [(start + num_bytes, end)] if end - start > num_bytes else []
                return start
        buffer = _native.HugeBuffer(max(num_bytes, _BUFFER_BYTES))
        self._buffers.append(buffer)
        if buffer.num_bytes > num_bytes:
            insort(self._free, (buffer.address + num_bytes, buffer.address + buffer.num_bytes))
        return buffer.address

    def _give(self, start: int, end: int) -> None:
        insort(self._free, (start, end))
        borders = {b.address for b in self._buffers}  # pieces of different buffers are never joined
        joined: list[tuple[int, int]] = []
        for piece in self._free:
            if joined and joined[-1][1] == piece[0] and piece[0] not in borders:
                joined[-1] = (joined[-1][0], piece[1])
            else:
                joined.append(piece)
        self._free = joined


def _give_back(workspace: weakref.ref[Workspace], start: int, end: int) -> None:
    # Finalizers are registered globally: a strong reference would keep the workspace alive until the process ends.
    if (alive := workspace()) is not None:
        alive._give(start, end)


class Recorder:
    """A sink of :class:`NativeOps` that collects kernel calls in one program.

    Args:
        ops: whose team and instruction set the program uses.
        rows: rows of every op, the most that the program will run with.
        inputs: tensors that are written between runs. They must stay where they are; the program keeps them alive.
    """

    def __init__(self, ops: NativeOps, rows: int, inputs: Sequence[Tensor]) -> None:
        self.program = _native.Program(ops.team, ops.isa)
        self.rows = rows
        self.workspace = Workspace()
        self.kept: list[object] = [*inputs]
        self._inputs = {x.untyped_storage().data_ptr() for x in inputs}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.workspace.empty(shape, dtype)

    def contiguous(self, x: Tensor) -> Tensor:
        raise ValueError(
            f"A recorded op got a tensor {list(x.shape)} with strides {list(x.stride())}: a copy would not be "
            "recorded. Use views whose last dimension is contiguous."
        )

    def begin(self) -> _native.Program:
        return self.program

    def end(self, program: _native.Program, rows: int, *operands: Tensor) -> None:
        if rows != self.rows:
            raise ValueError(f"A recorded op has {rows} rows; this recording is of {self.rows}. Record it separately.")
        for x in operands:
            if not self.workspace.owns(x) and x.untyped_storage().data_ptr() not in self._inputs:
                raise ValueError(
                    f"A recorded op got a tensor {list(x.shape)} that no recorded op computed: it would be stale at "
                    "replay. Compute it with ops, or name it in inputs."
                )


class Recording:
    """A recorded function. Build it with :func:`record`.

    Attributes:
        program: the kernel calls; its ``native_ns`` and ``profile_ns`` tell where time goes.
        output: what the function returned, [rows, ...] in the workspace.
        max_rows: the most rows it can run with.
    """

    def __init__(self, recorder: Recorder, output: Tensor, keep: Sequence[object]) -> None:
        self.program = recorder.program
        self.output = output
        self.max_rows = recorder.rows
        self.workspace_bytes = recorder.workspace.num_bytes
        self._kept = (recorder, keep)

    def run(self, rows: int) -> Tensor:
        """Replay with that many rows; returns ``output[:rows]``, valid until the next run."""
        if not 0 <= rows <= self.max_rows:
            raise ValueError(f"run got {rows} rows: this recording takes 0 to {self.max_rows}")
        self.program.run(rows)
        return self.output[:rows]


def record(
    ops: NativeOps,
    function: Callable[[], Tensor],
    *,
    rows: int,
    inputs: Sequence[Tensor],
    keep: Sequence[object] = (),
) -> Recording:
    """Record the ops that ``function`` calls. See the module's docstring.

    Args:
        ops: the ops that ``function`` uses, directly or through a model or an attention plan.
        function: returns a [rows, ...] tensor that an op computed.
        rows: the most rows that the recording will run with; every op inside must have that many.
        inputs: the tensors that ``function`` reads and the caller rewrites between runs.
        keep: whatever else must live as long as the recording: weights, models, attention plans.

    Raises:
        ValueError: something that cannot be replayed was asked for (see the messages).
    """
    recorder = Recorder(ops, rows, inputs)
    with ops.recording(recorder):
        output = function()
    if not recorder.workspace.owns(output) or output.shape[0] != rows:
        raise ValueError(f"The recorded function returned a tensor {list(output.shape)} that no recorded op computed")
    return Recording(recorder, output, [function, *keep])
