"""Prompts and messages as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pilotfish.errors import RequestError
from pilotfish.server.errors import bad_request, from_request_error
from pilotfish.server.protocol.body import short
from pilotfish.text import Tokenizer

__all__ = ["chat_tokens", "check_token_ids", "completion_prompts"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of a request, and what the model's chat template knows them as."""

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "refusal", "annotations"})


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[Any], *, add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: 400: a message of an unknown form, or one that the chat template refuses.
    """
    if not messages:
        raise bad_request("messages: must hold at least one message.", "messages")
    checked = [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(checked, add_generation_prompt=add_generation_prompt)
    except RequestError as error:
        raise from_request_error(error) from None
    except (RecursionError, OverflowError) as error:
        raise bad_request(f"messages: the model's chat template fails on them: {error}", "messages") from None


def completion_prompts(tokenizer: Tokenizer, prompt: object, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt of a completion request: a text, its token ids, or a list of either.

    Raises:
        ApiError: 400: not of that form, empty, or with a token id that the model does not have.
    """
    if isinstance(prompt, str):
        return [_encode(tokenizer, prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(
            f"prompt={short(prompt)}: must be a text, a list of token ids, or a list of texts or of lists of token "
            "ids, and not empty.",
            "prompt",
        )
    if all(isinstance(item, str) for item in prompt):
        return [_encode(tokenizer, item) for item in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [check_token_ids(item, vocab_size, "prompt") for item in prompt]
    return [check_token_ids(prompt, vocab_size, "prompt")]


def check_token_ids(token_ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    """``token_ids``, all of which the model has.

    Raises:
        ApiError: 400.
    """
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise bad_request(
                f"{param} has the token id {short(token_id)}: this model's ids are integers from 0 to "
                f"{vocab_size - 1}.",
                param,
            )
    if not token_ids:
        raise bad_request(f"{param}: has no token. Send at least one.", param)
    return list(token_ids)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        token_ids = tokenizer.encode(text)
    except RequestError as error:
        raise from_request_error(error) from None
    if not token_ids:
        raise bad_request("prompt: has no token. Send a text that is not empty.", "prompt")
    return token_ids


def _message(where: str, message: object) -> dict[str, Any]:
    """A message of strings only, as chat templates take it."""
    if not isinstance(message, Mapping):
        raise bad_request(f"{where}={short(message)}: must be an object with role and content.", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role={short(role)}: must be one of {', '.join(_ROLES)}.", f"{where}.role")
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and value not in (None, []):
            param = f"{where}.{short(name, quote=False)}"
            raise bad_request(f"{param}: is not supported by this server. Leave it out.", param, "unsupported")
    return {"role": _ROLES[role], "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return _checked_text(where, content)
    if not isinstance(content, list):
        raise bad_request(f"{where}={short(content)}: must be a string, or a list of text parts.", where)
    return "".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise bad_request(
            f"{where}.type={short(kind)}: this server takes text only; images, audio and files are not supported.",
            f"{where}.type",
            "unsupported",
        )
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise bad_request(f'{where}={short(part)}: must be {{"type": "text", "text": "..."}}.', where)
    return _checked_text(f"{where}.text", text)


def _checked_text(where: str, text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise bad_request(f"{where}={short(text)}: has a lone surrogate, which is no character.", where)
    return text
