"""Log-probabilities in the shapes of chat and of completions."""

from __future__ import annotations

from typing import Any

from pilotfish.server.protocol.token_bytes import REPLACEMENT, TokenBytes
from pilotfish.server.stream import Delta
from pilotfish.types import Logprob

__all__ = ["chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0
"""In place of minus infinity, which JSON does not have."""


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
    if REPLACEMENT not in text or raw == text.encode("utf-8"):
        return text
    return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _by_rank(item: tuple[int, Logprob]) -> tuple[int, int]:
    return item[1].rank, item[0]


def _number(item: Logprob) -> float:
    return max(item.logprob, _LEAST)
