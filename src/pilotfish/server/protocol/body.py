"""From the bytes of a request to a checked object, or a 400 that names the field at fault."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from pilotfish.server.errors import ApiError, bad_request

__all__ = ["parse_json", "short", "validated"]

_Model = TypeVar("_Model", bound=BaseModel)

_IGNORED = frozenset(
    {
        "guided_decoding_backend", "metadata", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "service_tier", "spaces_between_special_tokens", "store", "user",
    }
)  # fmt: skip
"""Fields of other servers that say nothing about the output: taken and left alone."""

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that would change the output and that this server does not know, with the values that ask for nothing."""


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object that a request body holds.

    Raises:
        ApiError: 400: it is not UTF-8, not JSON, has NaN or Infinity, is nested too deep, or is no object.
    """
    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise bad_request(f"The request body is not UTF-8: {error.reason} at byte {error.start}.") from None
    except RecursionError:
        raise bad_request("The request body is nested too deep.") from None
    except ValueError as error:  # JSONDecodeError, and integers of more digits than Python converts
        raise bad_request(f"The request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request(f"The request body must be a JSON object, not {_json_kind(data)}.")
    return data


def validated(kind: type[_Model], data: Mapping[str, Any]) -> _Model:
    """``data`` as a request of a kind. A field that is null counts as one that is not there.

    Raises:
        ApiError: 400 with ``param``: a field is unknown, unsupported, missing or of a wrong type.
    """
    given = {name: value for name, value in data.items() if value is not None}
    for name in list(given):
        if name in kind.model_fields:
            continue
        if name in _IGNORED:
            del given[name]
        elif name in _UNSUPPORTED:
            if given.pop(name) not in _UNSUPPORTED[name]:
                raise bad_request(f"{name}: is not supported by this server. Leave it out.", name, "unsupported")
        else:
            raise bad_request(_unknown_field(name, kind), short(name, quote=False), "unknown_field")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _from_validation_error(error) from None


def short(value: object, *, quote: bool = True) -> str:
    """A value of a request, for messages."""
    text = repr(value) if quote or not isinstance(value, str) else value
    return text if len(text) <= 80 else f"{text[:77]}..."


def _from_validation_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return bad_request(f"{where}: is missing, and the request needs it.", where, "missing_field")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{where}: is not a known field.", where, "unknown_field")
    message = first["msg"][:1].lower() + first["msg"][1:]
    return bad_request(f"{where}={short(first['input'])}: {message}", where, "invalid_value")


def _unknown_field(name: str, kind: type[BaseModel]) -> str:
    message = f"{short(name, quote=False)}: is not a known field."
    close = difflib.get_close_matches(name[:100], kind.model_fields, n=1)
    return f"{message} Did you mean {close[0]}?" if close else message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _json_kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
