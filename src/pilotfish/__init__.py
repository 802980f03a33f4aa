"""Pilotfish: an LLM inference engine with speculative decoding in its heart.

::

    from pilotfish import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    print(llm.generate("The pilot fish", SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pilotfish.config import Auto, DraftModel, Eagle, EngineConfig, Mtp, Ngram
from pilotfish.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    PilotfishError,
    RequestError,
    UnsupportedModelError,
)
from pilotfish.types import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestStats,
    SamplingParams,
    SpeculationStats,
    StructuredOutputs,
)

if TYPE_CHECKING:
    from pilotfish.llm import LLM, StreamPiece

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Auto",
    "BackendError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DraftModel",
    "Eagle",
    "EngineConfig",
    "Logprob",
    "Mtp",
    "Ngram",
    "PilotfishError",
    "RequestError",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "SpeculationStats",
    "StreamPiece",
    "StructuredOutputs",
    "UnsupportedModelError",
]

_LAZY = ("LLM", "StreamPiece")


def __getattr__(name: str) -> object:
    """Import the parts that need torch when they are first used: ``pilotfish --help`` does not need it."""
    if name in _LAZY:
        return getattr(import_module("pilotfish.llm"), name)
    raise AttributeError(f"module 'pilotfish' has no attribute {name!r}")
