"""Stop strings, found across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStringMatcher"]


class StopStringMatcher:
    """Watches text go by and cuts it at the first stop string to be completed.

    Text that may be the beginning of a stop string is held back, so no part of one is ever given out. How the text is
    cut into pieces does not change what comes out: the stop string whose last character comes first wins, the longest
    of those that end there. Hand it one token's text at a time, and the token that completes the stop string is the
    last of the output.

    It runs one Knuth-Morris-Pratt automaton a stop string: O(1) amortised a character, however long the strings are.

    Args:
        stop_strings: none of them empty.
        include_stop: the output's text ends after the stop string instead of before it.
    """

    __slots__ = ("_failures", "_held", "_include_stop", "_matched", "_stops")

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stop_strings)
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text now ends in
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            text: the piece.
            search: False ignores stop strings that end in this piece (``min_tokens`` is not reached yet).

        Returns:
            What may be given out now, and the stop string if one was completed. Then the output ends: what is given out
            is the last of it, and the rest of ``text`` is dropped.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            complete = self._advance(text[end - 1])
            if complete is not None and search:
                self._held = ""
                return text[: end if self._include_stop else end - len(complete)], complete
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The text still held back. Call once, at the output's end."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Move all automata by one character; return the longest stop string that it completes."""
        complete: str | None = None
        for i, stop in enumerate(self._stops):
            matched, failure = self._matched[i], self._failures[i]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                if complete is None or len(stop) > len(complete):
                    complete = stop
                matched = failure[-1]
            self._matched[i] = matched
        return complete


def _failure_function(stop: str) -> list[int]:
    """Entry i: length of the longest proper prefix of ``stop`` that is a suffix of ``stop[:i + 1]``."""
    failure = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = failure[length - 1]
        if stop[i] == stop[length]:
            length += 1
        failure[i] = length
    return failure
