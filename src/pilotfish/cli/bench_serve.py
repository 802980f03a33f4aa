"""``pilotfish bench-serve``: put load on a server, show and keep what was measured."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pilotfish.cli.session import loading_progress
from pilotfish.errors import ConfigError

if TYPE_CHECKING:
    from pilotfish.bench.serve_client import ServeClient, ServedModel
    from pilotfish.bench.serve_prompts import ServePrompt
    from pilotfish.bench.serve_records import Level, Served

__all__ = ["BenchServeOptions", "run_bench_serve"]

Option = typer.Option

_REQUESTS_PER_PLACE = 4
"""Fewest requests of a level for each that it runs at once: a level must not be all start and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeOptions:
    """What is sent to which server, and how much of it at once."""

    url: Annotated[str, Option(help="Of the server.")] = "http://127.0.0.1:8000"
    data: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Prompts: one JSON object a line with messages, turns, text or prompt.",
            show_default="a small set of our own",
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Requests at once, with commas: a level each. With --rate: most requests at once.",
            show_default="1,4,16,32; with --rate no limit",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Option(help="Requests a second that arrive, as a Poisson process.", show_default="a new one as one ends"),
    ] = None
    num_prompts: Annotated[
        int | None,
        Option(
            help="Requests of a level; prompts are used again if there are fewer.",
            show_default="all prompts, at least 4 for each request at once",
        ),
    ] = None
    max_tokens: Annotated[int, Option(help="Most output tokens.")] = 128
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="Of every request, of the prompts' order and of the arrivals.")] = 0
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False
    no_speculation: Annotated[
        bool, Option("--no-speculation", help="Ask the server for plain decoding (Pilotfish only).")
    ] = False
    completions: Annotated[
        bool, Option("--completions", help="Send turns as plain text, for a model without a chat template.")
    ] = False
    model: Annotated[str | None, Option(help="Its name at the server.", show_default="the server's first")] = None
    api_key: Annotated[
        str | None, Option(envvar="PILOTFISH_API_KEY", help="Sent as a bearer token.", show_default=False)
    ] = None
    timeout: Annotated[float, Option(help="Longest wait for the next token, in seconds.")] = 600.0

    def check(self) -> None:
        """Refuse numbers that cannot work before anything is sent; the server checks sampling parameters.

        Raises:
            ConfigError: names the option and what is allowed.
        """
        for name in ("num_prompts", "max_tokens", "rate", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value!r}: must be a finite number above 0")

    def levels(self) -> list[Level]:
        """The loads, empty of records.

        Raises:
            ConfigError: ``concurrency`` has an entry that is not a number above 0, or one twice.
        """
        from pilotfish.bench.serve_records import Level

        if self.concurrency is None and self.rate is not None:
            return [Level(None, self.rate)]
        parts = [part.strip() for part in (self.concurrency or "1,4,16,32").split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(set(parts)) < len(parts):
            raise ConfigError(
                f"concurrency={self.concurrency!r}: must list different numbers above 0 with commas, e.g. 1,4,16"
            )
        return [Level(int(part), self.rate) for part in parts]

    def prompts_of(self, level: Level, prompts: Sequence[ServePrompt]) -> list[ServePrompt]:
        """The requests of a level, in a random order that is every level's."""
        order = random.Random(self.seed).sample(list(prompts), len(prompts))
        count = self.num_prompts or max(len(prompts), _REQUESTS_PER_PLACE * (level.concurrency or 1))
        return [order[i % len(order)] for i in range(count)]


def run_bench_serve(options: BenchServeOptions, out: Path | None, plot: Path | None) -> bool:
    """Measure, print a table, write ``out`` and ``plot``. False if Ctrl-C cut the run short.

    Raises:
        ConfigError: settings, files or a server that cannot work.
    """
    options.check()
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"json={str(out)!r}: there is no folder {str(out.parent)!r}")
    with loading_progress("reading prompts"):
        from pilotfish.bench.serve_client import ServeClient
        from pilotfish.bench.serve_prompts import load_serve_prompts
        from pilotfish.plots import check_plot

        if plot is not None:
            check_plot(plot)
        levels = options.levels()
        prompts = load_serve_prompts(options.data, as_text=options.completions)
    # Made outside of the loop that Ctrl-C ends, as are the levels: what they hold then is kept.
    client = ServeClient(options.url, options.api_key, timeout=options.timeout)
    found: list[ServedModel] = []
    try:
        asyncio.run(_measure(client, options, levels, prompts, found))
        completed = True
    except KeyboardInterrupt:
        completed = False
    measured = [level for level in levels if level.requests]
    if found and out is not None:
        from pilotfish.bench.serve_report import save_levels

        save_levels(out, _settings(options, found[0]), measured, complete=completed)
    _report(measured, options, found, plot, completed=completed)
    return completed


async def _measure(
    client: ServeClient,
    options: BenchServeOptions,
    levels: Sequence[Level],
    prompts: Sequence[ServePrompt],
    found: list[ServedModel],
) -> None:
    from pilotfish.bench.serve import request_settings, run_level, warm_up

    try:
        found.append(await client.find_model(options.model))
        settings = request_settings(
            found[0],
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
            speculate=not options.no_speculation,
        )
        planned = [options.prompts_of(level, prompts) for level in levels]
        with _progress() as progress:
            task = progress.add_task("warming up", total=sum(map(len, planned)))
            await warm_up(client, planned[0], settings, min(levels[0].concurrency or 1, len(planned[0])))

            def done(served: Served) -> None:
                progress.advance(task)

            for level, requests in zip(levels, planned, strict=True):
                progress.update(task, description=f"load {level.label}")
                await run_level(client, level, requests, settings, seed=options.seed, done=done)
    finally:
        await client.aclose()


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _settings(options: BenchServeOptions, model: ServedModel) -> dict[str, Any]:
    import pilotfish

    settings = {**asdict(options), "data": None if options.data is None else str(options.data), "model": model.name}
    del settings["api_key"]  # a secret has no place in a file of figures
    return {"pilotfish": pilotfish.__version__, "is_pilotfish": model.is_pilotfish, **settings}


def _report(
    levels: Sequence[Level],
    options: BenchServeOptions,
    found: Sequence[ServedModel],
    plot: Path | None,
    *,
    completed: bool,
) -> None:
    from pilotfish.bench.serve_records import LevelSummary
    from pilotfish.bench.serve_report import draw_levels, levels_table

    err = Console(stderr=True, highlight=False)
    if not completed:
        err.print("stopped: these are the figures so far" if levels else "stopped before the first figures")
    if not levels:
        return
    summaries = [LevelSummary.of(level) for level in levels]
    # To a file as to a terminal: a table that is cut at 80 columns is of no use.
    width = None if sys.stdout.isatty() else 160
    Console(highlight=False, width=width).print(levels_table(summaries, f"{found[0].name} at {options.url}"))
    if not found[0].is_pilotfish:
        note = "This server does not say how many tokens a chunk holds: ITL is the wait between chunks."
        err.print(note, soft_wrap=True)
    for kind, message in _first_messages(levels).items():
        err.print(f"{kind}: {message}", markup=False, soft_wrap=True)
    if plot is not None:
        draw_levels(summaries, plot)


def _first_messages(levels: Sequence[Level]) -> dict[str, str]:
    """What was said with the first error of each kind."""
    messages: dict[str, str] = {}
    for level in levels:
        for request in level.requests:
            if request.error is not None:
                messages.setdefault(request.error, request.message)
    return messages
