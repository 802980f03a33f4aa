"""The server's settings: frozen, checked where they are written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.errors import ConfigError

__all__ = ["HostSettings", "ServerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """How the engine is kept running. Times are in seconds.

    Attributes:
        max_queue: sequences that may wait beyond the engine's ``max_num_seqs``; a request asks for ``n`` of them.
        request_timeout: a request that takes longer is ended. None: no limit.
        shutdown_timeout: how long requests under way may go on after the server was told to stop.
        step_timeout: an engine step that takes longer counts as hung: the engine is left and built anew.
        restart_delay: wait before the second restart in a row; it doubles up to ``max_restart_delay``. The first
            restart comes at once.
        max_restart_delay: see ``restart_delay``.
        healthy_after: a restart after so much time without a failure is a first one again.
    """

    max_queue: int = 256
    request_timeout: float | None = 600.0
    shutdown_timeout: float = 30.0
    step_timeout: float = 120.0
    restart_delay: float = 1.0
    max_restart_delay: float = 60.0
    healthy_after: float = 60.0

    def __post_init__(self) -> None:
        _check_count("max_queue", self.max_queue, 0)
        if self.request_timeout is not None:
            _check_seconds(
                "request_timeout", self.request_timeout, above_zero=True, hint="; 0 on the command line is none"
            )
        _check_seconds("step_timeout", self.step_timeout, above_zero=True)
        for name in ("shutdown_timeout", "restart_delay", "max_restart_delay", "healthy_after"):
            _check_seconds(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What the HTTP side serves, and to whom.

    Attributes:
        model_names: names that requests may give as ``model``; the first is the one that answers carry.
        api_key: what clients must send as ``Authorization: Bearer KEY``. None: no key is asked for.
        max_request_bytes: longest request body.
        cors_origins: origins whose pages may call the server from a browser; ``*`` is any. Empty: none.
        page: serve the playground at ``/``.
        summary_interval: seconds between two lines of log about what the engine does. 0: no such lines.
    """

    model_names: Sequence[str]
    api_key: str | None = None
    max_request_bytes: int = 4 * 2**20
    cors_origins: Sequence[str] = ()
    page: bool = True
    summary_interval: float = 10.0

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"served_model_name={list(self.model_names)!r}: needs at least one name, none empty")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip() == self.api_key != ""):
            raise ConfigError("api_key: must be printable ASCII without spaces around it, and not empty")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise ConfigError(
                    f"cors_origin={origin!r}: must be an origin such as https://example.com or http://localhost:3000, "
                    "without a path; or * for any"
                )
        _check_count("max_request_bytes", self.max_request_bytes, 1)
        _check_seconds("summary_interval", self.summary_interval)

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]


def _check_count(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}={value!r}: must be an integer of at least {low}")


def _check_seconds(name: str, value: object, *, above_zero: bool = False, hint: str = "") -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    if not ok or (above_zero and value == 0):
        allowed = "above 0" if above_zero else "from 0 up"
        raise ConfigError(f"{name}={value!r}: must be a number of seconds {allowed}{hint}")
