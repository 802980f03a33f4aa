"""EAGLE-1 and EAGLE-2 heads, which are the same weights (Li et al., arXiv:2401.15077; arXiv:2406.16858).

``fc([embedding; state])`` -> a decoder layer without its input norm -> the predicted state, which goes to the target's
output head as it is: the states that it learns to predict are normed already. No norm anywhere but before the MLP.
"""

from __future__ import annotations

from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch
from pilotfish.models.decoder_layer import DecoderLayer
from pilotfish.models.heads.parts import HeadBase, HeadParts

__all__ = ["EagleHead"]


class EagleHead(HeadBase):
    """See :class:`pilotfish.models.heads.DraftHead`."""

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        self._fc = parts.linear("fc")
        self._layer = DecoderLayer.load(self.config.shape, parts.weights, "layer", parts.ops)

    def forward(
        self, batch: ForwardBatch, states: Tensor, attention: AttentionPlan, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        ops = self._ops
        x = ops.linear(self._concat(ops.embedding(batch.token_ids, self._embedding), states), self._fc)  # [T, H]
        x, residual = self._layer.run(ops, module, x, x, attention, self.rope)
        out = ops.add(x, residual)
        return out, out
