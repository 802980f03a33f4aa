"""Options that say what the output must look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.errors import RequestError
from pilotfish.types import StructuredOutputs

__all__ = ["StructuredOptions"]

_PANEL = "Structured output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOptions:
    """A schema or a pattern, at most one of them."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON", help="The output is JSON of this schema.", show_default=False, rich_help_panel=_PANEL
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(help="The output matches this regular expression.", show_default=False, rich_help_panel=_PANEL),
    ] = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """What to ask the engine for; None if no option is given.

        Raises:
            RequestError: both are given, or the file cannot be read.
        """
        if self.json_schema is None and self.regex is None:
            return None
        schema = None if self.json_schema is None else _schema_text(self.json_schema)
        return StructuredOutputs(json=schema, regex=self.regex)


def _schema_text(value: str) -> str:
    """The text itself if it is an object's, else that of the file it names."""
    if value.lstrip().startswith("{"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(
            f"json_schema={value!r}: is neither a JSON object nor a file that can be read ({error})", "json_schema"
        ) from error
