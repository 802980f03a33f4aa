"""``pilotfish serve``: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from pilotfish.cli.options import ModelOptions, parse_size
from pilotfish.cli.session import loading_progress
from pilotfish.config import EngineConfig, Speculation

if TYPE_CHECKING:
    from pilotfish.engine import Engine
    from pilotfish.server import EngineHost, HostSettings, ServerSettings
    from pilotfish.server.run import Server

__all__ = ["ServeOptions", "run_serve"]

logger = logging.getLogger(__name__)

_PANEL = "Server"

_LOCAL = ("127.0.0.1", "localhost", "::1")

_SWITCH_INTERVAL = 0.001
"""Seconds that one Python thread may keep another waiting. The default of 5 ms is a good part of an engine step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where the server listens, whom it serves, and its limits."""

    host: Annotated[
        str, Option(help="Address to listen on; 0.0.0.0 is every one of this machine.", rich_help_panel=_PANEL)
    ] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=_PANEL)] = 8000
    served_model_name: Annotated[
        list[str] | None,
        Option(help="Name of the model in requests; repeatable.", show_default="MODEL", rich_help_panel=_PANEL),
    ] = None
    api_key: Annotated[
        str | None,
        Option(
            help="Key that clients must send.",
            envvar="PILOTFISH_API_KEY",
            show_envvar=True,
            show_default="none",
            rich_help_panel=_PANEL,
        ),
    ] = None
    max_queue: Annotated[
        int, Option(help="Sequences that may wait beyond --max-num-seqs; then 503.", rich_help_panel=_PANEL)
    ] = 256
    request_timeout: Annotated[
        float, Option(help="Seconds that a request may take; 0: no limit.", rich_help_panel=_PANEL)
    ] = 600.0
    step_timeout: Annotated[
        float,
        Option(help="Seconds after which an engine step counts as hung; then a restart.", rich_help_panel=_PANEL),
    ] = 120.0
    shutdown_timeout: Annotated[
        float, Option(help="Seconds that requests under way may take after Ctrl-C.", rich_help_panel=_PANEL)
    ] = 30.0
    max_request_bytes: Annotated[str, Option(help="Longest request body, e.g. 512K or 8M.", rich_help_panel=_PANEL)] = (
        "4M"
    )
    cors_origin: Annotated[
        list[str] | None,
        Option(
            help="Origin whose pages may call the server, or *; repeatable.",
            show_default="none",
            rich_help_panel=_PANEL,
        ),
    ] = None
    log_level: Annotated[str, Option(help="debug, info, warning or error.", rich_help_panel=_PANEL)] = "info"
    log_format: Annotated[str, Option(help="text (key=value) or json.", rich_help_panel=_PANEL)] = "text"
    no_page: Annotated[bool, Option("--no-page", help="No playground at /.", rich_help_panel=_PANEL)] = False

    def host_settings(self) -> HostSettings:
        """How the engine is kept running."""
        from pilotfish.server import HostSettings

        return HostSettings(
            max_queue=self.max_queue,
            request_timeout=None if self.request_timeout == 0 else self.request_timeout,
            step_timeout=self.step_timeout,
            shutdown_timeout=self.shutdown_timeout,
        )

    def server_settings(self, model: str) -> ServerSettings:
        """What is served, and to whom."""
        from pilotfish.server import ServerSettings

        return ServerSettings(
            model_names=tuple(self.served_model_name or [model]),
            api_key=self.api_key,
            max_request_bytes=parse_size("max_request_bytes", self.max_request_bytes),
            cors_origins=tuple(self.cors_origin or ()),
            page=not self.no_page,
        )


def run_serve(options: ServeOptions, speculation: Speculation | None, model_options: ModelOptions) -> None:
    """Load the model and serve it until SIGINT or SIGTERM; then requests under way may finish.

    Raises:
        ConfigError: options that cannot work, or an address that cannot be listened on.
        CheckpointError: the model cannot be found, read or run.
    """
    with loading_progress(f"loading {model_options.model}") as progress:
        from pilotfish.engine import load_engine
        from pilotfish.server import EngineHost, create_app
        from pilotfish.server.logs import configure_logging
        from pilotfish.server.run import Server, bind, url_of

        host_settings, settings = options.host_settings(), options.server_settings(model_options.model)
        configure_logging(options.log_level, options.log_format)
        config = EngineConfig(**model_options.engine_settings(), speculation=speculation)
        listener = bind(options.host, options.port)
        engine = load_engine(model_options.model, config, use_cache=not model_options.no_cache, progress=progress)

    resolved = engine.config  # what was decided for the first engine holds for those that replace it

    def build() -> Engine:
        return load_engine(model_options.model, resolved, use_cache=not model_options.no_cache)

    host = EngineHost(build, engine, host_settings)
    del engine  # the host's alone: one that failed must not be kept alive from here
    # What is loaded stays: the collector need not look through it again and again.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    with listener:
        server = Server(create_app(host, settings), host)
        _announce(host, settings, url_of(listener), is_local=options.host in _LOCAL)
        _run_until_signal(server, listener)


def _announce(host: EngineHost, settings: ServerSettings, url: str, *, is_local: bool) -> None:
    """Say what is served where, on stderr."""
    names, scheme = ", ".join(settings.model_names), host.config.scheme_settings
    drafts = "no speculation" if scheme is None else f"speculation {scheme.scheme}"
    typer.echo(f"serving {names} at {url}/v1 ({drafts}, context {host.max_model_len} tokens)", err=True)
    if settings.page:
        typer.echo(f"playground at {url}/", err=True)
    if not is_local and settings.api_key is None:
        logger.warning("anyone who reaches this machine can use the server: set --api-key")


def _run_until_signal(server: Server, listener: socket.socket) -> None:
    """SIGINT and SIGTERM end it in order; uvicorn raises the signal again once it has stopped."""
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
