"""The native runner of a draft head: each module is recorded once and replayed in two native calls a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish.attention.native import NativeAttention, NativePlan
from pilotfish.models.heads import DraftHead
from pilotfish.ops.native import NativeOps
from pilotfish.ops.recorder import Recording, record
from pilotfish.runner.batch import BatchBuilder, Segment
from pilotfish.runner.head import HeadStep, bits

__all__ = ["RecordedHeadRunner"]


class RecordedHeadRunner:
    """A :class:`pilotfish.runner.HeadRunner` whose Python cost does not grow with the number of ops.

    Args:
        head: built with ``ops``.
        ops: the native ops.
        attention: the KV pool, a layer for each module.
        builder: its buffers are the recordings' inputs.
        max_logits: most rows of logits that a pass asks for.
    """

    def __init__(
        self,
        head: DraftHead,
        ops: NativeOps,
        attention: NativeAttention,
        builder: BatchBuilder,
        max_logits: int,
    ) -> None:
        self.head = head
        self.ops = ops
        self.num_pages = attention.num_pages
        self._builder = builder
        max_tokens = builder.full_size.num_tokens
        states = torch.zeros(max_tokens, head.config.shape.hidden_size, dtype=ops.dtype)
        self._states = bits(states)
        features = torch.zeros(max_tokens, head.config.feature_size, dtype=ops.dtype)
        self._features = bits(features)
        batch = builder.batch(builder.full_size)
        self._plan = attention.plan(batch)
        logits_rows = builder.logits_rows(max_logits)
        with torch.inference_mode():
            self._modules = [
                _Module(head, ops, self._plan, states, logits_rows, module, [head, attention])
                for module in range(head.config.num_modules)
            ]
            # Without aux layers rows read features as they are, and there is nothing to record.
            self._fuse = (
                record(ops, lambda: head.fuse(features), rows=max_tokens, inputs=[features], keep=[head])
                if head.config.aux_layers
                else None
            )

    @property
    def page_size(self) -> int:
        return self._builder.page_size

    @property
    def native_ns(self) -> int:
        """Nanoseconds spent in native kernels so far: the head's, and those of its ops that ran one by one."""
        recordings = [recording for module in self._modules for recording in (module.forward, module.logits)]
        if self._fuse is not None:
            recordings.append(self._fuse)
        return sum(recording.program.native_ns for recording in recordings) + self.ops.eager_ns

    def fuse(self, features: Tensor) -> Tensor:
        if self._fuse is None:
            return features
        count = features.shape[0]
        self._features[:count] = bits(features)
        return self._fuse.run(count)

    def forward(self, segments: Sequence[Segment], states: Tensor, module: int = 0) -> HeadStep:
        size = self._builder.build(segments)
        self._plan.resize(size.num_tokens, size.num_seqs)
        self._states[: size.num_tokens] = bits(states)
        return self._modules[module].run(size.num_tokens, size.num_logits)


class _Module:
    """The recordings of one module: its forward pass, and its logits of chosen rows."""

    def __init__(
        self,
        head: DraftHead,
        ops: NativeOps,
        plan: NativePlan,
        states: Tensor,
        logits_rows: Tensor,
        module: int,
        keep: Sequence[object],
    ) -> None:
        batch = plan.batch

        def forward() -> Tensor:
            # Whoever holds a result holds its place in the recording's workspace.
            out, self._recycled = head.forward(batch, states, plan, module)
            return out

        self.forward: Recording = record(
            ops, forward, rows=batch.num_tokens, inputs=[batch.token_ids, states], keep=keep
        )
        out = self.forward.output
        self.logits: Recording = record(
            ops,
            lambda: head.logits(ops.gather_rows(out, logits_rows), module),
            rows=logits_rows.shape[0],
            inputs=[out, logits_rows],
            keep=keep,
        )

    def run(self, num_tokens: int, num_logits: int) -> HeadStep:
        self.forward.run(num_tokens)
        return HeadStep(self.logits.run(num_logits), self._recycled[:num_tokens])
