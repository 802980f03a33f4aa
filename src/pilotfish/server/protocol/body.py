"""From the bytes of a request to a checked object, or a 400 that names the field at fault."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeGuard, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pilotfish.errors import cut
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
        data = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)  # some clients write a BOM
    except UnicodeDecodeError as error:
        raise _not_json(f"The request body is not UTF-8: {error.reason} at byte {error.start}.") from None
    except RecursionError:
        raise _not_json("The request body is nested too deep.") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"The request body is not valid JSON: {error}.") from None
    except ValueError:
        limit = sys.get_int_max_str_digits()
        raise _not_json(f"The request body has an integer of more than {limit} digits.") from None
    if not isinstance(data, dict):
        raise _not_json(f"The request body must be a JSON object, not {_json_kind(data)}.")
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
        raise _from_validation_error(kind, error) from None


def short(value: object, *, quote: bool = True) -> str:
    """A value of a request for messages, as JSON, cut where it is long."""
    return cut(json.dumps(value, ensure_ascii=False) if quote or not isinstance(value, str) else value)


def _from_validation_error(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    param, where = _place(kind, first["loc"])
    if first["type"] == "missing":
        return bad_request(f"{where}: is missing, and the request needs it.", param, "missing_field")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{where}: is not a known field.", param, "unknown_field")
    allowed = first["msg"]
    if first["type"] in _ALLOWED:
        allowed = _ALLOWED[first["type"]].format(**first.get("ctx", {}))
    return bad_request(f"{where}={short(first['input'])}: {allowed}.", param)


_ALLOWED: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be an array",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "string_type": "must be a string",
}
"""What JSON may be where Pydantic found something else."""


def _place(kind: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, str]:
    """The field at fault, and with what is wrong within it.

    An entry of a list of plain values, or of ``logit_bias``, is no field of its own: only the message names it.
    """
    names: list[str] = []
    fields: Mapping[str, FieldInfo] = kind.model_fields
    for part in loc:
        names.append(short(part, quote=False))
        field = next((f for name, f in fields.items() if part in (name, f.alias)), None)
        inner = next((a for a in get_args(field.annotation) if _is_model(a)), None) if field is not None else None
        if inner is None:
            break
        fields = inner.model_fields
    entry = "".join(f"[{short(part, quote=False)}]" for part in loc[len(names) :])
    return ".".join(names), ".".join(names) + entry


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _unknown_field(name: str, kind: type[BaseModel]) -> str:
    message = f"{short(name, quote=False)}: is not a known field."
    close = difflib.get_close_matches(name[:100], kind.model_fields, n=1)
    return f"{message} Did you mean {close[0]}?" if close else message


def _refuse_constant(name: str) -> NoReturn:
    raise _not_json(f"The request body is not valid JSON: {name} is not a JSON number.")


def _not_json(message: str) -> ApiError:
    return bad_request(message, code="invalid_json")


def _json_kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
