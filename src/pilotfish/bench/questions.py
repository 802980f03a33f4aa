"""Questions in the form of Spec-Bench (Xia et al., 2024): one JSON object a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pilotfish.errors import ConfigError
from pilotfish.prompts import json_lines, read_data

__all__ = ["Question", "load_questions", "take"]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Question:
    """One question: ``question_id`` is any string or integer, ``turns`` what the user says, turn by turn."""

    question_id: str | int
    category: str
    turns: tuple[str, ...]


def load_questions(path: Path | None = None) -> list[Question]:
    """The questions of a file, or (None) the small set that comes with the package.

    Raises:
        ConfigError: the file cannot be read, has no question, or has a line that is not one; names the line.
    """
    if path is None:
        name, data = "bench_prompts.jsonl", files("pilotfish").joinpath("data", "bench_prompts.jsonl").read_bytes()
    else:
        name, data = str(path), read_data(path)
    lines = json_lines(data, name, " with question_id, category and turns")
    questions = [_question(item, f"{name}:{number}") for number, item in lines]
    if not questions:
        raise ConfigError(f"data={name!r}: has no questions")
    return questions


def take(
    items: Sequence[_Item], limit: int | None, category: Callable[[_Item], str] = attrgetter("category")
) -> list[_Item]:
    """At most ``limit`` questions, from all categories in turn, so that few questions are not all of one kind."""
    if limit is None or limit >= len(items):
        return list(items)
    waiting: dict[str, deque[int]] = {}
    for i, item in enumerate(items):
        waiting.setdefault(category(item), deque()).append(i)
    taken: list[int] = []
    while len(taken) < limit:
        for queue in waiting.values():
            if queue and len(taken) < limit:
                taken.append(queue.popleft())
    return [items[i] for i in sorted(taken)]


def _question(item: Mapping[str, Any], place: str) -> Question:
    question_id, category, turns = item.get("question_id"), item.get("category"), item.get("turns")
    if isinstance(question_id, bool) or not isinstance(question_id, (str, int)):
        raise ConfigError(f"{place}: question_id={question_id!r}: must be a string or an integer")
    if not isinstance(category, str) or not category:
        raise ConfigError(f"{place}: category={category!r}: must be a string that is not empty")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{place}: turns must be a list of strings that are not empty")
    for name, texts in (("question_id", [str(question_id)]), ("category", [category]), ("turns", turns)):
        for text in texts:
            _check_unicode(place, name, text)
    return Question(question_id, category, tuple(turns))


def _check_unicode(place: str, name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
        raise ConfigError(f"{place}: {name} is not valid Unicode text: {error}") from error
