"""The options that choose a speculation scheme, and the settings that they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from pilotfish.config import Auto, DraftModel, Eagle, HeadSpeculation, Mtp, Ngram, Speculation
from pilotfish.errors import ConfigError

__all__ = ["BENCH_SCHEMES", "SCHEMES", "SpeculationOptions", "bench_schemes", "given_options", "speculation_settings"]

BENCH_SCHEMES = ("none", "draft", "ngram", "mtp", "eagle")
"""What a list of ``--scheme`` may name: what is measured has a name of its own."""

SCHEMES = ("auto", *BENCH_SCHEMES)
"""What ``--scheme`` may say."""

_PANEL = "Speculation"
_SHARED = ("num_drafts", "verify", "threshold")
_OF_HEADS = ("head", "allow_mismatch", "p_min", "lookup")
_OWN = {
    "auto": _OF_HEADS,
    "draft": ("draft",),
    "ngram": ("max_ngram", "min_ngram"),
    "mtp": _OF_HEADS,
    "eagle": _OF_HEADS,
}
_HEADS: Mapping[str, type[HeadSpeculation]] = {"mtp": Mtp, "eagle": Eagle}
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
HeadOption = Annotated[
    str | None,
    Option(
        "--head",
        metavar="DIR|ID",
        help="Draft heads: folder or Hugging Face id of one.",
        show_default="the model's own",
        rich_help_panel=_PANEL,
    ),
]
AllowMismatchOption = Annotated[
    bool,
    Option(
        "--allow-mismatch",
        help="Draft heads: take one that was trained for other weights or another chat template of the same shape.",
        rich_help_panel=_PANEL,
    ),
]
NumDraftsOption = Annotated[
    int | None,
    Option(
        help="Most drafts a step.",
        show_default=f"{Mtp().num_drafts}; ngram, draft: {_DEFAULTS.num_drafts}",
        rich_help_panel=_PANEL,
    ),
]
PMinOption = Annotated[
    float | None,
    Option(
        "--draft-p-min",
        help="Draft heads: stop drafting where the head's joint probability of the drafts falls below this.",
        show_default=str(Mtp().p_min),
        rich_help_panel=_PANEL,
    ),
]
LookupOption = Annotated[
    int | None,
    Option(
        "--draft-lookup",
        help="Draft heads: where the last so many tokens occurred before, propose what followed them instead of the "
        "head's drafts; 0 never does.",
        show_default=str(Mtp().lookup),
        rich_help_panel=_PANEL,
    ),
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

    scheme: Annotated[
        str | None,
        Option(
            help="auto (that of --head or the model's own head, else ngram), none, draft, ngram, mtp or eagle.",
            show_default="auto; with --draft: draft",
            rich_help_panel=_PANEL,
        ),
    ] = None
    draft: DraftOption = None
    head: HeadOption = None
    allow_mismatch: AllowMismatchOption = False
    num_drafts: NumDraftsOption = None
    p_min: PMinOption = None
    lookup: LookupOption = None
    verify: VerifyOption = None
    threshold: ThresholdOption = None
    max_ngram: MaxNgramOption = None
    min_ngram: MinNgramOption = None

    def settings(self) -> Speculation | None:
        """The scheme's settings; None is plain decoding.

        Raises:
            ConfigError: an unknown scheme, a wrong value, or an option that does not belong to the scheme.
        """
        implied = "draft" if self.draft is not None else "auto"
        scheme = implied if self.scheme is None else self.scheme
        given = given_options(self, [field.name for field in fields(self) if field.name != "scheme"])
        _check_scheme(scheme, SCHEMES)
        return speculation_settings(scheme, given)


def given_options(options: object, names: Iterable[str]) -> dict[str, Any]:
    """Options by name from a dataclass of them; None where not given, as a flag that is not set."""
    values = {name: getattr(options, name) for name in names}
    return {name: None if value is False else value for name, value in values.items()}


def speculation_settings(scheme: str, options: Mapping[str, Any]) -> Speculation | None:
    """Settings of one scheme from options by name; those that are None were not given.

    Raises:
        ConfigError: as :meth:`SpeculationOptions.settings`.
    """
    given = _check_options(scheme, options)
    if scheme == "none":
        return None
    if scheme == "auto":
        return Auto(**given)
    if scheme == "ngram":
        return Ngram(**given)
    if scheme in _HEADS:
        return _HEADS[scheme](**given)
    source = given.pop("draft", None)
    if source is None:
        raise ConfigError(
            "scheme='draft': needs --draft with a model's name, or layers:N for the target's first layers"
        )
    return DraftModel(**_draft_source(source), **given)


def _check_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, all of which belong to the scheme."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in _names_of(scheme):
            owners = [owner for owner, own in _OWN.items() if name in (*_SHARED, *own)]
            needed = " or ".join(f"--scheme {owner}" for owner in owners)
            raise ConfigError(f"{name}={value!r}: has no use with --scheme {scheme}; it needs {needed}")
    if "threshold" in given and given.get("verify") != "threshold":
        raise ConfigError(f"threshold={given['threshold']}: needs --verify threshold, which is lossy")
    return given


def _names_of(scheme: str) -> Sequence[str]:
    return () if scheme == "none" else (*_SHARED, *_OWN[scheme])


def bench_schemes(names: str, options: Mapping[str, Any]) -> dict[str, Speculation | None]:
    """Settings by scheme for ``--scheme none,ngram,draft``: each takes those of ``options`` that are its own.

    A draft or a head that is named comes in even if its scheme is not listed; a head as ``auto``, which takes it by its
    kind.

    Raises:
        ConfigError: as above; or a scheme that is listed twice, or an option that none of them takes.
    """
    listed = [name.strip() for name in names.split(",")]
    for name in listed:
        _check_scheme(name, BENCH_SCHEMES)
        if listed.count(name) > 1:
            raise ConfigError(f"scheme={names!r}: lists {name} twice")
    given = {name: value for name, value in options.items() if value is not None}
    if "draft" in given and "draft" not in listed:
        listed.append("draft")
    if "head" in given and not {"mtp", "eagle"} & {*listed}:
        listed.append("auto")
    taken = {scheme: _taken_by(scheme, given) for scheme in listed}
    for name, value in given.items():
        if not any(name in own for own in taken.values()):
            raise ConfigError(f"{name}={value!r}: has no use with --scheme {names}")
    return {scheme: speculation_settings(scheme, own) for scheme, own in taken.items()}


def _taken_by(scheme: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in _names_of(scheme)}


def _check_scheme(scheme: str, allowed: Sequence[str]) -> None:
    if scheme not in allowed:
        raise ConfigError(f"scheme={scheme!r}: must be one of {', '.join(allowed)}")


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
