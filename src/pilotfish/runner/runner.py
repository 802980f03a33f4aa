"""The runner: scheduled sequences in, logits of their chosen rows out. Device only; it knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pilotfish.attention import AttentionBackend
from pilotfish.models import Model
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
    def features(self) -> Tensor:
        """What the last forward pass computed for draft heads to read, a row for each of its tokens in segment order:
        the hidden states after the final norm, [T, H] in the ops' dtype. The next call may overwrite it."""
        ...

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Compute the segments' tokens, write their KV, and return float32 [R, V] logits of the rows asked for.

        The result may be overwritten by the next call.
        """
        ...


class EagerRunner:
    """Calls the model op by op."""

    def __init__(self, model: Model, ops: Ops, attention: AttentionBackend, builder: BatchBuilder) -> None:
        self.ops = ops
        self._model = model
        self._attention = attention
        self._builder = builder
        self._features = torch.empty(0)

    @property
    def page_size(self) -> int:
        return self._builder.page_size

    @property
    def features(self) -> Tensor:
        return self._features

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Tensor:
        size = self._builder.build(segments)
        batch = self._builder.batch(size)
        hidden = self._features = self._model.forward(batch, self._attention.plan(batch))
        return self._model.logits(self.ops.gather_rows(hidden, self._builder.logits_rows(size.num_logits)))
