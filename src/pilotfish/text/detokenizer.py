"""Tokens to text while they come: never half a character, and the same text as decoding them all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokenizer", "TokenDecoder"]

_REPLACEMENT = "\ufffd"

_MAX_PENDING = 8
"""Tokens that may wait for a character to complete. Valid UTF-8 needs at most 4; beyond, the text is broken anyway and
is given out as soon as it can be cut, so that a run of broken bytes costs no more than any other text."""

_TAIL = 3
"""Tokens that a character which is still incomplete can span: it has at most 3 bytes, a token at least one."""


class TokenDecoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        ...


class Detokenizer:
    """Incremental decoding of one output.

    A token's text depends on its neighbours (bytes of one character, SentencePiece's leading space), so each call
    decodes a short window: the tokens of the last piece of text, and those since. What the window says beyond the last
    piece's own text is new. Text ending in U+FFFD may be half a character and waits for the next token. Cost is O(1)
    amortised a token.

    The pieces and :meth:`flush` add up to ``decode`` of all tokens. An output that ends inside a character ends in
    U+FFFD, as it does there. (SentencePiece vocabularies with byte tokens are the one exception: ``decode`` makes
    U+FFFD of *all* bytes of a run of byte tokens that is broken anywhere, also of well-formed characters in it which
    were already given out. Whether streamed or not, the engine's text is the sum of the pieces.)

    Args:
        tokenizer: decodes whole sequences.
        skip_special_tokens: leave special tokens out of the text.
        context: the tokens before the output, of which the last few suffice. With it, a SentencePiece word at the
            output's start keeps its leading space; without it, the output is decoded as a text of its own.
    """

    __slots__ = ("_prefix", "_read", "_skip", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = list(context)
        self._read = len(self._window)  # tokens of the window whose text is out
        self._prefix = self._decode(self._window)  # that text
        if self._prefix.endswith(_REPLACEMENT):  # cut inside a character, whose rest would change the context's text
            self._window, self._read, self._prefix = [], 0, ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens in order; return the text that is now certain (often of these tokens, maybe empty)."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._give_out(text, len(self._window))
        if len(self._window) - self._read >= _MAX_PENDING:
            return self._give_out_overdue(text)
        return ""

    def flush(self) -> str:
        """The text still held back, with U+FFFD for an unfinished character. Call once, at the output's end."""
        if self._read == len(self._window):
            return ""
        return self._give_out(self._decode(self._window), len(self._window))

    def _give_out(self, text: str, num_tokens: int) -> str:
        """What ``text``, of the window's first ``num_tokens`` tokens, has that is not out yet; then move the window."""
        piece = text[len(self._prefix) :]
        if piece:
            del self._window[: self._read]
            self._read = num_tokens - self._read
            self._prefix = self._decode(self._window[: self._read])
        else:
            # Tokens without text (skipped special ones) give the next token no context: keep the one there is.
            kept = self._not_skipped(self._window[self._read : num_tokens])
            self._window[self._read : num_tokens] = kept
            self._read += len(kept)
            self._prefix = text
        return piece

    def _give_out_overdue(self, text: str) -> str:
        """Give out all but the last tokens, where no character spans the cut."""
        end = len(self._window)
        for cut in range(end - 1, end - 1 - _TAIL, -1):
            head = self._decode(self._window[:cut])
            if not head.endswith(_REPLACEMENT):
                return self._give_out(head, cut)
        # Broken bytes. A character across the cut would show: the two parts' texts would not add up to the whole.
        return self._give_out(head, cut) if head + self._decode(self._window[cut:]) == text else ""

    def _not_skipped(self, token_ids: list[int]) -> list[int]:
        """Without special tokens: the decoder never sees them, and runs of them would pile up in the window."""
        return [t for t in token_ids if self._decode([t]) or not self._tokenizer.decode([t], skip_special_tokens=False)]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""
