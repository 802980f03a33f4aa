"""From a contract and tensors to a head that runs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pilotfish.models.heads.base import DraftHead
from pilotfish.models.heads.config import HeadConfig, HeadKind
from pilotfish.models.heads.eagle import EagleHead
from pilotfish.models.heads.eagle3 import Eagle3Head
from pilotfish.models.heads.mtp import MtpHead
from pilotfish.models.heads.parts import HeadParts
from pilotfish.ops import Linear, Ops

__all__ = ["build_head"]

_KINDS: Mapping[HeadKind, type[MtpHead] | type[EagleHead] | type[Eagle3Head]] = {
    "mtp": MtpHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
}


def build_head(
    config: HeadConfig,
    weights: Mapping[str, Tensor],
    ops: Ops,
    *,
    embedding: Linear | None,
    lm_head: Linear | None,
    token_ids: Tensor | None,
    max_model_len: int | None = None,
) -> DraftHead:
    """Pack a head's weights for a backend. Differentiable if the ops are: nothing is detached.

    Args:
        config: the contract.
        weights: every tensor of ``head_tensors(config)``, in any float dtype.
        ops: the backend, in the dtype that the head is to run in.
        embedding: the target's packed table (``Model.embedding``); None if the head has its own.
        lm_head: rows ``token_ids`` of the target's output head, packed: see
            :func:`pilotfish.models.heads.pack_lm_head`; None if the head has its own.
        token_ids: int64 [D], ascending; None: the whole vocabulary.
        max_model_len: positions that will be asked for, in tokens. None: the config's whole context.

    Raises:
        ConfigError: parts that do not fit the config.
    """
    return _KINDS[config.kind](HeadParts(config, weights, ops, embedding, lm_head, token_ids, max_model_len))
