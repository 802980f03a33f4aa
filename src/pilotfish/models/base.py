"""The contract of a model: two calls. Which rows get logits is the runner's choice, never the model's."""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch, RopeTable
from pilotfish.models.config import ModelConfig

__all__ = ["Model"]


class Model(Protocol):
    """A decoder-only transformer over one backend's ops. Holds weights, no state of any request.

    Attributes:
        config: the model's shape.
        rope: rotary tables, one row for each position that the model can be asked for.
    """

    config: ModelConfig
    rope: RopeTable

    def forward(self, batch: ForwardBatch, attention: AttentionPlan) -> Tensor:
        """Run all layers over the batch's T tokens, with ``attention`` planned for the same batch.

        Writes the tokens' keys and values to the plan's KV pool. Returns the hidden states after the final norm,
        [T, H] in the ops' dtype.
        """
        ...

    def first_layers(self, num_layers: int) -> Self:
        """The same model without its later layers: a draft without weights of its own."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for chosen rows of ``forward``'s result: [R, H] -> float32 [R, V]."""
        ...
