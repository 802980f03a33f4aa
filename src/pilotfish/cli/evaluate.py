"""``pilotfish evaluate``: what a draft head is worth, on captured text or in real answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer import Option

from pilotfish.cli.options import token_budget
from pilotfish.cli.render import to_json
from pilotfish.cli.session import loading_progress
from pilotfish.config import Auto, EngineConfig, Mtp
from pilotfish.errors import ConfigError
from pilotfish.types import SamplingParams

if TYPE_CHECKING:
    from pilotfish.bench import Group, Summary
    from pilotfish.engine import Engine
    from pilotfish.training.capture import CapturePrompt
    from pilotfish.training.evaluate import Accuracy
    from pilotfish.training.store import CaptureReader

__all__ = ["EvaluateCommand", "run_evaluate"]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateCommand:
    """How a head is evaluated."""

    head: Annotated[
        str | None, Option("--head", metavar="DIR|ID", help="The head.", show_default="the model's own")
    ] = None
    num_drafts: Annotated[int, Option(help="Drafts a step.")] = Mtp().num_drafts
    limit: Annotated[int | None, Option(help="Most samples or prompts.", show_default="all")] = None
    max_tokens: Annotated[int, Option(help="Prompts: most output tokens.")] = 128
    temperature: Annotated[float, Option(help="Prompts: 0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="Prompts: of every request; matters above temperature 0.")] = 0
    allow_mismatch: Annotated[
        bool, Option("--allow-mismatch", help="Take a head of other weights or another chat template.")
    ] = False
    max_num_seqs: Annotated[int, Option(help="Sequences that run at once; figures do not depend on it.")] = 16
    dtype: Annotated[str, Option(help="bfloat16 or float32.")] = EngineConfig().dtype
    threads: Annotated[int | None, Option(help="Threads of the kernels.", show_default="all CPUs")] = None

    def engine_config(self, max_model_len: int, head: str) -> EngineConfig:
        """No prefix cache: prompts that begin alike would leave captured rows of others in it."""
        # Figures are of the head alone.
        alone = Auto(head=head, num_drafts=self.num_drafts, allow_mismatch=self.allow_mismatch, p_min=0.0, lookup=0)
        return EngineConfig(
            dtype=self.dtype,  # type: ignore[arg-type]  # EngineConfig checks it
            threads=self.threads,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=token_budget(self.max_num_seqs),
            enable_prefix_caching=False,
            speculation=alone,
        )


def run_evaluate(model: str, data: Path, command: EvaluateCommand, *, as_json: bool) -> None:
    """Evaluate and print: on a capture's samples if ``data`` is a folder, else on the prompts of a file.

    Raises:
        ConfigError: options or data that cannot work.
        CheckpointError: the model, the head or the capture cannot be read, or they do not belong together.
    """
    if command.limit is not None and command.limit < 1:
        raise ConfigError(f"limit={command.limit}: must be at least 1, or left out for all")
    if command.num_drafts < 1:
        raise ConfigError(f"num_drafts={command.num_drafts}: must be at least 1")
    evaluate = _on_capture if data.is_dir() else _on_prompts
    figures, table = evaluate(model, data, command)
    if as_json:
        typer.echo(to_json(figures))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


def _on_capture(model: str, data: Path, command: EvaluateCommand) -> tuple[dict[str, Any], Table]:
    """Teacher-forced, row by row."""
    with loading_progress(f"reading {data}"):
        from pilotfish.training.evaluate import evaluate_capture
        from pilotfish.training.store import CaptureReader

        reader = CaptureReader([data])
    if not len(reader):
        raise ConfigError(f"data={str(data)!r}: the capture has no samples")
    longest = int(reader.lengths.max()) + command.num_drafts
    engine = _load(model, command, longest, reader)
    runner = engine.proposer.runner  # type: ignore[attr-defined]  # a HeadProposer's, for the settings are a head's
    count = len(reader) if command.limit is None else min(command.limit, len(reader))
    chosen = [i * len(reader) // count for i in range(count)]  # from all of it: shards may be of different kinds
    results = evaluate_capture(
        runner,
        reader,
        _with_progress(chosen, "samples"),
        command.num_drafts,
        max_seqs=engine.config.max_num_seqs,
        max_tokens=engine.config.max_num_batched_tokens,
    )
    figures = {"data": str(data), "num_samples": count, "sources": {k: a.as_dict() for k, a in results.items()}}
    return figures, _accuracy_table(results, command.num_drafts)


def _on_prompts(model: str, data: Path, command: EvaluateCommand) -> tuple[dict[str, Any], Table]:
    """What the engine accepts while it answers."""
    params = SamplingParams(temperature=command.temperature, seed=command.seed, max_tokens=command.max_tokens)
    with loading_progress(f"reading {data}"):
        from pilotfish.bench import summarise, take
        from pilotfish.models.checkpoint import resolve_model
        from pilotfish.training.capture import load_prompts

        with closing(resolve_model(model)) as checkpoint:
            tokenizer, context = checkpoint.load_tokenizer(), checkpoint.config.max_position_embeddings
        loaded = load_prompts(data, tokenizer, context - command.max_tokens)
        prompts = take(loaded.prompts, command.limit, category=_category)
    if not prompts:
        raise ConfigError(
            f"max_tokens={command.max_tokens}: leaves room for no prompt in a context of {context} tokens"
        )
    longest = max(len(prompt.token_ids) for prompt in prompts) + command.max_tokens
    engine = _load(model, command, longest)
    summaries = summarise(list(_answer(engine, prompts, params)))
    if loaded.num_too_long:
        Console(stderr=True).print(f"{loaded.num_too_long} prompts are too long for the context and were left out")
    names = ("num_requests", "num_tokens", "mean_accepted_length", "tokens_per_step", "acceptance_by_position")
    categories = {s.category: {name: getattr(s, name) for name in names} for s in summaries}
    figures = {"data": str(data), "temperature": command.temperature, "categories": categories}
    return figures, _length_table(summaries, command.num_drafts)


def _category(prompt: CapturePrompt) -> str:
    return prompt.source or "prompts"


def _load(model: str, command: EvaluateCommand, max_model_len: int, reader: CaptureReader | None = None) -> Engine:
    """An engine that drafts with the head. Raises errors of head and capture that do not belong to the model."""
    with loading_progress(f"loading {model}") as progress:
        from pilotfish.engine import load_engine
        from pilotfish.models.checkpoint import resolve_model
        from pilotfish.models.heads import target_stamp
        from pilotfish.speculation import find_head
        from pilotfish.training.setup import check_capture

        config = EngineConfig(dtype=command.dtype)  # type: ignore[arg-type]  # refuses a wrong one first
        with closing(resolve_model(model, dtype=config.dtype, progress=progress)) as checkpoint:
            if reader is not None:
                check_capture(reader, target_stamp(checkpoint))
            head = command.head if command.head is not None else find_head(checkpoint)
            if head is None:
                raise ConfigError(f"head=None: {model} has no head of its own; name one with --head")
            max_model_len = min(max_model_len, checkpoint.config.max_position_embeddings)
        return load_engine(model, command.engine_config(max_model_len, str(head)), progress=progress)


def _answer(engine: Engine, prompts: Sequence[CapturePrompt], params: SamplingParams) -> Iterator[Group]:
    """Serve the prompts, category by category."""
    from pilotfish.bench import Group, Measured, Run, run_batch

    size = engine.config.max_num_seqs
    categories: dict[str, list[CapturePrompt]] = {}
    for prompt in prompts:
        categories.setdefault(_category(prompt), []).append(prompt)
    batches = [
        (category, members[start : start + size])
        for category, members in categories.items()
        for start in range(0, len(members), size)
    ]
    for index, (category, members) in enumerate(_with_progress(batches, "batches")):
        seconds, outputs = run_batch(engine, [prompt.token_ids for prompt in members], params)
        records = [Measured.of(prompt.row, output, None) for prompt, output in zip(members, outputs, strict=True)]
        yield Group(size, category, index, [Run("head", seconds, records)])


def _with_progress(items: Sequence[_Item], what: str) -> Iterator[_Item]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield from progress.track(items, total=len(items))


def _accuracy_table(results: Mapping[str, Accuracy], num_steps: int) -> Table:
    table = Table(title="top-1 accuracy of each draft, given the text before it")
    table.add_column("source")
    table.add_column("rows", justify="right")
    for step in range(num_steps):
        table.add_column(str(step + 1), justify="right")
    table.add_column("length of all rows", justify="right")
    for source, accuracy in results.items():
        cells = [f"{value:.1%}" for value in accuracy.by_step]
        table.add_row(source, f"{accuracy.num_rows[0]:,}", *cells, f"{accuracy.accepted_length:.2f}")
    return table


def _length_table(summaries: Sequence[Summary], num_drafts: int) -> Table:
    table = Table(title="accepted, bonus token included")
    for name in ("category", "requests", "tokens", "mean length", "tokens/step"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for step in range(num_drafts):
        table.add_column(str(step + 1), justify="right")
    for item in summaries:
        length = "-" if item.mean_accepted_length is None else f"{item.mean_accepted_length:.2f}"
        shares = [f"{share:.0%}" for share in item.acceptance_by_position]
        table.add_row(
            item.category,
            str(item.num_requests),
            f"{item.num_tokens:,}",
            length,
            f"{item.tokens_per_step:.2f}",
            *shares,
            *[""] * (num_drafts - len(shares)),
        )
    return table
