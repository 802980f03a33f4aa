"""Which kernels run here: the backend that ``auto`` stands for, and its ops."""

from __future__ import annotations

import logging

import torch

from pilotfish.config import BackendName, EngineConfig
from pilotfish.errors import BackendError
from pilotfish.ops import Ops
from pilotfish.ops.reference import TorchOps

__all__ = ["choose_backend", "make_ops"]

logger = logging.getLogger(__name__)


def choose_backend(config: EngineConfig) -> BackendName:
    """The backend for ``auto``: native where this machine runs it.

    Raises:
        BackendError: native was asked for and does not run here.
    """
    if config.backend == "torch":
        return "torch"
    try:
        from pilotfish import _native
    except ImportError as error:
        reason = f"its extension module cannot be imported ({error}). Reinstall pilotfish with a C++20 compiler"
    else:
        if _native.supported_isas():
            return "native"
        reason = "its kernels need a CPU with AVX2 at least"
    if config.backend == "native":
        raise BackendError(f"backend='native' does not run here: {reason}, or use backend='torch'.")
    logger.warning("backend=torch, which is slow: native does not run here, %s.", reason)
    return "torch"


def make_ops(config: EngineConfig, dtype: torch.dtype) -> Ops:
    """The ops of a config whose backend and threads are chosen."""
    assert config.threads is not None
    if config.backend == "torch":
        torch.set_num_threads(config.threads)
        return TorchOps(dtype)
    from pilotfish import _native
    from pilotfish.ops.native import NativeOps, fastest_path

    return NativeOps(dtype, _native.Team(config.threads), fastest_path(config.isa))
