"""EAGLE heads: EAGLE-1 (Li et al., arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840), as chains.

What they do in the engine is in :mod:`pilotfish.speculation.heads`.
"""

from __future__ import annotations

from pilotfish.config import Eagle, Speculation
from pilotfish.speculation.base import HeadScheme, SpeculationContext
from pilotfish.speculation.find import own_head_scheme

__all__ = ["load"]


def load(settings: Speculation, context: SpeculationContext) -> HeadScheme:
    """See :mod:`pilotfish.speculation.base`.

    Raises:
        ConfigError: no head is named and the model has none, or it is of another kind.
        CheckpointError: it cannot be loaded, or does not fit the target.
    """
    assert isinstance(settings, Eagle)
    return own_head_scheme(settings, context, ("eagle", "eagle3"))
