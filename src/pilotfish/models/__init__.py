"""Models: one file an architecture, and the registry that picks it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pilotfish.models.base import AuxStates, Model
from pilotfish.models.config import Architecture, ModelConfig
from pilotfish.models.layers import kv_shape
from pilotfish.models.llama import Llama
from pilotfish.models.qwen2 import Qwen2
from pilotfish.models.qwen3 import Qwen3
from pilotfish.ops import Ops

__all__ = ["AuxStates", "Model", "ModelConfig", "build_model", "expected_tensors", "kv_shape"]

_MODELS: Mapping[Architecture, type[Llama]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (Hugging Face's) and shapes of the tensors that ``build_model`` will read."""
    return _MODELS[config.architecture].expected_tensors(config)


def build_model(
    config: ModelConfig, weights: Mapping[str, Tensor], ops: Ops, max_model_len: int | None = None
) -> Model:
    """Pack a checkpoint's weights for a backend.

    Args:
        config: the checkpoint's.
        weights: every tensor of ``expected_tensors(config)``, in any float dtype; read one by one.
        ops: the backend, in the dtype that the model is to run in.
        max_model_len: positions that will be asked for, in tokens. None: the model's whole context.
    """
    return _MODELS[config.architecture](config, weights, ops, max_model_len)
