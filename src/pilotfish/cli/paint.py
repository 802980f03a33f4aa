"""Text in two colours: accepted drafts and the target's own tokens."""

from __future__ import annotations

import os
from typing import TextIO

from pilotfish.types import CompletionOutput

__all__ = ["DRAFT_COLOUR", "Painter", "wants_colour"]

DRAFT_COLOUR = "green"
_DRAFT, _TARGET, _RESET = "\x1b[32m", "\x1b[36m", "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """A terminal that shows colours, whose user has not asked for none (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Painter:
    """Gives out the text of one completion as it grows.

    Args:
        coloured: with escape sequences; else the bare text.
    """

    def __init__(self, *, coloured: bool) -> None:
        self._coloured = coloured
        self._num_tokens = 0
        self._num_characters = 0

    def new_text(self, completion: CompletionOutput) -> str:
        """What has come since the last call. Every colour is ended, so that nothing leaks when a stream is cut.

        Text that was held back (half a character, the beginning of a stop string) has the colour of the token that
        released it.
        """
        if not self._coloured:
            text = completion.text[self._num_characters :]
            self._num_characters = len(completion.text)
            return text
        parts: list[str] = []
        for i in range(self._num_tokens, len(completion.token_ids)):
            text = completion.text[self._num_characters : completion.text_ends[i]]
            if text:
                parts.append(f"{_DRAFT if completion.is_draft[i] else _TARGET}{text}{_RESET}")
                self._num_characters = completion.text_ends[i]
        self._num_tokens = len(completion.token_ids)
        return "".join(parts)
