"""The decoder layer of Llama's family, which the models and the draft heads are made of.

Pre-norm: x += attention(norm(x)); x += mlp(norm(x)). Grouped-query attention with rotary positions, SwiGLU MLP. Qwen2
adds biases to the q, k and v projections, Qwen3 an RMSNorm on each head of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pilotfish.attention import AttentionPlan, RopeTable
from pilotfish.models.config import ModelConfig
from pilotfish.models.layers import gated_mlp, pack_fused, split_qkv
from pilotfish.ops import Linear, Ops

__all__ = ["DecoderLayer", "layer_tensors"]


def layer_tensors(
    config: ModelConfig, prefix: str, *, attention_inputs: int | None = None, input_norm: bool = True
) -> dict[str, tuple[int, ...]]:
    """Names (Hugging Face's, under ``prefix``) and shapes of one layer's tensors.

    Args:
        config: of the model or head that the layer belongs to.
        prefix: such as ``model.layers.0``.
        attention_inputs: width of what q, k and v are projected from; None: the hidden size.
        input_norm: whether the layer has an ``input_layernorm`` (of the hidden size).
    """
    h, i = config.hidden_size, config.intermediate_size
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inputs = h if attention_inputs is None else attention_inputs
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    shapes: dict[str, tuple[int, ...]] = {}
    if input_norm:
        shapes[f"{prefix}.input_layernorm.weight"] = (h,)
    for name, outputs in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{attn}.{name}_proj.weight"] = (outputs, inputs)
        if config.attention_bias:
            shapes[f"{attn}.{name}_proj.bias"] = (outputs,)
    if config.architecture == "qwen3":
        shapes |= {f"{attn}.q_norm.weight": (config.head_dim,), f"{attn}.k_norm.weight": (config.head_dim,)}
    return shapes | {
        f"{attn}.o_proj.weight": (h, q),
        f"{prefix}.post_attention_layernorm.weight": (h,),
        f"{mlp}.gate_proj.weight": (i, h),
        f"{mlp}.up_proj.weight": (i, h),
        f"{mlp}.down_proj.weight": (h, i),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer's weights, packed, but for the input norm: that is the caller's, who fuses it with what comes before.

    Attributes:
        config: of the model or head that the layer belongs to.
        qkv: [(Hq + 2 Hkv) D, H], or of another input width in a head.
        q_norm: [D], Qwen3's.
        k_norm: [D], Qwen3's.
        o: [H, Hq D].
        post_norm: [H].
        gate_up: [2 I, H].
        down: [H, I].
    """

    config: ModelConfig
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, config: ModelConfig, weights: Mapping[str, Tensor], prefix: str, ops: Ops) -> DecoderLayer:
        """Pack the tensors that :func:`layer_tensors` names, read one by one."""
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

        def norm(name: str) -> Tensor:
            return weights[f"{name}.weight"].to(ops.dtype)

        has_head_norms = config.architecture == "qwen3"
        return cls(
            config=config,
            qkv=pack_fused(ops, weights, [f"{attn}.{name}_proj" for name in "qkv"], bias=config.attention_bias),
            q_norm=norm(f"{attn}.q_norm") if has_head_norms else None,
            k_norm=norm(f"{attn}.k_norm") if has_head_norms else None,
            o=ops.pack_linear(weights[f"{attn}.o_proj.weight"]),
            post_norm=norm(f"{prefix}.post_attention_layernorm"),
            gate_up=pack_fused(ops, weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=ops.pack_linear(weights[f"{mlp}.down_proj.weight"]),
        )

    def run(
        self, ops: Ops, index: int, x: Tensor, residual: Tensor, attention: AttentionPlan, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """Attention and MLP, without the norm before and the addition after them: both are the caller's to fuse.

        Args:
            ops: that packed the weights.
            index: of the layer in ``attention``'s KV pool.
            x: [T, inputs of qkv], normed.
            residual: [T, H], which may be updated in place.
            attention: planned for the same T tokens.
            rope: rotary tables.

        Returns:
            (the MLP's output [T, H], the residual [T, H] that it is to be added to).
        """
        eps, head_dim = self.config.rms_norm_eps, self.config.head_dim
        q, k, v = split_qkv(ops.linear(x, self.qkv), self.config)
        if self.q_norm is not None and self.k_norm is not None:
            # Before the rotation, which keeps lengths: each head is normed as a vector of its own.
            q = ops.rms_norm(q.view(x.shape[0], -1, head_dim), self.q_norm, eps).flatten(1)
            k = ops.rms_norm(k.view(x.shape[0], -1, head_dim), self.k_norm, eps).flatten(1)
        x = ops.linear(attention.run(index, q, k, v, rope), self.o)
        x, residual = ops.add_rms_norm(x, residual, self.post_norm, eps)
        return gated_mlp(ops, x, self.gate_up, self.down), residual
