"""Multi-token prediction modules (DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 23).

``h' = eh_proj([enorm(embedding); hnorm(state)])`` -> a decoder layer of the target's kind -> ``norm`` -> output head.
The paper writes the state first; all released weights have the embedding first. A chain has one such module for each
token ahead; drafting goes on beyond it by recycling the last module's normed state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch
from pilotfish.models.decoder_layer import DecoderLayer
from pilotfish.models.heads.parts import HeadBase, HeadParts
from pilotfish.ops import Linear

__all__ = ["MtpHead"]


@dataclass(frozen=True, slots=True)
class _Module:
    enorm: Tensor  # [H]
    hnorm: Tensor  # [H]
    eh_proj: Linear  # [H, 2 H]
    input_norm: Tensor  # [H]
    layer: DecoderLayer
    norm: Tensor  # [H]


class MtpHead(HeadBase):
    """See :class:`pilotfish.models.heads.DraftHead`."""

    def __init__(self, parts: HeadParts) -> None:
        super().__init__(parts)
        self._modules = [_load_module(parts, f"modules.{m}") for m in range(self.config.num_modules)]

    def forward(
        self, batch: ForwardBatch, states: Tensor, attention: AttentionPlan, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        ops, eps, m = self._ops, self.config.shape.rms_norm_eps, self._modules[module]
        embedded = ops.rms_norm(ops.embedding(batch.token_ids, self._embedding), m.enorm, eps)  # [T, H]
        residual = ops.linear(self._concat(embedded, ops.rms_norm(states, m.hnorm, eps)), m.eh_proj)
        x = ops.rms_norm(residual, m.input_norm, eps)
        x, residual = m.layer.run(ops, module, x, residual, attention, self.rope)
        out, residual = ops.add_rms_norm(x, residual, m.norm, eps)
        return out, (out if self.config.recycles == "post_norm" else residual)


def _load_module(parts: HeadParts, prefix: str) -> _Module:
    return _Module(
        enorm=parts.norm(f"{prefix}.enorm"),
        hnorm=parts.norm(f"{prefix}.hnorm"),
        eh_proj=parts.linear(f"{prefix}.eh_proj"),
        input_norm=parts.norm(f"{prefix}.layer.input_layernorm"),
        layer=DecoderLayer.load(parts.config.shape, parts.weights, f"{prefix}.layer", parts.ops),
        norm=parts.norm(f"{prefix}.norm"),
    )
