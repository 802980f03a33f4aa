"""The bytes of tokens, some of which are no whole text, and whether a text ends in a part of a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property

from pilotfish.text import Tokenizer
from pilotfish.text.spelling import BYTE_OF

__all__ = ["REPLACEMENT", "TokenBytes"]

REPLACEMENT = "\ufffd"
"""What tokenizers write for bytes that are no character."""

_LONGEST_PART = 3
"""Bytes of a character that is not complete."""


class TokenBytes:
    """The bytes of single tokens. A token may be a part of a character, which no string can hold.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int, text: str) -> bytes:
        """The bytes of a token whose decoded text is ``text``."""
        if REPLACEMENT not in text:
            return text.encode("utf-8")
        spelled = self._spelled(token_id)
        if spelled is None:
            return text.encode("utf-8")
        if _is_byte(spelled):
            return bytes([int(spelled[3:5], 16)])
        values = [BYTE_OF.get(character) for character in spelled]
        return bytes(value for value in values if value is not None) if None not in values else text.encode("utf-8")

    def without_part(self, text: str, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """``text`` without the U+FFFD at its end that stands for a part of a character.

        U+FFFD that the model wrote, or that stands for bytes which no further one makes a character, stays.

        Args:
            text: what came out last.
            token_ids: all tokens of the output up to its end.
            skip_special_tokens: they are no part of the text.
        """
        raw, is_byte = b"", False
        for token_id in reversed(token_ids):
            piece = self.of(token_id, self._tokenizer.decode([token_id], skip_special_tokens=skip_special_tokens))
            is_byte = is_byte or (not raw and _is_byte(self._spelled(token_id) or ""))
            raw = piece + raw
            if len(raw) >= _LONGEST_PART:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(raw)
        part, _ = decoder.getstate()
        if not part:
            return text
        # Of a run of SentencePiece's byte tokens that is broken, every byte becomes one.
        return text.rstrip(REPLACEMENT) if is_byte else text.removesuffix(REPLACEMENT)

    def _spelled(self, token_id: int) -> str | None:
        return self._spelling[token_id] if token_id < len(self._spelling) else None

    @cached_property
    def _spelling(self) -> Sequence[str | None]:
        return self._tokenizer.tokens()


def _is_byte(spelled: str) -> bool:
    """Whether it is a token of SentencePiece's for a byte, such as ``<0xE2>``."""
    return len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">")
