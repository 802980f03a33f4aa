"""Prompts for a server: conversations go to its chat endpoint, plain text to its completion endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.bench.questions import json_lines, load_questions, read_data
from pilotfish.errors import ConfigError

__all__ = ["ServePrompt", "load_serve_prompts"]


@dataclass(frozen=True, slots=True)
class ServePrompt:
    """One prompt: ``messages`` of a conversation, or ``text``; the other is None."""

    name: str
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None

    @property
    def endpoint(self) -> str:
        """The path that serves it."""
        return "v1/completions" if self.messages is None else "v1/chat/completions"

    @property
    def body(self) -> dict[str, Any]:
        """Its part of the request."""
        return {"prompt": self.text} if self.messages is None else {"messages": list(self.messages)}


def load_serve_prompts(path: Path | None, *, as_text: bool = False) -> list[ServePrompt]:
    """The prompts of a JSON-lines file, or (None) the small set that comes with the package.

    A line is an object with ``messages`` (a conversation; a last answer is left out), ``turns`` (what the user says;
    the first counts), or ``text`` or ``prompt`` (plain text).

    Args:
        path: of the file.
        as_text: send the first turn as plain text, for models without a chat template.

    Raises:
        ConfigError: the file cannot be read, has no prompts, or has a line that is not one; names the line.
    """
    if path is None:
        return [_from_turn(str(question.question_id), question.turns[0], as_text) for question in load_questions()]
    lines = json_lines(read_data(path), str(path))
    prompts = [_prompt(item, f"{path}:{number}", str(number), as_text) for number, item in lines]
    if not prompts:
        raise ConfigError(f"data={str(path)!r}: has no prompts")
    return prompts


def _prompt(item: Mapping[str, Any], place: str, number: str, as_text: bool) -> ServePrompt:
    name = str(item.get("question_id", number))
    if "messages" in item:
        return ServePrompt(name, messages=_messages(item["messages"], place))
    if "turns" in item:
        turns = item["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
            raise ConfigError(f"{place}: turns={turns!r}: must be a list of strings that are not empty")
        return _from_turn(name, turns[0], as_text)
    text = item.get("text", item.get("prompt"))
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{place}: has none of messages, turns, text and prompt; one is needed, and not empty")
    return ServePrompt(name, text=text)


def _from_turn(name: str, turn: str, as_text: bool) -> ServePrompt:
    return ServePrompt(name, text=turn) if as_text else ServePrompt(name, messages=[{"role": "user", "content": turn}])


def _messages(messages: object, place: str) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{place}: messages must be a list of objects with role and content")
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ConfigError(f"{place}: messages holds nothing to answer")
    return messages
