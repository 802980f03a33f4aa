"""Prompts for a server: conversations go to its chat endpoint, plain text to its completion endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.bench.questions import load_questions
from pilotfish.errors import ConfigError
from pilotfish.prompts import json_lines, read_data, read_prompt, without_answer

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
    """The prompts of a file, or (None) the small set that comes with the package.

    Lines are as :func:`pilotfish.prompts.read_prompt` takes them; a conversation's last answer is left out.

    Args:
        path: of the file.
        as_text: send the first turn as plain text, for models without a chat template.

    Raises:
        ConfigError: the file cannot be read, has no prompts, or has a line that is not one; names the line.
    """
    if path is None:
        return [_prompt({"turns": list(q.turns)}, "", str(q.question_id), as_text) for q in load_questions()]
    lines = json_lines(read_data(path), str(path))
    prompts = [_prompt(item, f"{path}:{number}", str(number), as_text) for number, item in lines]
    if not prompts:
        raise ConfigError(f"data={str(path)!r}: has no prompts")
    return prompts


def _prompt(item: Mapping[str, Any], place: str, number: str, as_text: bool) -> ServePrompt:
    name = str(item.get("question_id", number))
    prompt = read_prompt(item, place, as_text=as_text)
    if isinstance(prompt, str):
        return ServePrompt(name, text=prompt)
    return ServePrompt(name, messages=without_answer(prompt, place))
