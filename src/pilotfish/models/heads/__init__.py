"""Draft heads: small decoders fed with the target's hidden states (MTP modules, EAGLE-1 to 3)."""

from __future__ import annotations

from pilotfish.models.heads.base import DraftHead
from pilotfish.models.heads.build import build_head
from pilotfish.models.heads.checkpoint import (
    StoredHead,
    load_head,
    open_head,
    pack_lm_head,
    save_head,
    target_stamp,
)
from pilotfish.models.heads.config import HeadConfig, HeadKind, TargetStamp, head_tensors
from pilotfish.models.heads.layouts import AuxConvention, default_aux_layers

__all__ = [
    "AuxConvention",
    "DraftHead",
    "HeadConfig",
    "HeadKind",
    "StoredHead",
    "TargetStamp",
    "build_head",
    "default_aux_layers",
    "head_tensors",
    "load_head",
    "open_head",
    "pack_lm_head",
    "save_head",
    "target_stamp",
]
