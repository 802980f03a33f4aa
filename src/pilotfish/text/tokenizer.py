"""Text to token ids and back, and chat messages to token ids: a thin, typed face of transformers' tokenizers.

The class knows nothing of models or requests, and takes no part in streaming (see the detokenizer for that).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pilotfish.errors import CheckpointError, RequestError, prompt_too_long, shown
from pilotfish.text.spelling import Spelling

__all__ = ["Message", "Tokenizer"]

Message = Mapping[str, Any]
"""A chat message: ``role`` and ``content`` (a string, or a list of ``{"type": "text", "text": ...}`` parts)."""

# Their tokenizer.json is the whole truth. Other class names go through AutoTokenizer, which knows each one's quirks
# but needs half a second to read the model's config first.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Tokenizer:
    """The tokenizer of one checkpoint. Calls are safe from several threads."""

    def __init__(self, hf: Any, max_model_len: int | None = None) -> None:
        """Wrap a transformers tokenizer; most callers want :meth:`from_folder`."""
        self._hf = hf
        self._max_model_len = max_model_len
        text = None if max_model_len is None else self.to_json()
        self._spelling = None if text is None else Spelling.from_json(text)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder.

        Raises:
            CheckpointError: the folder holds no tokenizer, or one that cannot be read.
        """
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise CheckpointError(f"{folder}: holds no tokenizer; expected {', '.join(_TOKENIZER_FILES)}")
        try:
            return cls(_tokenizer_class(folder).from_pretrained(folder))
        except Exception as error:  # transformers and the Rust library raise whatever the file's defect leads to
            raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {_one_line(error)}") from error

    def for_context(self, max_model_len: int) -> Tokenizer:
        """This tokenizer for prompts of a model with so long a context.

        It refuses texts that cannot fit by their length alone, before it spends the time to encode them: no token has
        more bytes than the vocabulary's longest. Where that does not follow (a normalizer may shorten texts), it
        encodes all.
        """
        return Tokenizer(self._hf, max_model_len)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows."""
        return len(self._hf)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence token, if it names one. The model's config may list more."""
        eos = self._hf.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a sequence, whether :meth:`encode` adds it or not."""
        bos = self._hf.bos_token_id
        return None if bos is None else int(bos)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that ``skip_special_tokens`` leaves out."""
        added = self._hf.added_tokens_decoder.items()
        return frozenset(int(token_id) for token_id, token in added if token.special) | {*self._hf.all_special_ids}

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can work."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written out in the text become special tokens.

        Args:
            text: may be empty.
            add_special_tokens: begin (and end) the sequence as the tokenizer is configured to, e.g. with BOS.

        Raises:
            RequestError: ``text`` is not a string, has a lone surrogate, which no UTF-8 text can hold, or cannot fit
                into the context (:meth:`for_context`).
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt={text!r}: must be a string", "prompt")
        _check_unicode("the prompt", text, "prompt")
        return self._encoded(text, add_special_tokens, "prompt")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD. Nothing is cleaned up."""
        text: str = self._hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def tokens(self) -> list[str | None]:
        """Every token by id, as the vocabulary spells it; None where an id has none."""
        by_token: dict[str, int] = self._hf.get_vocab()
        tokens: list[str | None] = [None] * (max(by_token.values(), default=-1) + 1)
        for token, token_id in by_token.items():
            tokens[token_id] = token
        return tokens

    def to_json(self) -> str | None:
        """The contents of its ``tokenizer.json``, added tokens included; None where it is not of that kind."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def token_text(self, token_id: int) -> str:
        """The text that a token adds within a sequence, special tokens by name.

        Decoded after another token: SentencePiece decoders strip the space of a sequence's first token.
        """
        anchor = self._anchor
        return self.decode([*anchor, token_id], skip_special_tokens=False)[len(self._anchor_text) :]

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the model's own format; special tokens only where the template has them.

        Args:
            messages: at least one, oldest first.
            add_generation_prompt: end with what begins an answer of the assistant.

        Raises:
            RequestError: no chat template, or messages that are malformed, that the template refuses, or that cannot
                fit into the context (:meth:`for_context`).
        """
        if not self.has_chat_template:
            raise RequestError(
                "messages: this model has no chat template; send a plain prompt instead (--no-chat)", "messages"
            )
        checked = _checked_messages(messages)
        try:
            text: str = self._hf.apply_chat_template(
                checked, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            reason = _one_line(error)
            raise RequestError(f"messages: the model's chat template refuses them: {reason}", "messages") from error
        return self._encoded(text, False, "messages")

    def _encoded(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        if self._max_model_len is not None and self._spelling is not None:
            min_tokens = self._spelling.min_tokens(text)
            if min_tokens >= self._max_model_len:
                length = f"at least {min_tokens} tokens ({len(text)} characters)"
                raise prompt_too_long(length, self._max_model_len, param)
        # verbose: the engine checks the length itself, for every prompt and with the right limit.
        ids: list[int] = self._hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)[-1:]

    @cached_property
    def _anchor_text(self) -> str:
        return self.decode(self._anchor, skip_special_tokens=False)


def _tokenizer_class(folder: Path) -> Any:
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    except FileNotFoundError:
        declared = None
    is_generic = declared in _GENERIC_CLASSES and (folder / "tokenizer.json").is_file()
    return PreTrainedTokenizerFast if is_generic else AutoTokenizer


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages={shown(messages)}: must be a list of at least one message", "messages")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}={shown(message)}: must be an object with 'role' and 'content'", "messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role={shown(role)}: must be a string such as 'user'", "messages")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{part}]", value) for part, value in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(f"{where}.content={shown(content)}: must be a string or a list of text parts", "messages")
    _check_unicode(f"{where}.content", content, "messages")
    return {**message, "content": content}


def _part_text(where: str, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(f'{where}={shown(part)}: must be {{"type": "text", "text": "..."}}', "messages")
    return text


def _check_unicode(where: str, text: str, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid Unicode text: {error}", param) from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
