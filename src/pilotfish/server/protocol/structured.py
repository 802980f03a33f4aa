"""The ways in which a request can ask for output of a form: OpenAI's, vLLM's, and vLLM's older one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pilotfish.errors import RequestError
from pilotfish.server.errors import bad_request, from_request_error
from pilotfish.server.protocol.requests import GenerationRequest, ResponseFormat
from pilotfish.types import StructuredOutputs

__all__ = ["Structured", "structured_outputs"]

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(frozen=True, slots=True)
class Structured:
    """The form that is asked for, and the field that asks for it."""

    value: StructuredOutputs
    param: str


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
    [(param, value)] = wanted.items()
    try:
        return Structured(StructuredOutputs(**value), param)
    except RequestError as error:
        raise from_request_error(error, {"structured_outputs": param}) from None


def _wanted(request: GenerationRequest) -> dict[str, dict[str, Any]]:
    """Arguments of :class:`StructuredOutputs` by the field that asks for them."""
    wanted: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and request.response_format.type != "text":
        wanted["response_format"] = _of_response_format(request.response_format)
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
        wanted["structured_outputs"] = given
    for name in _GUIDED:
        value = getattr(request, name)
        if value is not None:
            wanted[name] = {name.removeprefix("guided_"): value}
    return wanted


def _of_response_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None:
        raise bad_request(
            'response_format has the type "json_schema" and no json_schema: it needs {"schema": {...}} there.',
            "response_format.json_schema",
        )
    return {"json": form.json_schema.schema_}
