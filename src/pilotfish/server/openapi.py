"""The OpenAPI description. Bodies are parsed by hand, for OpenAI's errors, so they are described by hand too."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pilotfish.server.protocol.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

__all__ = ["describe", "takes"]

_REF = "#/components/schemas/{model}"

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

_STATUSES = {
    "400": "The request is wrong; param names the field.",
    "401": "The API key is missing or wrong.",
    "404": "The model is not served here.",
    "413": "The body is too long.",
    "500": "The engine failed.",
    "503": "Not now: the queue is full, or the engine is starting or stopping.",
    "504": "It took too long.",
}


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is a ``kind``."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> None:
    """Let ``/openapi.json`` say what the routes take and which errors they give."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _schema(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds: list[type[BaseModel]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
    _, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components.update(definitions["$defs"])
    components["Error"] = _ERROR
    for operations in schema["paths"].values():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, text in _STATUSES.items():
                content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
                responses.setdefault(status, {"description": text, "content": content})
    return schema
