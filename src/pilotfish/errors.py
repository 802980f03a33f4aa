"""The exceptions that Pilotfish raises for its users.

::

    PilotfishError
    ├── ConfigError (ValueError)        a setting that cannot work: which, its value, what is allowed
    ├── CheckpointError (ValueError)    a model file that cannot be loaded: which file, which tensor
    │   └── UnsupportedModelError       an architecture, rope scaling or quantisation that we do not know
    ├── RequestError (ValueError)       one bad request; every other request goes on
    └── BackendError (RuntimeError)     this machine lacks what a backend needs

Every message says what was asked, what is allowed and which knob to turn, with the values. ``RequestError.param``
names the offending parameter so that a server can put it into its error object.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "PilotfishError",
    "RequestError",
    "UnsupportedModelError",
    "cut",
    "prompt_too_long",
    "shown",
]


_MAX_SHOWN = 80
"""Characters of a value in a message."""


class PilotfishError(Exception):
    """Root of all errors that Pilotfish raises on purpose."""


class ConfigError(PilotfishError, ValueError):
    """A setting of the engine, the model or the command line that cannot work."""


class CheckpointError(PilotfishError, ValueError):
    """A checkpoint that is missing, truncated, or does not hold the tensors its config promises."""


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of a kind that Pilotfish does not run."""


class RequestError(PilotfishError, ValueError):
    """One request that cannot be served. ``param`` is the name of the parameter at fault, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BackendError(PilotfishError, RuntimeError):
    """A backend that was asked for and cannot run on this machine."""


def shown(value: object) -> str:
    """A value for messages: as Python writes it, cut where it is long."""
    try:
        return cut(repr(value))
    except ValueError:  # it has an integer of more digits than Python writes
        return f"<{type(value).__name__} of thousands of digits>"


def cut(text: str) -> str:
    """The beginning of a text that is long for a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def prompt_too_long(length: str, max_model_len: int, param: str = "prompt") -> RequestError:
    """A prompt that leaves no room for output, of a length in words."""
    return RequestError(
        f"The prompt has {length}; the context (max_model_len) is {max_model_len} tokens and must also hold the "
        f"output, so a prompt may have at most {max_model_len - 1}. Shorten it or raise max_model_len.",
        param,
    )
