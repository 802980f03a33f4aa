"""Llama 1 to 3 and models of its shape, such as SmolLM2 (Touvron et al., arXiv:2302.13971; Llama 3: arXiv:2407.21783).

Pre-norm decoder: x += attention(norm(x)); x += mlp(norm(x)). Grouped-query attention with rotary positions, SwiGLU MLP.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch
from pilotfish.models.config import ModelConfig
from pilotfish.models.layers import gated_mlp, pack_fused, rope_table, split_qkv
from pilotfish.ops import Linear, Ops

__all__ = ["Llama"]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [H]
    qkv: Linear  # [(Hq + 2 Hkv) D, H]
    o: Linear  # [H, Hq D]
    post_norm: Tensor  # [H]
    gate_up: Linear  # [2 I, H]
    down: Linear  # [H, I]


class Llama:
    """See :class:`pilotfish.models.Model`.

    Args:
        config: shape; ``architecture`` must be ``llama``.
        weights: the tensors that ``expected_tensors`` names, read one by one.
        ops: of the backend that runs the model, and its dtype.
        max_model_len: positions that will be asked for; None: the whole context.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], ops: Ops, max_model_len: int | None = None
    ) -> None:
        self.config = config
        self.rope = rope_table(config, max_model_len)
        self._ops = ops
        self._embed = ops.pack_linear(weights["model.embed_tokens.weight"])
        self._layers = [self._load_layer(weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self._norm = weights["model.norm.weight"].to(ops.dtype)
        self._lm_head = self._embed if config.tie_word_embeddings else ops.pack_linear(weights["lm_head.weight"])

    @staticmethod
    def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors."""
        h, i = config.hidden_size, config.intermediate_size
        q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h)}
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (h,),
                f"{prefix}.self_attn.q_proj.weight": (q, h),
                f"{prefix}.self_attn.k_proj.weight": (kv, h),
                f"{prefix}.self_attn.v_proj.weight": (kv, h),
                f"{prefix}.self_attn.o_proj.weight": (h, q),
                f"{prefix}.post_attention_layernorm.weight": (h,),
                f"{prefix}.mlp.gate_proj.weight": (i, h),
                f"{prefix}.mlp.up_proj.weight": (i, h),
                f"{prefix}.mlp.down_proj.weight": (h, i),
            }
        shapes["model.norm.weight"] = (h,)
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, h)
        return shapes

    def _load_layer(self, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
        ops, attn, mlp = self._ops, f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            input_norm=weights[f"{prefix}.input_layernorm.weight"].to(ops.dtype),
            qkv=pack_fused(ops, weights, [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"]),
            o=ops.pack_linear(weights[f"{attn}.o_proj.weight"]),
            post_norm=weights[f"{prefix}.post_attention_layernorm.weight"].to(ops.dtype),
            gate_up=pack_fused(ops, weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=ops.pack_linear(weights[f"{mlp}.down_proj.weight"]),
        )

    def first_layers(self, num_layers: int) -> Llama:
        """The same model without its later layers; shares all weights."""
        model = copy.copy(self)
        model.config = replace(self.config, num_layers=num_layers)
        model._layers = self._layers[:num_layers]
        return model

    def forward(self, batch: ForwardBatch, attention: AttentionPlan) -> Tensor:
        ops, eps = self._ops, self.config.rms_norm_eps
        residual = ops.embedding(batch.token_ids, self._embed)  # [T, H]
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        # The norm that follows a layer's MLP is the next layer's first, so that adding and norming are one op.
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            q, k, v = split_qkv(ops.linear(x, layer.qkv), self.config)
            x = ops.linear(attention.run(i, q, k, v, self.rope), layer.o)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = gated_mlp(ops, x, layer.gate_up, layer.down)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._lm_head, out_dtype=torch.float32)
