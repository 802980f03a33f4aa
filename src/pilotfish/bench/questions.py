"""Questions in the form of Spec-Bench (Xia et al., 2024): one JSON object a line."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pilotfish.errors import ConfigError

__all__ = ["Question", "json_lines", "load_questions", "read_data", "take"]


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


def read_data(path: Path) -> bytes:
    """A file of prompts. ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data={str(path)!r}: cannot be read: {error.strerror}") from error


def json_lines(data: bytes, name: str, keys: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of JSON lines, each with the number of its line, from 1. Empty lines are left out.

    Args:
        data: of the file.
        name: of the file, for messages.
        keys: what an object must have, for messages, such as " with turns".

    Raises:
        ConfigError: a line that is no object; names it.
    """
    # At "\n" alone: a prompt may hold other characters that str.splitlines() takes for the end of a line.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{name}:{number}: is not JSON in UTF-8: {error}") from error
        if not isinstance(item, dict):
            raise ConfigError(f"{name}:{number}: must be a JSON object{keys}, not {type(item).__name__}")
        yield number, item


def take(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most ``limit`` questions, from all categories in turn, so that few questions are not all of one kind."""
    if limit is None or limit >= len(questions):
        return list(questions)
    waiting: dict[str, deque[int]] = {}
    for i, question in enumerate(questions):
        waiting.setdefault(question.category, deque()).append(i)
    taken: list[int] = []
    while len(taken) < limit:
        for queue in waiting.values():
            if queue and len(taken) < limit:
                taken.append(queue.popleft())
    return [questions[i] for i in sorted(taken)]


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
