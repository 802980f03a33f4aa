"""MTP heads, in the form of DeepSeek-V3 (arXiv:2412.19437, section 2.2): one head, or a chain of several.

What they do in the engine is in :mod:`pilotfish.speculation.heads`.
"""

from __future__ import annotations

from pilotfish.config import Mtp, Speculation
from pilotfish.speculation.base import HeadScheme, SpeculationContext
from pilotfish.speculation.find import own_head_scheme

__all__ = ["load"]


def load(settings: Speculation, context: SpeculationContext) -> HeadScheme:
    """See :mod:`pilotfish.speculation.base`.

    Raises:
        ConfigError: no head is named and the model has none, or it is of another kind.
        CheckpointError: it cannot be loaded, or does not fit the target.
    """
    assert isinstance(settings, Mtp)
    return own_head_scheme(settings, context, ("mtp",))
