"""Twenty JSON schemas and what to ask for: nested objects, enums, arrays, patterns, unicode."""

from __future__ import annotations

from typing import Any

_NAME: dict[str, Any] = {"type": "string", "maxLength": 20}
_BOOL: dict[str, Any] = {"type": "boolean"}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """All properties required, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _array(items: dict[str, Any], low: int, high: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _pattern(regex: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": regex, **more}


_BOOK = _object(title=_NAME, year=_integer(1000, 2100), in_print=_BOOL)
_NODE = _object(value=_integer(0, 9), children=_array({"$ref": "#/$defs/node"}, 0, 2))

SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": ("Describe a person.", _object(name=_NAME, age=_integer(0, 120))),
    "optional": ("Describe a book.", {**_BOOK, "required": ["title"]}),
    "enum": (
        "What is the weather like?",
        _object(weather={"enum": ["sunny", "rainy", "snowy"]}, wind={"enum": [0, 1, 2, 3, None, True]}),
    ),
    "const": ("Greet me.", _object(kind={"const": "greeting"}, text=_NAME)),
    "strings": ("List some fruits.", _object(fruits=_array({"type": "string", "maxLength": 12}, 2, 4))),
    "numbers": ("Give me some measurements.", _array({"type": "number", "minimum": -10, "maximum": 10}, 3, 5)),
    "tuple": (
        "Where is the ship?",
        {"type": "array", "prefixItems": [{"enum": ["N", "S"]}, _integer(0, 90), _BOOL], "items": False, "minItems": 3},
    ),
    "nested": (
        "Describe a company with its address.",
        _object(company=_object(name=_NAME, address=_object(street=_NAME, number=_integer(1, 999)))),
    ),
    "objects": (
        "List two employees.",
        _object(employees=_array(_object(name=_NAME, role={"enum": ["engineer", "manager", "cook"]}), 1, 2)),
    ),
    "date": ("When does it begin?", _object(date=_pattern("^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"))),
    "phone": ("What is the phone number?", _object(phone=_pattern("^\\+[1-9][0-9]{1,3}( [0-9]{2,4}){2,3}$"))),
    "identifier": (
        "Name a variable.",
        _object(identifier=_pattern("^[a-z_][a-z0-9_]{0,15}$"), constant=_pattern("^[A-Z]+$", maxLength=6)),
    ),
    "formats": (
        "Describe an event in the log.",
        _object(id={"type": "string", "format": "uuid"}, on={"type": "string", "format": "date"}),
    ),
    "unicode names": (
        "Beschreibe ein Tier.",
        _object(größe={"type": "number"}, имя={"type": "string", "maxLength": 8}, 種類={"enum": ["魚", "鳥", "犬"]}),
    ),
    "unicode enum": (
        "How are you?",
        _object(mood={"enum": ["😀", "😢", "🐟🌊", "naïve café", "Ünïcödé", "日本語"]}),
    ),
    "unicode pattern": (
        "Write a Russian word, and draw an animal.",
        _object(word=_pattern("^[Б-Яб-я]{2,6}$"), animal=_pattern("^[🐟-🐳]$")),
    ),
    "escapes": (
        "Show me a path.",
        _object(
            path={"enum": ["C:\\temp\\x", '/usr/"quoted"', "tab\there", "line\nbreak"]}, note={"const": "<|im_end|>"}
        ),
    ),
    "union": (
        "Give me a value.",
        _object(
            value={"anyOf": [{"type": "null"}, _integer(-99, 99), _object(low=_integer(0, 9), high=_integer(0, 9))]}
        ),
    ),
    "recursive": ("Describe a tree.", {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"}),
    "map": ("How many of each animal?", {"type": "object", "additionalProperties": _integer(0, 999)}),
}
"""By name: what to ask for, and the schema."""

assert len(SCHEMAS) == 20
