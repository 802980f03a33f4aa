"""``pilotfish bench``: load one engine a scheme, measure them in turn, show and keep what was measured."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pilotfish.cli.bench_options import BenchOptions
from pilotfish.cli.session import loading_progress
from pilotfish.cli.speculation import bench_schemes
from pilotfish.config import Speculation
from pilotfish.errors import ConfigError
from pilotfish.types import SamplingParams

if TYPE_CHECKING:
    from pilotfish.bench import Group
    from pilotfish.bench.run import Planned, Prompt
    from pilotfish.engine import Engine
    from pilotfish.text import Tokenizer

__all__ = ["run_bench"]

_SAVE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class _Target:
    """What is known of the target before its engines are built."""

    tokenizer: Tokenizer
    context_len: int


def run_bench(options: BenchOptions, out: Path | None, plot: Path | None, *, resume: bool) -> bool:
    """Measure, print a table, write ``out`` and ``plot``. False if Ctrl-C cut the run short.

    Raises:
        ConfigError: settings, files or prompts that cannot work, as far as possible before anything is measured.
    """
    schemes = bench_schemes(options.scheme, options.speculation_options())
    options.check()
    batches = options.batches()
    params = SamplingParams(
        temperature=options.temperature,
        seed=options.seed,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
    )
    if resume and out is None:
        raise ConfigError("--resume: needs --json OUT, the file to go on with")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"json={str(out)!r}: there is no folder {str(out.parent)!r}")
    with loading_progress(f"reading {options.model}"):
        from pilotfish.bench import encode_prompts, load_questions, plan_groups, take
        from pilotfish.bench.results import load_groups
        from pilotfish.plots import check_plot

        if plot is not None:
            check_plot(plot)
        questions = take(load_questions(options.data), options.limit)
        target = read_target(options)
    prompts, too_long = encode_prompts(questions, target.tokenizer, target.context_len - options.max_tokens)
    if not prompts:
        raise ConfigError(
            f"max_tokens={options.max_tokens}: leaves room for no prompt in a context of {target.context_len} tokens"
        )
    settings = _settings(options, schemes, prompts, [question.question_id for question in too_long])
    groups = load_groups(out, settings) if resume and out is not None else []
    longest = max(len(prompt.token_ids) for prompt in prompts)
    engines = load_engines(options, schemes, min(target.context_len, longest + options.max_tokens))
    completed = _measure(engines, plan_groups(prompts, batches), params, groups, settings, out)
    _report(groups, len(too_long), plot, completed=completed)
    return completed


def read_target(options: BenchOptions) -> _Target:
    """Tokenizer and context length of the model, which say how large the engines must be."""
    from pilotfish.models.checkpoint import resolve_model

    config = options.engine_config(None, max_model_len=2)  # refuses a wrong dtype before anything is read
    with closing(resolve_model(options.model, dtype=config.dtype, cache=not options.no_cache)) as checkpoint:
        return _Target(checkpoint.load_tokenizer(), checkpoint.config.max_position_embeddings)


def load_engines(
    options: BenchOptions, schemes: Mapping[str, Speculation | None], max_model_len: int
) -> dict[str, Engine]:
    """An engine for each scheme. They share nothing, so that none pays for another's draft.

    They are named by the schemes that they run: ``auto`` has become that of the head.
    """
    from pilotfish.engine import load_engine

    engines = {}
    for scheme, speculation in schemes.items():
        with loading_progress(f"loading {options.model} for {scheme}") as progress:
            config = options.engine_config(speculation, max_model_len)
            engine = load_engine(options.model, config, use_cache=not options.no_cache, progress=progress)
        settings = engine.config.scheme_settings
        engines["none" if settings is None else settings.scheme] = engine
    return engines


def _measure(
    engines: Mapping[str, Engine],
    planned: Sequence[Planned],
    params: SamplingParams,
    groups: list[Group],
    settings: Mapping[str, Any],
    out: Path | None,
) -> bool:
    """Add to ``groups`` until all are there (True) or Ctrl-C (False); the file is kept up while that goes on."""
    from pilotfish.bench import measure, warm_up
    from pilotfish.bench.results import save

    done = {group.key for group in groups}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    console = Console(stderr=True)
    completed, saved = False, time.monotonic()
    try:
        with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("batches", total=len(planned), completed=len(done))
            for engine in engines.values():
                warm_up(engine, params)
            for group in measure(engines, planned, params, done):
                groups.append(group)
                progress.update(task, advance=1, description=f"batch {group.batch}, {group.category}")
                if out is not None and time.monotonic() - saved > _SAVE_EVERY_S:
                    save(out, settings, groups, complete=False)
                    saved = time.monotonic()
        completed = True
    except KeyboardInterrupt:
        pass
    if out is not None:
        save(out, settings, groups, complete=completed)
    return completed


def _report(groups: Sequence[Group], num_too_long: int, plot: Path | None, *, completed: bool) -> None:
    from pilotfish.bench import summarise
    from pilotfish.bench.report import draw, table

    err = Console(stderr=True, highlight=False)
    if num_too_long:
        err.print(f"{num_too_long} prompts are too long for the context and were left out")
    if not completed:
        err.print("stopped: these are the figures so far" if groups else "stopped before the first figures")
    if not groups:
        return
    summaries = summarise(groups)
    # To a file as to a terminal: a table that is cut at 80 columns is of no use.
    width = None if sys.stdout.isatty() else 140
    Console(highlight=False, width=width).print(table(summaries))
    if plot is not None:
        draw(summaries, plot)


def _settings(
    options: BenchOptions,
    schemes: Mapping[str, Speculation | None],
    prompts: Sequence[Prompt],
    too_long: Sequence[str | int],
) -> dict[str, Any]:
    """All that decides what is measured; runs that differ here are not resumed."""
    import pilotfish

    digest = hashlib.sha256(repr([prompt.token_ids for prompt in prompts]).encode()).hexdigest()
    own = ("model", "max_tokens", "temperature", "seed", "ignore_eos", "dtype", "threads", "backend", "isa")
    return {
        "pilotfish": pilotfish.__version__,
        **{name: getattr(options, name) for name in own},
        "data": None if options.data is None else str(options.data),
        "prompts_sha256": digest,
        "num_prompts": len(prompts),
        "too_long": list(too_long),
        "batches": options.batches(),
        "schemes": {scheme: None if s is None else asdict(s) for scheme, s in schemes.items()},
    }
