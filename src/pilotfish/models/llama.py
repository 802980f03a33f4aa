"""Llama 1 to 3 and models of its shape, such as SmolLM2 (Touvron et al., arXiv:2302.13971; Llama 3: arXiv:2407.21783).

A stack of pre-norm decoder layers (:mod:`pilotfish.models.decoder_layer`) between an embedding and an output head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch
from pilotfish.models.base import AuxStates
from pilotfish.models.config import ModelConfig
from pilotfish.models.decoder_layer import DecoderLayer, layer_tensors
from pilotfish.models.layers import rope_table
from pilotfish.ops import Linear, Ops

__all__ = ["Llama"]


class Llama:
    """See :class:`pilotfish.models.Model`.

    Args:
        config: shape; its ``architecture`` decides what each layer has.
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
        prefixes = [f"model.layers.{i}" for i in range(config.num_layers)]
        self._layers = [DecoderLayer.load(config, weights, prefix, ops) for prefix in prefixes]
        self._input_norms = [weights[f"{prefix}.input_layernorm.weight"].to(ops.dtype) for prefix in prefixes]
        self._norm = weights["model.norm.weight"].to(ops.dtype)
        self._lm_head = self._embed if config.tie_word_embeddings else ops.pack_linear(weights["lm_head.weight"])

    @staticmethod
    def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
        for layer in range(config.num_layers):
            shapes |= layer_tensors(config, f"model.layers.{layer}")
        shapes["model.norm.weight"] = (config.hidden_size,)
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        return shapes

    @property
    def embedding(self) -> Linear:
        return self._embed

    @property
    def lm_head(self) -> Linear:
        return self._lm_head

    def first_layers(self, num_layers: int) -> Self:
        """The same model without its later layers; shares all weights."""
        model = copy.copy(self)
        model.config = replace(self.config, num_layers=num_layers)
        model._layers = self._layers[:num_layers]
        model._input_norms = self._input_norms[:num_layers]
        return model

    def with_lm_head(self, lm_head: Linear) -> Self:
        """The same model with another output head, such as rows of its own; shares all other weights."""
        model = copy.copy(self)
        model._lm_head = lm_head
        return model

    def forward(self, batch: ForwardBatch, attention: AttentionPlan, aux: AuxStates | None = None) -> Tensor:
        ops, eps = self._ops, self.config.rms_norm_eps
        residual = ops.embedding(batch.token_ids, self._embed)  # [T, H]
        x = ops.rms_norm(residual, self._input_norms[0], eps)
        # The norm that follows a layer's MLP is the next layer's first, so that adding and norming are one op.
        next_norms = [*self._input_norms[1:], self._norm]
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            x, residual = layer.run(ops, i, x, residual, attention, self.rope)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
            if aux is not None:
                aux.take(ops, i + 1, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._lm_head, out_dtype=torch.float32)
