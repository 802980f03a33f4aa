"""EAGLE-3 heads (Li et al., arXiv:2503.01840), and 3.1's norms.

``fc`` makes one state of several layers' of the target. The layer's attention reads
``[input_layernorm(embedding); hidden_norm(state)]``, twice as wide as the residual stream, which starts from the state
alone. Then ``norm`` and an output head over the draft vocabulary. What is recycled, before or after ``norm``, the
contract says; ``fc`` is only for the target's states. Without ``aux_layers`` there is no ``fc``, and the state is the
target's last.
"""

from __future__ import annotations

from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch
from pilotfish.models.decoder_layer import DecoderLayer
from pilotfish.models.heads.parts import HeadBase, HeadParts

__all__ = ["Eagle3Head"]


class Eagle3Head(HeadBase):
    """See :class:`pilotfish.models.heads.DraftHead`."""

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        num_states = len(self.config.aux_layers)
        self._fc = parts.linear("fc") if num_states else None
        self._fc_norms = [parts.norm(f"fc_norm.{i}") for i in range(num_states)] if self.config.fc_norm else []
        self._hidden_norm = parts.norm("hidden_norm")
        self._input_norm = parts.norm("layer.input_layernorm")
        self._layer = DecoderLayer.load(self.config.shape, parts.weights, "layer", parts.ops)
        self._norm = parts.norm("norm")

    def fuse(self, features: Tensor) -> Tensor:
        if self._fc is None:
            return features
        ops, eps = self._ops, self.config.shape.rms_norm_eps
        if self._fc_norms:
            states = features.split(self.config.target_hidden_size, dim=-1)
            features = ops.concat(
                [ops.rms_norm(state, norm, eps) for state, norm in zip(states, self._fc_norms, strict=True)]
            )
        return ops.linear(features, self._fc)

    def forward(
        self, batch: ForwardBatch, states: Tensor, attention: AttentionPlan, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        ops, eps = self._ops, self.config.shape.rms_norm_eps
        embedded = ops.rms_norm(ops.embedding(batch.token_ids, self._embedding), self._input_norm, eps)  # [T, H]
        normed = ops.rms_norm(states, self._hidden_norm, eps)
        x = self._concat(embedded, normed)
        # A copy of the caller's states: ops may add to the residual in place.
        residual = normed if self.config.norm_before_residual else ops.concat([states])
        x, residual = self._layer.run(ops, module, x, residual, attention, self.rope)
        out, residual = ops.add_rms_norm(x, residual, self._norm, eps)
        return out, (out if self.config.recycles == "post_norm" else residual)
