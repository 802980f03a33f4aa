"""The native runner: the model is recorded once and replayed in two native calls a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish.attention.native import NativeAttention
from pilotfish.models import AuxStates, Model
from pilotfish.ops.native import NativeOps
from pilotfish.ops.recorder import record
from pilotfish.runner.batch import BatchBuilder, Segment

__all__ = ["RecordedRunner"]


class RecordedRunner:
    """A :class:`pilotfish.runner.Runner` whose Python cost does not grow with the number of layers.

    Args:
        model: built with ``ops``.
        ops: the native ops.
        attention: the KV pool.
        builder: its buffers are the recording's inputs.
        max_logits: most rows of logits that a step asks for.
        aux_layers: layers whose input states are the features (see :class:`pilotfish.models.AuxStates`); none: the
            hidden states after the final norm are.
    """

    def __init__(
        self,
        model: Model,
        ops: NativeOps,
        attention: NativeAttention,
        builder: BatchBuilder,
        max_logits: int,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self.ops = ops
        self._builder = builder
        self._num_tokens = 0
        batch = builder.batch(builder.full_size)
        self._plan = plan = attention.plan(batch)
        logits_rows = builder.logits_rows(max_logits)

        def forward() -> Tensor:
            aux = AuxStates(aux_layers) if aux_layers else None
            hidden = model.forward(batch, plan, aux)
            # Whoever holds a result holds its place in the recording's workspace.
            self._features = hidden if aux is None else aux.states(ops)
            return hidden

        with torch.inference_mode():
            self._hidden = record(
                ops,
                forward,
                rows=batch.num_tokens,
                inputs=[batch.token_ids],
                keep=[model, attention],
            )
            hidden = self._hidden.output
            self._logits = record(
                ops,
                lambda: model.logits(ops.gather_rows(hidden, logits_rows)),
                rows=max_logits,
                inputs=[hidden, logits_rows],
                keep=[model],
            )

    @property
    def page_size(self) -> int:
        return self._builder.page_size

    @property
    def hidden(self) -> Tensor:
        return self._hidden.output[: self._num_tokens]

    @property
    def features(self) -> Tensor:
        return self._features[: self._num_tokens]

    @property
    def native_ns(self) -> int:
        """Nanoseconds spent in native kernels so far: the model's, and those of its ops that ran one by one."""
        return self._hidden.program.native_ns + self._logits.program.native_ns + self.ops.eager_ns

    def set_profile(self, on: bool) -> None:
        """Measure time by kind of kernel from now on (see :meth:`profile_ns`)."""
        self._hidden.program.set_profile(on)
        self._logits.program.set_profile(on)

    def profile_ns(self) -> dict[str, int]:
        """Nanoseconds by kind of kernel since profiling was switched on; the head's linear layer is ``lm_head``."""
        kinds = dict(self._hidden.program.profile_ns)
        head = self._logits.program.profile_ns
        kinds["lm_head"] = head.pop("linear", 0)
        for kind, nanoseconds in head.items():
            kinds[kind] = kinds.get(kind, 0) + nanoseconds
        return kinds

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        size = self._builder.build(segments)
        self._plan.resize(size.num_tokens, size.num_seqs)
        self._hidden.run(size.num_tokens)
        self._num_tokens = size.num_tokens
        return self._logits.run(size.num_logits)
