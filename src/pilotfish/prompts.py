"""Files of prompts: JSON lines, and the forms of a line that all commands take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pilotfish.errors import ConfigError

__all__ = ["Message", "json_lines", "read_data", "read_prompt", "without_answer"]

Message = Mapping[str, Any]


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
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}:{number}: is not JSON in UTF-8: {error}") from error
        if not isinstance(item, dict):
            raise ConfigError(f"{name}:{number}: must be a JSON object{keys}, not {type(item).__name__}")
        yield number, item


def read_prompt(item: Mapping[str, Any], place: str, *, as_text: bool = False) -> str | list[Message]:
    """A line's prompt: plain text, or a conversation.

    The line has ``messages`` (a conversation), ``turns`` (what the user says; the first counts), or ``text`` or
    ``prompt`` (plain text). Roles and contents of messages are checked by whoever applies the chat template.

    Args:
        item: the line's object.
        place: of the line, for messages.
        as_text: the first of ``turns`` is plain text, for models without a chat template.

    Raises:
        ConfigError: it is none of these.
    """
    if item.get("messages") is not None:
        messages = item["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ConfigError(f"{place}: messages must be a list of objects with role and content")
        return messages
    if item.get("turns") is not None:
        turns = item["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise ConfigError(f"{place}: turns={turns!r}: must be a list of strings that are not empty")
        return turns[0] if as_text else [{"role": "user", "content": turns[0]}]
    text = item.get("text", item.get("prompt"))
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{place}: has none of messages, turns, text and prompt; one is needed, and not empty")
    return text


def without_answer(messages: list[Message], place: str) -> list[Message]:
    """A conversation up to what is to be answered: a last answer is left out.

    Raises:
        ConfigError: nothing is left.
    """
    asked = messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages
    if not asked:
        raise ConfigError(f"{place}: messages holds nothing to answer")
    return asked
