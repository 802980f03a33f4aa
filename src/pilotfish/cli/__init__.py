"""The command line: ``pilotfish generate``, ``pilotfish chat``, ``pilotfish info``.

Importing this package imports neither torch nor the engine, so that ``pilotfish --help`` answers at once.
"""

from pilotfish.cli.app import app, main

__all__ = ["app", "main"]
