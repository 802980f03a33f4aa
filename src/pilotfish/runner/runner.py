"""The runner: scheduled sequences in, logits of their chosen rows out. Device only; it knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pilotfish.attention import AttentionBackend
from pilotfish.models import AuxStates, Model
from pilotfish.ops import Ops
from pilotfish.runner.batch import BatchBuilder, Segment

__all__ = ["EagerRunner", "Runner"]


class Runner(Protocol):
    """Runs one model's forward passes."""

    @property
    def ops(self) -> Ops:
        """What the sampler computes with."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a KV page."""
        ...

    @property
    def hidden(self) -> Tensor:
        """The last forward pass's states after the final norm, [T, H] in the ops' dtype, a row for each of its tokens
        in segment order. The next call may overwrite it."""
        ...

    @property
    def features(self) -> Tensor:
        """What draft heads read of the last forward pass: :attr:`hidden`, or of a runner with ``aux_layers`` the states
        that enter those layers, [T, len(aux_layers) * H]."""
        ...

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Compute the segments' tokens, write their KV, and return float32 [R, V] logits of the rows asked for.

        The result may be overwritten by the next call.
        """
        ...


class EagerRunner:
    """Calls the model op by op.

    Args:
        model: built with ``ops``.
        ops: of the backend.
        attention: the KV pool.
        builder: its buffers hold each step.
        aux_layers: layers whose input states are the features (see :class:`pilotfish.models.AuxStates`); none: the
            hidden states after the final norm are.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        attention: AttentionBackend,
        builder: BatchBuilder,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self.ops = ops
        self._model = model
        self._attention = attention
        self._builder = builder
        self._aux_layers = aux_layers
        self._hidden = self._features = torch.empty(0)

    @property
    def page_size(self) -> int:
        return self._builder.page_size

    @property
    def hidden(self) -> Tensor:
        return self._hidden

    @property
    def features(self) -> Tensor:
        return self._features

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Tensor:
        size = self._builder.build(segments)
        batch = self._builder.batch(size)
        aux = AuxStates(self._aux_layers) if self._aux_layers else None
        hidden = self._hidden = self._model.forward(batch, self._attention.plan(batch), aux)
        self._features = hidden if aux is None else aux.states(self.ops)
        return self._model.logits(self.ops.gather_rows(hidden, self._builder.logits_rows(size.num_logits)))
