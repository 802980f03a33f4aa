"""Bodies that a server must refuse or survive, made from its own OpenAPI description: valid ones, then spoiled.

Everything is drawn from a random generator, so a seed gives the same bodies in the same order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_WORDS = ("", "a", "hello", "user", "text", "json_schema", "é", "海", "\u2028", "a b c d e f g", "[0-9]+", "{}")
_INTEGERS = (0, 1, 2, 3, 4, 8)
_NUMBERS = (0, 0.5, 1, 1.5, -1)
_OTHERS: tuple[Any, ...] = (None, True, 3, -1, 2**70, 0.5, "text", "", [], [None], {}, {"a": []})
_HUGE: tuple[Any, ...] = (
    "a" * 300_000, "\U0001f41f" * 50_000, int("9" * 4_000), -(2**64), 1e308, [1] * 100_000, ["a"] * 10_000,
    {str(i): i for i in range(20_000)},
)  # fmt: skip
_RAW = ("NaN", "-Infinity", "1e999", "9" * 6_000, '"\\ud800"', "\\u0000", "tru", "'a'", "01")
"""Text in place of a value: some of it is no JSON."""

_HOLE = "the hole"
"""Stands for a value that ``json.dumps`` would not write."""

_LIMIT = "max_tokens"
"""Never taken away: a request without it may run to the end of the context."""


@dataclass(frozen=True, slots=True)
class Body:
    """One spoiled body.

    Attributes:
        path: that it is sent to.
        how: it was spoiled.
        content: its bytes.
    """

    path: str
    how: str
    content: bytes


class Bodies:
    """Draws spoiled bodies.

    Args:
        description: the server's ``/openapi.json``.
        seed: of all of them.
    """

    def __init__(self, description: Mapping[str, Any], seed: int | str) -> None:
        self._rng = random.Random(seed)
        self._schemas = description["components"]["schemas"]
        self._routes = [
            (path, operations["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path, operations in sorted(description["paths"].items())
            if "requestBody" in operations.get("post", {})
        ]

    def next(self) -> Body:
        """The next body."""
        path, schema = self._rng.choice(self._routes)
        spoil = self._rng.choice(_WAYS)
        return Body(path, spoil.__name__, spoil(self, self.valid(schema) or {"prompt": "a"}))

    def valid(self, schema: Mapping[str, Any]) -> Any:
        """A value that the schema allows, small enough to be served at once."""
        rng = self._rng
        if "$ref" in schema:
            return self.valid(self._schemas[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return self.valid(rng.choice(schema["anyOf"]))
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._valid_object(schema)
            case "array":
                return [self.valid(schema["items"] or {"type": "string"}) for _ in range(rng.randint(1, 2))]
            case "string":
                return rng.choice(_WORDS)
            case "integer":
                return rng.choice(_INTEGERS)
            case "number":
                return rng.choice(_NUMBERS)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return schema.get("const", "text")

    def _valid_object(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        fields = schema.get("properties", {})
        needed = set(schema.get("required", ()))
        value = {name: self.valid(fields[name]) for name in fields if name in needed or self._rng.random() < 0.15}
        if isinstance(schema.get("additionalProperties"), Mapping):
            value[str(self._rng.choice(_INTEGERS))] = self.valid(schema["additionalProperties"])
        if _LIMIT in fields:
            value[_LIMIT] = 4
        return value

    # Ways of spoiling

    def wrong_type(self, body: Any) -> bytes:
        return self._replaced(body, self._rng.choice(_OTHERS))

    def missing(self, body: Any) -> bytes:
        objects = [(value, key) for value, key in _places(body) if isinstance(value, dict) and key != _LIMIT]
        if objects:
            value, key = self._rng.choice(objects)
            del value[key]
        return _dumps(body)

    def extra(self, body: Any) -> bytes:
        objects = [body, *(value[key] for value, key in _places(body) if isinstance(value[key], dict))]
        self._rng.choice(objects)[self._rng.choice(["extra", "", "\ud800", "temperatur", "x" * 10_000])] = 1
        return _dumps(body)

    def huge(self, body: Any) -> bytes:
        return self._replaced(body, self._rng.choice(_HUGE))

    def deep(self, body: Any) -> bytes:
        depth = self._rng.choice([50, 500, 5_000, 100_000])
        begin, end = self._rng.choice([("[", "]"), ('{"a":', "}")])
        return self._filled(body, begin * depth + "1" + end * depth)

    def no_json(self, body: Any) -> bytes:
        return self._filled(body, self._rng.choice(_RAW))

    def bad_utf8(self, body: Any) -> bytes:
        content = _dumps(body)
        place = self._rng.randrange(len(content))
        return content[:place] + bytes(self._rng.choices(range(0x80, 0x100), k=3)) + content[place:]

    def truncated(self, body: Any) -> bytes:
        content = _dumps(body)
        return content[: self._rng.randrange(len(content))]

    def random_bytes(self, body: Any) -> bytes:
        return self._rng.randbytes(self._rng.randint(0, 300))

    def _replaced(self, body: Any, value: Any) -> bytes:
        places = [place for place in _places(body) if value is not None or place[1] != _LIMIT]
        holder, key = self._rng.choice(places)
        holder[key] = value
        return _dumps(body)

    def _filled(self, body: Any, text: str) -> bytes:
        return self._replaced(body, _HOLE).replace(json.dumps(_HOLE).encode(), text.encode())


_WAYS: tuple[Callable[[Bodies, Any], bytes], ...] = (
    Bodies.wrong_type, Bodies.wrong_type, Bodies.wrong_type, Bodies.missing, Bodies.extra, Bodies.huge, Bodies.deep,
    Bodies.no_json, Bodies.bad_utf8, Bodies.truncated, Bodies.random_bytes,
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key or index) of everything in a value."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _dumps(body: Any) -> bytes:
    return json.dumps(body).encode()
