"""From what a request asks to the text of a grammar that the library reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from pilotfish.errors import shown
from pilotfish.types import StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["grammar_text"]

_JSON_OPTIONS: JsonCompileOptions = {
    # As Python's json.dumps writes, or without the blanks. More whitespace would let a small model loop in it.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


def grammar_text(structured: StructuredOutputs) -> str:
    """The grammar in the library's own form.

    Raises:
        ValueError, TypeError, RecursionError: a JSON schema that is no JSON, or no object.
    """
    if structured.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
    if structured.json is not None:
        schema = structured.json if isinstance(structured.json, str) else _dump(dict(structured.json))
        if not schema.lstrip().startswith("{"):
            raise ValueError(
                f"{shown(schema)} is no schema here: it must be an object, or the JSON text of one. {{}} stands for "
                "any JSON, where JSON Schema also has true."
            )
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        # One terminal: as alternatives of a rule, each choice would be an item of the parser's for every token.
        choices = " | ".join(_dump(choice) for choice in structured.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
    assert structured.grammar is not None
    return LLMatcher.grammar_from_lark(structured.grammar)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
