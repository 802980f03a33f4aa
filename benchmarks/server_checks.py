"""What must be true of a server after any load, however bad it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

MAX_GROWTH = 0.05
"""Of the memory after the warm-up."""


Check = tuple[str, str, bool]
"""What must be true, what was found, and whether it is."""


def checks_of(
    metrics: Mapping[str, float], health: Mapping[str, Any], log: str, before: int, after: int
) -> list[Check]:
    """That nothing is left of the load.

    Args:
        metrics: of the server when all clients have gone.
        health: what ``/health`` says then.
        log: of the server.
        before: its memory in bytes after the warm-up.
        after: and at the end.
    """
    increase = after / before - 1 if before else 0.0
    errors = [line for line in log.splitlines() if " ERROR " in line or " CRITICAL " in line or "Traceback" in line]
    busy = metrics["num_requests_running"] + metrics["num_requests_waiting"]
    failed = metrics['request_success_total{finished_reason="error"}']
    pages, restarts = metrics["kv_cache_usage_perc"], metrics["engine_restarts_total"]
    return [
        ("requests that failed in the engine", f"{failed:.0f}", failed == 0),
        ("pages in use at the end", f"{pages:.2%}", pages == 0),
        ("running or waiting at the end", f"{busy:.0f}", busy == 0),
        (
            f"memory grew by at most {MAX_GROWTH:.0%}",
            f"{before / 2**20:.1f} to {after / 2**20:.1f} MiB, {increase:+.1%}",
            after <= before * (1 + MAX_GROWTH),
        ),
        ("engine restarts", f"{restarts:.0f}", restarts == 0),
        ("health", health["status"], health["status"] == "ok"),
        ("errors in the log", errors[0][:80] if errors else "0", not errors),
    ]


def as_dicts(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The checks for JSON."""
    return [{"check": text, "found": found, "passed": passed} for text, found, passed in checks]


def table_of(checks: Sequence[Check]) -> Table:
    """The checks for people."""
    table = Table(title="what must be true")
    for name in ("", "found", ""):
        table.add_column(name)
    for text, found, passed in checks:
        table.add_row(text, found, "passed" if passed else "FAILED")
    return table
