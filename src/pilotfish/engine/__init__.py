"""The engine: requests in, tokens out, one forward pass of the target a step."""

from pilotfish.engine.engine import Engine, EngineStats
from pilotfish.engine.load import load_engine
from pilotfish.engine.request import checked_prompt

__all__ = ["Engine", "EngineStats", "checked_prompt", "load_engine"]
