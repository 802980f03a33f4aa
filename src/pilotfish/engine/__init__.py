"""The engine: requests in, tokens out, one forward pass of the target a step."""

from pilotfish.engine.engine import Engine, EngineStats
from pilotfish.engine.load import load_engine

__all__ = ["Engine", "EngineStats", "load_engine"]
