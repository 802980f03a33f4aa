"""Sums of what engines have done, so that counters go on when an engine is replaced."""

from __future__ import annotations

from dataclasses import fields
from itertools import zip_longest

from pilotfish.engine.engine import EngineStats
from pilotfish.types import SpeculationStats

__all__ = ["add_speculation", "add_stats"]

_COUNTS = [field.name for field in fields(EngineStats) if field.name != "speculation"]
_SPECULATION_COUNTS = ("num_steps", "num_drafted", "num_accepted", "num_emitted")
_SPECULATION_LISTS = ("drafted_at", "accepted_at", "reached_at")


def add_stats(a: EngineStats, b: EngineStats) -> EngineStats:
    """A new object with both counted together; what says how an engine works is ``b``'s."""
    counts = {name: getattr(a, name) + getattr(b, name) for name in _COUNTS}
    return EngineStats(**counts, speculation=add_speculation(a.speculation, b.speculation))


def add_speculation(a: SpeculationStats, b: SpeculationStats) -> SpeculationStats:
    """As :func:`add_stats`, of drafts."""
    result = SpeculationStats(b.scheme, b.num_drafts, b.exact)
    for name in _SPECULATION_COUNTS:
        setattr(result, name, getattr(a, name) + getattr(b, name))
    for name in _SPECULATION_LISTS:
        # The engine's thread may be in the middle of writing to them: take what is there.
        pairs = zip_longest([*getattr(a, name)], [*getattr(b, name)], fillvalue=0)
        setattr(result, name, [x + y for x, y in pairs])
    return result
