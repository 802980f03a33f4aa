"""The head that is a model's own: where to look for it, and the scheme that a head of some kind drafts for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pilotfish.config import Auto, Eagle, HeadSpeculation, Mtp, Ngram, Speculation
from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models.checkpoint import BUILT_IN_MODELS, Checkpoint
from pilotfish.models.heads import DraftHead
from pilotfish.runner import HeadRunner
from pilotfish.speculation.base import HeadScheme, Proposer, SpeculationContext
from pilotfish.speculation.heads import HeadProposer
from pilotfish.speculation.lookup import LookupFirstProposer
from pilotfish.speculation.ngram import NgramProposer

__all__ = ["SHIPPED_HEADS", "find_head", "head_scheme", "load_auto_head", "own_head_scheme", "shared_settings"]

logger = logging.getLogger(__name__)

SHIPPED_HEADS = Path(__file__).parent.parent / "data" / "heads"
"""A folder for each built-in model that a head ships for, named as the model."""

_FOLDERS = ("head", "mtp")


def find_head(checkpoint: Checkpoint, shipped: Path = SHIPPED_HEADS) -> Path | None:
    """The folder of the model's own head.

    It is ``head`` or ``mtp`` beside its weights, else its own folder where MTP layers lie behind the model's, else the
    one that ships for it.
    """
    is_folder = checkpoint.source.is_dir()
    folder = checkpoint.source if is_folder else checkpoint.source.parent
    places = [folder / name for name in _FOLDERS]
    if is_folder and checkpoint.config.num_mtp_layers:
        places.append(folder)
    if checkpoint.name in BUILT_IN_MODELS:
        places.append(shipped / checkpoint.name)
    return next((place for place in places if (place / "config.json").is_file()), None)


def shared_settings(auto: Auto) -> dict[str, Any]:
    """What ``auto`` says of the settings that all schemes have."""
    given = {field.name: getattr(auto, field.name) for field in fields(Speculation)}
    if not auto.num_drafts:
        del given["num_drafts"]
    return given


def load_auto_head(auto: Auto, context: SpeculationContext) -> tuple[HeadSpeculation, HeadScheme] | None:
    """What ``auto`` takes where a head is named, or the model has one that fits it; None where not.

    Raises:
        ConfigError: settings of heads, and there is none.
        CheckpointError: a head that is named cannot be loaded, or does not fit the target.
    """
    loaded = _named_or_own_head(auto, context)
    if loaded is None:
        if auto.head_settings:
            given = ", ".join(f"{name}={value!r}" for name, value in auto.head_settings.items())
            raise ConfigError(
                f"{given}: of draft heads, and scheme='auto' found none for this model and takes ngram. Name a head "
                "(head=FOLDER, or --head FOLDER on the command line), or leave this out."
            )
        return None
    folder, head = loaded
    kind = Mtp if head.config.kind == "mtp" else Eagle
    settings: HeadSpeculation = kind(**{**auto.head_settings, "head": folder}, **shared_settings(auto))
    return settings, head_scheme(head, settings, context)


def _named_or_own_head(auto: Auto, context: SpeculationContext) -> tuple[str, DraftHead] | None:
    if auto.head is not None:
        return auto.head, context.load_head(auto.head, bool(auto.allow_mismatch))
    folder = context.find_head()
    if folder is None:
        return None
    try:
        return folder, context.load_head(folder, bool(auto.allow_mismatch))
    except CheckpointError as error:
        logger.warning("The head in %s is left out: %s", folder, error)
        return None


def own_head_scheme(settings: HeadSpeculation, context: SpeculationContext, kinds: Sequence[str]) -> HeadScheme:
    """The scheme of the head that ``settings`` name, or of the model's own.

    Args:
        settings: which head.
        context: the target.
        kinds: of heads that this scheme runs.

    Raises:
        ConfigError: there is none, or it is of another kind.
        CheckpointError: it cannot be loaded, or does not fit the target.
    """
    folder = settings.head if settings.head is not None else context.find_head()
    if folder is None:
        raise ConfigError(
            f"scheme={settings.scheme!r}: this model has no head of its own: none ships with the package, and there is "
            "no folder head or mtp beside its weights. Name one: head=FOLDER, or --head FOLDER on the command line."
        )
    head = context.load_head(folder, settings.allow_mismatch)
    if head.config.kind not in kinds:
        other = "mtp" if head.config.kind == "mtp" else "eagle"
        raise ConfigError(
            f"scheme={settings.scheme!r}: the head in {folder} is of the kind {head.config.kind}. "
            f"Use {other.capitalize()}(head=...), or --scheme {other}."
        )
    return head_scheme(head, settings, context)


def head_scheme(head: DraftHead, settings: HeadSpeculation, context: SpeculationContext) -> HeadScheme:
    """A loaded head as a scheme."""
    vocab_size = context.target.config.vocab_size

    def start(runner: HeadRunner) -> Proposer:
        with_probs = settings.verify == "rejection"
        proposer = HeadProposer(runner, vocab_size, with_probs=with_probs, p_min=settings.p_min)
        if not settings.lookup:
            return proposer
        return LookupFirstProposer(NgramProposer(max(settings.lookup, Ngram().max_ngram), settings.lookup), proposer)

    return HeadScheme(head, start)
