"""Speculation schemes: one module a scheme, one seam for all."""

from __future__ import annotations

import logging
from importlib import import_module

from pilotfish.config import Auto, Ngram, Speculation, SpeculationChoice
from pilotfish.speculation.base import (
    CommittedRow,
    DraftRow,
    HeadScheme,
    NoProposer,
    Proposal,
    Proposer,
    Scheme,
    SpeculationContext,
)
from pilotfish.speculation.find import find_head, load_auto_head, shared_settings
from pilotfish.speculation.verify import Candidate, Outcome, verify

__all__ = [
    "Candidate",
    "CommittedRow",
    "DraftRow",
    "HeadScheme",
    "NoProposer",
    "Outcome",
    "Proposal",
    "Proposer",
    "Scheme",
    "SpeculationContext",
    "find_head",
    "load_scheme",
    "verify",
]

logger = logging.getLogger(__name__)


def load_scheme(
    choice: SpeculationChoice, context: SpeculationContext
) -> tuple[Speculation | None, Scheme | HeadScheme]:
    """The scheme that was asked for, and its settings: for ``auto``, those that were found.

    A scheme's code is the module of this package that is named as the scheme.

    Raises:
        ConfigError: it does not fit the target.
        CheckpointError: a draft or head that cannot be loaded.
    """
    if choice is None:
        return None, Scheme(model=None, start=lambda _: NoProposer())
    if choice == "auto":
        choice = Auto()
    if isinstance(choice, Auto):
        found = load_auto_head(choice, context)
        if found is not None:
            whose = "the model's own head" if choice.head is None else "the head that is named"
            logger.info("speculation=%s: %s, %s", found[0].scheme, whose, found[0].head)
            return found
        logger.info("speculation=ngram: the model has no draft head of its own")
        choice = Ngram(**shared_settings(choice))
    module = import_module(f"{__name__}.{choice.scheme}")
    scheme: Scheme | HeadScheme = module.load(choice, context)
    return choice, scheme
