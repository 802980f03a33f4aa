"""The vocabulary as the grammar library sees it: the bytes of each token, special tokens as no text at all."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Protocol

from llguidance import LLTokenizer

from pilotfish.errors import RequestError

__all__ = ["TokenizerSource", "build_vocabulary"]

_FIELD = "structured_outputs"


class TokenizerSource(Protocol):
    """What is needed of :class:`pilotfish.text.Tokenizer`."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def to_json(self) -> str | None: ...


def build_vocabulary(tokenizer: TokenizerSource, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Read a tokenizer. Takes a second or two for 100,000 tokens.

    Args:
        tokenizer: byte-level BPE, or SentencePiece with byte tokens.
        vocab_size: width V of the logits. The tokenizer may have fewer tokens, or more.
        eos_token_ids: what may follow a complete output; at least one.

    Raises:
        RequestError: this model cannot give structured outputs.
    """
    text = tokenizer.to_json()
    if text is None:
        raise RequestError(f"{_FIELD}: this model's tokenizer has no tokenizer.json, which they need", _FIELD)
    special = tokenizer.special_token_ids | set(eos_token_ids)
    vocabulary = _read(text, special, vocab_size, eos_token_ids)
    added = {token["id"] for token in json.loads(text).get("added_tokens") or []}
    # Added tokens of text, such as <think>, which the library takes for special by their looks.
    more = {token for token in added - special if vocabulary.is_special_token(token)}
    return _read(text, special | more, vocab_size, eos_token_ids) if more else vocabulary


def _read(text: str, special: Collection[int], vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    description = json.loads(text)
    known = _hide_special_tokens(description, special)
    # One that the tokenizer does not have still ends an output; the library need not know of it.
    eos = sorted(known.intersection(eos_token_ids))
    if not eos:
        raise RequestError(f"{_FIELD}: this model's tokenizer has no EOS token ({sorted(eos_token_ids)})", _FIELD)
    try:
        return LLTokenizer(
            json.dumps(description, ensure_ascii=False),
            n_vocab=max(vocab_size, max(known) + 1),
            eos_token=eos,
        )
    except Exception as error:  # the Rust library raises whatever the tokenizer's kind leads to
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"{_FIELD}: this model's tokenizer cannot serve them: {reason}", _FIELD) from error


def _hide_special_tokens(description: dict[str, Any], special: Collection[int]) -> set[int]:
    """Give special tokens names that no text has, in place; returns all ids that are tokens.

    The library cuts text that a grammar forces into tokens, and the tokenizer would read a special token's name in it,
    such as ``<|im_end|>`` in a constant of a JSON schema, as the special token itself.
    """
    model = description["model"]
    vocab = model["vocab"]
    by_name: dict[str, int] = vocab if isinstance(vocab, dict) else {token[0]: i for i, token in enumerate(vocab)}
    names = {token: name for name, token in by_name.items()}
    added = {token["id"]: token for token in description.get("added_tokens") or []}
    for token in special:
        hidden = f"\U0010ffff{token}\U0010ffff"
        known = added.get(token)
        if known is not None:
            known |= {"content": hidden, "special": True}
        elif token in names:
            added[token] = _added_token(token, hidden)
        if token in names:
            if names[token] == model.get("unk_token"):
                model["unk_token"] = hidden
            if isinstance(vocab, dict):
                del vocab[names[token]]
                vocab[hidden] = token
            else:
                vocab[token][0] = hidden
    if "merges" in model:
        gone = {names[token] for token in special if token in names}
        model["merges"] = [merge for merge in model["merges"] if gone.isdisjoint(_parts(merge))]
    description["added_tokens"] = [added[token] for token in sorted(added)]
    description |= {"padding": None, "truncation": None, "post_processor": None}
    return {*names, *added}


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    """The two tokens of a merge, in either of the forms that files have, and what they become."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _added_token(token: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": content, "special": True, **flags}
