"""Fixtures for all tests: tiny random checkpoints, written once a session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from helpers import TINY_MODELS, write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders (config.json, model.safetensors) of tiny random models by kind: see ``helpers.TINY_MODELS``."""
    root = tmp_path_factory.mktemp("tiny")
    return {kind: write_tiny_checkpoint(kind, root / kind) for kind in TINY_MODELS}


@pytest.fixture(scope="session", params=list(TINY_MODELS))
def tiny_checkpoint(request: pytest.FixtureRequest, tiny_checkpoints: Mapping[str, Path]) -> Path:
    """One tiny checkpoint; a test that takes it runs once for each kind."""
    return tiny_checkpoints[request.param]


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Torch's threads meet after each of thousands of small ops; where CPUs are shared, that waiting takes the time."""
    torch.set_num_threads(1)
