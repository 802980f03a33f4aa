"""Speculation schemes: one module a scheme, one seam for all."""

from __future__ import annotations

from importlib import import_module

from pilotfish.config import Speculation
from pilotfish.speculation.base import (
    CommittedRow,
    DraftRow,
    NoProposer,
    Proposal,
    Proposer,
    Scheme,
    SpeculationContext,
)
from pilotfish.speculation.verify import Candidate, Outcome, verify

__all__ = [
    "Candidate",
    "CommittedRow",
    "DraftRow",
    "NoProposer",
    "Outcome",
    "Proposal",
    "Proposer",
    "Scheme",
    "SpeculationContext",
    "load_scheme",
    "verify",
]


def load_scheme(settings: Speculation | None, context: SpeculationContext) -> Scheme:
    """The scheme that ``settings`` describe: that of the module of this package that is named as the scheme.

    Raises:
        ConfigError: it does not fit the target.
        CheckpointError: a draft that cannot be loaded.
    """
    if settings is None:
        return Scheme(model=None, start=lambda _: NoProposer())
    module = import_module(f"{__name__}.{settings.scheme}")
    scheme: Scheme = module.load(settings, context)
    return scheme
