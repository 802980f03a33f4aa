"""How a byte-level vocabulary spells text, and what that says of a text's length in tokens before it is encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BYTE_OF", "Spelling"]


def _byte_alphabet() -> Mapping[str, int]:
    """The byte that each character of a byte-level BPE vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes in order for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Spelling:
    """A vocabulary whose tokens spell texts byte by byte.

    Attributes:
        max_bytes: of its longest token.
        dropped: bytes that it has no token for. BPE leaves them out, or joins any number of them in one token.
    """

    max_bytes: int
    dropped: bytes

    @classmethod
    def from_json(cls, tokenizer: str) -> Spelling | None:
        """That of a ``tokenizer.json``. None where a token may stand for more of a text than its own bytes."""
        spec = json.loads(tokenizer)
        model, added = spec["model"], spec["added_tokens"]
        if model["type"] != "BPE" or spec["normalizer"] is not None or not _keeps_bytes(spec["pre_tokenizer"]):
            return None
        if any(token["lstrip"] or token["rstrip"] for token in added):  # they take all spaces beside them
            return None
        lengths = [*map(len, model["vocab"]), *(len(token["content"].encode()) for token in added)]
        dropped = bytes(byte for character, byte in BYTE_OF.items() if character not in model["vocab"])
        return cls(max(lengths, default=1), dropped)

    def min_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at least."""
        return -(-len(text.encode("utf-8").translate(None, self.dropped)) // self.max_bytes)


def _keeps_bytes(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether it hands on every byte of a text, as the characters of :data:`BYTE_OF`."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return steps[-1]["type"] == "ByteLevel" and all(
        step["type"] == "Digits" or (step["type"] == "Split" and step["behavior"] != "Removed") for step in steps[:-1]
    )
