"""What the kinds of heads have in common: the embedding and the output head, their own or the target's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pilotfish.errors import ConfigError
from pilotfish.models.draft_vocab import are_draft_ids
from pilotfish.models.heads.config import HeadConfig
from pilotfish.models.layers import rope_table
from pilotfish.ops import Linear, Ops

__all__ = ["HeadBase", "HeadParts", "check_token_ids"]


class HeadParts:
    """What :func:`pilotfish.models.heads.build_head` gives every kind of head.

    Args:
        config: the contract.
        weights: the tensors that ``head_tensors(config)`` names.
        ops: of the backend that runs the head, and its dtype.
        embedding: the target's table; unused if the head has its own.
        lm_head: [D, H] of the target's output head; unused if the head has its own.
        token_ids: int64 [D]; None: the whole vocabulary.
        max_model_len: positions that will be asked for; None: the whole context.

    Raises:
        ConfigError: an embedding or output head that is missing or of another shape, or a draft vocabulary that is not
            an ascending list of D ids.
    """

    def __init__(
        self,
        config: HeadConfig,
        weights: Mapping[str, Tensor],
        ops: Ops,
        embedding: Linear | None,
        lm_head: Linear | None,
        token_ids: Tensor | None,
        max_model_len: int | None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = rope_table(config.shape, max_model_len)
        self.token_ids = check_token_ids(token_ids, config.draft_vocab_size, config.shape.vocab_size)
        h, d = config.shape.hidden_size, config.draft_vocab_size
        if config.own_embedding:
            embedding = ops.pack_linear(weights["embed_tokens.weight"])
        if config.own_lm_head:
            lm_head = ops.pack_linear(weights["lm_head.weight"])
        self.embedding = _check_shape("embedding", embedding, config.shape.vocab_size, h)
        self.lm_head = _check_shape("lm_head", lm_head, d, h)

    def norm(self, name: str) -> Tensor:
        """The weight [H] of a norm, in the ops' dtype."""
        return self.weights[f"{name}.weight"].to(self.ops.dtype)

    def linear(self, name: str) -> Linear:
        """A packed linear layer, with its bias if the weights have one."""
        return self.ops.pack_linear(self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


class HeadBase:
    """The parts of :class:`pilotfish.models.heads.DraftHead` that do not depend on the kind."""

    def __init__(self, parts: HeadParts) -> None:
        self.config = parts.config
        self.rope = parts.rope
        self.token_ids = parts.token_ids
        self._ops = parts.ops
        self._embedding = parts.embedding
        self._lm_head = parts.lm_head

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def logits(self, out: Tensor, module: int = 0) -> Tensor:
        return self._ops.linear(out, self._lm_head, out_dtype=torch.float32)

    def _concat(self, embedded: Tensor, states: Tensor) -> Tensor:
        """[T, 2 H] in the order of the contract."""
        return self._ops.concat([states, embedded] if self.config.hidden_first else [embedded, states])


def check_token_ids(token_ids: Tensor | None, draft_vocab_size: int, vocab_size: int) -> Tensor | None:
    """The draft vocabulary as int64 [D], or None if it is the whole vocabulary.

    Raises:
        ConfigError: no list though it is a slice, or one that is not D ascending ids of the target.
    """
    d, v = draft_vocab_size, vocab_size
    if token_ids is None:
        if d != v:
            raise ConfigError(f"draft_vocab_size={d} of {v} tokens, but no list says which (token_ids, or d2t)")
        return None
    ids = token_ids.to(torch.int64)
    if ids.shape != (d,) or not are_draft_ids(ids.tolist(), v):
        raise ConfigError(f"token_ids of shape {list(ids.shape)}: must be {d} ascending ids from 0 to {v - 1}")
    return None if d == v else ids


def _check_shape(name: str, linear: Linear | None, rows: int, columns: int) -> Linear:
    got = "None" if linear is None else f"[{linear.out_features}, {linear.in_features}]"
    if linear is None or (linear.out_features, linear.in_features) != (rows, columns):
        raise ConfigError(f"{name} is {got}: a head of this config needs [{rows}, {columns}]")
    return linear
