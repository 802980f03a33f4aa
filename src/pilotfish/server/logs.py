"""Structured logging: a message and fields, as ``key=value`` or as JSON, one line a record.

Fields come with ``logger.info("request", extra={"fields": {...}})``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from pilotfish.errors import ConfigError
from pilotfish.server.host import EngineHost

__all__ = ["LogFormat", "configure_logging", "summarise"]

LogFormat = Literal["text", "json"]

_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger(__name__)


def configure_logging(level: str, form: str) -> None:
    """Send Pilotfish's and uvicorn's log to stderr. For programs, not for a library's users.

    Args:
        level: debug, info, warning or error.
        form: text or json.

    Raises:
        ConfigError: another level or form.
    """
    if level not in _LEVELS:
        raise ConfigError(f"log_level={level!r}: must be one of {', '.join(_LEVELS)}")
    if form not in ("text", "json"):
        raise ConfigError(f"log_format={form!r}: must be text or json")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name, least in (("pilotfish", level), ("uvicorn", "debug" if level == "debug" else "warning")):
        target = logging.getLogger(name)
        target.handlers = [handler]
        target.setLevel(least.upper())
        target.propagate = False


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z INFO request id=cmpl-1 tokens=16``."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname, *_one_line(record.getMessage()).split("\n")]
        parts += [f"{name}={_value(value)}" for name, value in _fields(record).items()]
        return " ".join(parts) + _traceback(self, record)


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body | _fields(record), default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value is not None}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    text = value if isinstance(value, str) else str(value)
    plain = text.isascii() and text.isprintable() and not any(character in text for character in ' "=')
    return text if plain and text else json.dumps(text)


def _one_line(text: str) -> str:
    """Text of a request may be in a message; it must not look like another line of log."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""


async def summarise(host: EngineHost, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Log what the engine did in each interval, as long as it does something. Runs until it is cancelled."""
    before, began = host.stats, clock()
    while True:
        await asyncio.sleep(interval)
        now, stats, load = clock(), host.stats, host.load
        tokens = stats.num_generation_tokens - before.num_generation_tokens
        if tokens or load.num_running or load.num_waiting:
            drafted = stats.speculation.num_drafted - before.speculation.num_drafted
            accepted = stats.speculation.num_accepted - before.speculation.num_accepted
            fields = {
                "running": load.num_running,
                "waiting": load.num_waiting,
                "tokens_per_second": tokens / (now - began),
                "prompt_tokens_per_second": (stats.num_prompt_tokens - before.num_prompt_tokens) / (now - began),
                "acceptance": accepted / drafted if drafted else None,
                "kv_usage": load.kv_usage,
            }
            logger.info("engine", extra={"fields": fields})
        before, began = stats, now
