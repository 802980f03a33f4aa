"""Log-probabilities in the shapes of chat and of completions, with the bytes of tokens that are no whole text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pilotfish.server.stream import Delta
from pilotfish.text import Tokenizer
from pilotfish.text.spelling import BYTE_OF
from pilotfish.types import Logprob

__all__ = ["TokenBytes", "chat_logprobs", "completion_logprobs"]

_REPLACEMENT = "\ufffd"

_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have."""


class TokenBytes:
    """The bytes of single tokens. A token may be a part of a character, which no string can hold.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int, text: str) -> bytes:
        """The bytes of a token whose decoded text is ``text``."""
        if _REPLACEMENT not in text:
            return text.encode("utf-8")
        spelled = self._spelling[token_id] if token_id < len(self._spelling) else None
        if spelled is None:
            return text.encode("utf-8")
        if spelled.startswith("<0x") and spelled.endswith(">") and len(spelled) == 6:
            return bytes([int(spelled[3:5], 16)])
        values = [BYTE_OF.get(character) for character in spelled]
        return bytes(value for value in values if value is not None) if None not in values else text.encode("utf-8")

    @cached_property
    def _spelling(self) -> Sequence[str | None]:
        return self._tokenizer.tokens()


def chat_logprobs(delta: Delta, num_top: int, token_bytes: TokenBytes) -> dict[str, Any]:
    """``choices[].logprobs`` of chat, for the tokens of a delta.

    Args:
        delta: has log-probabilities.
        num_top: alternatives that were asked for.
        token_bytes: of the model.
    """
    assert delta.logprobs is not None
    content = []
    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
        top = sorted(((token, item) for token, item in entry.items() if item.rank <= num_top), key=_by_rank)
        content.append(
            _chat_token(token_id, entry[token_id], token_bytes)
            | {"top_logprobs": [_chat_token(token, item, token_bytes) for token, item in top]}
        )
    return {"content": content, "refusal": None}


def completion_logprobs(delta: Delta, token_bytes: TokenBytes) -> dict[str, Any]:
    """``choices[].logprobs`` of completions. ``text_offset`` counts characters of the completion."""
    assert delta.logprobs is not None
    tokens, values, top = [], [], []
    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
        names = {token: _escaped(item, token_bytes.of(token, item.decoded_token or ""), "bytes:")
                 for token, item in entry.items()}  # fmt: skip
        tokens.append(names[token_id])
        values.append(_number(entry[token_id]))
        ranked = sorted(entry.items(), key=_by_rank)
        top.append({names[token]: _number(item) for token, item in ranked})
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": top,
        "text_offset": [delta.text_start, *delta.text_ends[:-1]] if tokens else [],
    }


def _chat_token(token_id: int, item: Logprob, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes.of(token_id, item.decoded_token or "")
    return {"token": _escaped(item, raw, ""), "logprob": _number(item), "bytes": list(raw)}


def _escaped(item: Logprob, raw: bytes, prefix: str) -> str:
    r"""A token's text; of a part of a character its bytes, such as ``\xf0\x9f``, as OpenAI writes them."""
    text = item.decoded_token or ""
    if _REPLACEMENT not in text or raw == text.encode("utf-8"):
        return text
    return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _by_rank(item: tuple[int, Logprob]) -> tuple[int, int]:
    return item[1].rank, item[0]


def _number(item: Logprob) -> float:
    return max(item.logprob, _LEAST)
