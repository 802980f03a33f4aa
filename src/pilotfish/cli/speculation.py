"""The options that choose a speculation scheme, and the settings that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from pilotfish.config import DraftModel, Ngram, Speculation
from pilotfish.errors import ConfigError

__all__ = ["SCHEMES", "SpeculationOptions", "bench_schemes", "speculation_settings"]

SCHEMES = ("none", "draft", "ngram")
"""What ``--scheme`` may say."""

_PANEL = "Speculation"
_SHARED = ("num_drafts", "verify", "threshold")
_OWN = {"draft": ("draft",), "ngram": ("max_ngram", "min_ngram")}
_DEFAULTS = Ngram()

Option = typer.Option

DraftOption = Annotated[
    str | None,
    Option(
        "--draft",
        metavar="MODEL|layers:N",
        help="A model that drafts (as --model), or the target's first N layers. Implies --scheme draft.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
NumDraftsOption = Annotated[
    int | None, Option(help="Most drafts a step.", show_default=str(_DEFAULTS.num_drafts), rich_help_panel=_PANEL)
]
VerifyOption = Annotated[
    str | None,
    Option(
        help="coupled: the tokens of plain decoding. rejection: its distribution. threshold: LOSSY, for research: "
        "keeps drafts that have --threshold probability under the target.",
        show_default=_DEFAULTS.verify,
        rich_help_panel=_PANEL,
    ),
]
ThresholdOption = Annotated[
    float | None,
    Option(
        help="With --verify threshold: least probability of a draft under the target (LOSSY).",
        show_default=str(_DEFAULTS.threshold),
        rich_help_panel=_PANEL,
    ),
]
MaxNgramOption = Annotated[
    int | None,
    Option(
        help="ngram: longest run of last tokens to look up.",
        show_default=str(_DEFAULTS.max_ngram),
        rich_help_panel=_PANEL,
    ),
]
MinNgramOption = Annotated[
    int | None, Option(help="ngram: shortest one.", show_default=str(_DEFAULTS.min_ngram), rich_help_panel=_PANEL)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Which scheme proposes drafts, and how they are verified. None: not given."""

    scheme: Annotated[str | None, Option(help="none, draft or ngram.", show_default="none", rich_help_panel=_PANEL)] = (
        None
    )
    draft: DraftOption = None
    num_drafts: NumDraftsOption = None
    verify: VerifyOption = None
    threshold: ThresholdOption = None
    max_ngram: MaxNgramOption = None
    min_ngram: MinNgramOption = None

    def settings(self) -> Speculation | None:
        """The scheme's settings; None is plain decoding.

        Raises:
            ConfigError: an unknown scheme, a wrong value, or an option that does not belong to the scheme.
        """
        scheme = self.scheme if self.scheme is not None else ("none" if self.draft is None else "draft")
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "scheme"}
        return speculation_settings(scheme, given)


def speculation_settings(scheme: str, options: Mapping[str, Any]) -> Speculation | None:
    """Settings of one scheme from options by name; those that are None were not given.

    Raises:
        ConfigError: as :meth:`SpeculationOptions.settings`.
    """
    _check_scheme(scheme)
    given = {name: value for name, value in options.items() if value is not None}
    allowed = () if scheme == "none" else (*_SHARED, *_OWN[scheme])
    for name, value in given.items():
        if name not in allowed:
            owners = [owner for owner, own in _OWN.items() if name in (*_SHARED, *own)]
            needed = " or ".join(f"--scheme {owner}" for owner in owners)
            raise ConfigError(f"{name}={value!r}: has no use with --scheme {scheme}; it needs {needed}")
    if "threshold" in given and given.get("verify") != "threshold":
        raise ConfigError(f"threshold={given['threshold']}: needs --verify threshold, which is lossy")
    if scheme == "none":
        return None
    if scheme == "ngram":
        return Ngram(**given)
    source = given.pop("draft", None)
    if source is None:
        raise ConfigError(
            "scheme='draft': needs --draft with a model's name, or layers:N for the target's first layers"
        )
    return DraftModel(**_draft_source(source), **given)


def bench_schemes(names: str, options: Mapping[str, Any]) -> dict[str, Speculation | None]:
    """Settings by scheme for ``--scheme none,ngram,draft``: each takes those of ``options`` that are its own.

    Raises:
        ConfigError: as above; or a scheme that is listed twice, or an option that none of them takes.
    """
    listed = [name.strip() for name in names.split(",")]
    for name in listed:
        _check_scheme(name)
        if listed.count(name) > 1:
            raise ConfigError(f"scheme={names!r}: lists {name} twice")
    given = {name: value for name, value in options.items() if value is not None}
    taken = {scheme: _taken_by(scheme, given) for scheme in listed}
    for name, value in given.items():
        if not any(name in own for own in taken.values()):
            raise ConfigError(f"{name}={value!r}: has no use with --scheme {names}")
    return {scheme: speculation_settings(scheme, own) for scheme, own in taken.items()}


def _taken_by(scheme: str, given: Mapping[str, Any]) -> dict[str, Any]:
    names: Sequence[str] = () if scheme == "none" else (*_SHARED, *_OWN[scheme])
    return {name: value for name, value in given.items() if name in names}


def _check_scheme(scheme: str) -> None:
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme={scheme!r}: must be one of {', '.join(SCHEMES)}")


def _draft_source(text: str) -> dict[str, Any]:
    """``layers:N`` as a number of layers, anything else as a model's name."""
    head, colon, tail = text.partition(":")
    if head != "layers" or not colon:
        return {"model": text}
    try:
        return {"layers": int(tail)}
    except ValueError:
        raise ConfigError(
            f"draft={text!r}: must be a model's name or layers:N with a number N, e.g. layers:8"
        ) from None
