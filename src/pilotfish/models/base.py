"""The contract of a model: two calls. Which rows get logits is the runner's choice, never the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch, RopeTable
from pilotfish.models.config import ModelConfig
from pilotfish.ops import Linear, Ops

__all__ = ["AuxStates", "Model"]


class AuxStates:
    """Collects hidden states from inside one forward pass, for draft heads that read more than the last one (EAGLE-3).

    Args:
        layers: layer ids in the order of the result. **Id i means the hidden state that enters layer i**: the residual
            stream before any norm, which is the output of layer i - 1; ``num_layers`` is the last layer's output. Other
            projects count the same states as outputs, one lower: :mod:`pilotfish.models.heads` converts.

    Raises:
        ValueError: no layers, one twice, or one below 1.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 1:
            raise ValueError(f"layers={self.layers}: must be different layer ids of at least 1")
        self._taken: dict[int, Tensor] = {}

    def take(self, ops: Ops, layer: int, residual: Tensor) -> None:
        """Called by the model with the state [T, H] that enters each layer; keeps a copy of those that are wanted."""
        if layer in self.layers:
            # A copy: ops may add the next layer's output to the residual in place.
            self._taken[layer] = ops.concat([residual])

    def states(self, ops: Ops) -> Tensor:
        """The states side by side, in the order of ``layers``: [T, len(layers) * H].

        Raises:
            ValueError: a layer that the model does not have.
        """
        missing = [layer for layer in self.layers if layer not in self._taken]
        if missing:
            raise ValueError(f"layers={self.layers}: the model has no state that enters layer {missing[0]}")
        return ops.concat([self._taken[layer] for layer in self.layers])


class Model(Protocol):
    """A decoder-only transformer over one backend's ops. Holds weights, no state of any request.

    Attributes:
        config: the model's shape.
        rope: rotary tables, one row for each position that the model can be asked for.
    """

    config: ModelConfig
    rope: RopeTable

    @property
    def embedding(self) -> Linear:
        """The packed [V, H] table of token embeddings, which draft heads share."""
        ...

    @property
    def lm_head(self) -> Linear:
        """The packed [V, H] output head; the embedding itself where the two are tied."""
        ...

    def forward(self, batch: ForwardBatch, attention: AttentionPlan, aux: AuxStates | None = None) -> Tensor:
        """Run all layers over the batch's T tokens, with ``attention`` planned for the same batch.

        Writes the tokens' keys and values to the plan's KV pool. Returns the hidden states after the final norm,
        [T, H] in the ops' dtype; ``aux`` collects states from between the layers.
        """
        ...

    def first_layers(self, num_layers: int) -> Self:
        """The same model without its later layers: a draft without weights of its own."""
        ...

    def with_lm_head(self, lm_head: Linear) -> Self:
        """The same model with another output head, such as rows of its own."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for chosen rows of ``forward``'s result: [R, H] -> float32 [R, V]."""
        ...
