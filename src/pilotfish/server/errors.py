"""What clients are told when a request fails: OpenAI's error object, with a status."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pilotfish.errors import RequestError

__all__ = ["ApiError", "bad_request", "from_request_error", "unavailable"]

_ERROR_TYPES = {
    401: "authentication_error",
    404: "invalid_request_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_MAX_MESSAGE = 1_000
"""Characters: messages repeat values of the request, which may be as long as the request."""

_FIELD_NAMES = {
    "num_drafts": "speculation.num_drafts",
    "speculate": "speculation.enabled",
}
"""What a parameter of the engine is called in a request, where the names differ."""


class ApiError(Exception):
    """A request that ends with an error object.

    Args:
        status: of the HTTP response.
        message: what was asked, what is allowed, which knob to turn.
        param: the field at fault, such as ``temperature`` or ``messages[0].content``.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """The error object as JSON. ASCII: messages may repeat text of the request that has no UTF-8 form."""
        return json.dumps(self.body()).encode("ascii")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is wrong. Without a ``code`` it says whether a field is, or the request as a whole."""
    return ApiError(400, message, param=param, code=code or ("invalid_request" if param is None else "invalid_value"))


def from_request_error(error: RequestError, names: Mapping[str, str] | None = None) -> ApiError:
    """400 for what the engine refuses, in the client's words.

    Args:
        error: the engine's.
        names: fields of the request by the engine's name, where they differ.
    """
    message, param = str(error), error.param
    code = "context_length_exceeded" if "max_model_len" in message else None
    if param is None:
        return bad_request(message, code=code)
    names = {**_FIELD_NAMES, **(names or {})}
    return bad_request(_renamed(message, param, names), names.get(param, param), code)


def _renamed(message: str, param: str, names: Mapping[str, str]) -> str:
    """The message with the client's name for the parameter at fault, and for parts of it."""
    if param == "prompt":  # "the prompt" is what the model gets, whichever field it comes from
        return message
    mine = sorted((name for name in names if name == param or name.startswith(f"{param}.")), key=len, reverse=True)
    if not mine:
        return message
    return re.sub(rf"\b({'|'.join(map(re.escape, mine))})\b", lambda found: names[found[0]], message)


def unavailable(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    """503: not now; clients may try again after so many seconds."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, round(retry_after)))})
