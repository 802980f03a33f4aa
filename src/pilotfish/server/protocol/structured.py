"""The ways in which a request can ask for output of a form: OpenAI's, vLLM's, and vLLM's older one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotfish.errors import RequestError
from pilotfish.server.errors import bad_request, from_request_error
from pilotfish.server.protocol.body import short
from pilotfish.server.protocol.requests import GenerationRequest, ResponseFormat
from pilotfish.types import StructuredOutputs

__all__ = ["Structured", "structured_outputs"]

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(frozen=True, slots=True)
class Structured:
    """The form that is asked for, and the client's names for the engine's."""

    value: StructuredOutputs
    names: Mapping[str, str]


def structured_outputs(request: GenerationRequest) -> Structured | None:
    """What form the output must have; None for any.

    Raises:
        ApiError: 400 with ``param``: two fields ask for a form, or one asks for none or for several.
    """
    wanted = _wanted(request)
    if not wanted:
        return None
    if len(wanted) > 1:
        first, second = list(wanted)[:2]
        raise bad_request(f"{first} and {second} both ask for a form of output. Send one of them.", second)
    [(param, (kind, value))] = wanted.items()
    if kind == "json" and not isinstance(value, (str, dict)):
        raise bad_request(f"{param}={short(value)}: must be a JSON schema, as an object or as JSON text.", param)
    names = {"structured_outputs": param, f"structured_outputs.{kind}": param}
    try:
        return Structured(StructuredOutputs(**{kind: value}), names)
    except RequestError as error:
        raise from_request_error(error, names) from None


def _wanted(request: GenerationRequest) -> dict[str, tuple[str, Any]]:
    """(kind, value) of :class:`StructuredOutputs` by the field that asks for it."""
    wanted: dict[str, tuple[str, Any]] = {}
    if request.response_format is not None:
        wanted |= _of_response_format(request.response_format)
    options = request.structured_outputs
    if options is not None:
        given = options.model_dump(by_alias=True, exclude_none=True)
        if given.get("json_object") is False:
            del given["json_object"]
        if len(given) != 1:
            raise bad_request(
                f"structured_outputs has {', '.join(given) or 'nothing'}: it must have exactly one of json, regex, "
                "choice, grammar and json_object.",
                "structured_outputs",
            )
        [(kind, value)] = given.items()
        wanted[f"structured_outputs.{kind}"] = kind, value
    for name in _GUIDED:
        value = getattr(request, name)
        if value is not None:
            wanted[name] = name.removeprefix("guided_"), value
    return wanted


def _of_response_format(form: ResponseFormat) -> dict[str, tuple[str, Any]]:
    if form.type != "json_schema":
        if form.json_schema is not None:
            raise bad_request(
                f'response_format has the type "{form.type}" and a json_schema, which only the type "json_schema" has. '
                "Change the type, or leave json_schema out.",
                "response_format.json_schema",
            )
        return {"response_format.type": ("json_object", True)} if form.type == "json_object" else {}
    if form.json_schema is None:
        raise bad_request(
            'response_format has the type "json_schema" and no json_schema: it needs {"schema": {...}} there.',
            "response_format.json_schema",
            "missing_field",
        )
    return {"response_format.json_schema.schema": ("json", form.json_schema.schema_)}
