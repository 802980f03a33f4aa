"""What clients are told when a request fails: OpenAI's error object, with a status."""

from __future__ import annotations

import json
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

_PARAM_NAMES = {
    "num_drafts": "speculation.num_drafts",
    "speculate": "speculation.enabled",
}
"""What a parameter of the engine is called in a request, where the names differ."""


class ApiError(Exception):
    """A request that ends with an error object.

    Args:
        status: of the HTTP response.
        message: what was asked, what is allowed, which knob to turn.
        param: the field at fault.
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
    """400: the request is wrong."""
    return ApiError(400, message, param=param, code=code)


def from_request_error(error: RequestError, names: Mapping[str, str] | None = None) -> ApiError:
    """400 for what the engine refuses.

    Args:
        error: the engine's.
        names: fields of the request by the engine's name, where they differ.
    """
    param = error.param
    if param is not None:
        param = {**_PARAM_NAMES, **(names or {})}.get(param, param)
    message = str(error)
    code = "context_length_exceeded" if "max_model_len" in message else None
    return bad_request(message, param, code)


def unavailable(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    """503: not now; clients may try again after so many seconds."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, round(retry_after)))})
