"""The HTTP server: OpenAI's API over an engine in a thread of its own, with metrics and a playground.

A request passes :mod:`pilotfish.server.app` (routes), :mod:`pilotfish.server.prepare` (JSON to engine requests),
:mod:`pilotfish.server.host` (queue, watchdog), :mod:`pilotfish.server.worker` (the engine's thread),
:mod:`pilotfish.server.stream` (what is new) and :mod:`pilotfish.server.generation` (the response).
"""

from pilotfish.server.app import create_app
from pilotfish.server.host import EngineHost
from pilotfish.server.settings import HostSettings, ServerSettings

__all__ = ["EngineHost", "HostSettings", "ServerSettings", "create_app"]
