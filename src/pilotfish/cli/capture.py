"""``pilotfish capture``: the target's answers and hidden states, on disk."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Option

from pilotfish.cli.options import throughput_config
from pilotfish.cli.session import loading_progress
from pilotfish.config import EngineConfig
from pilotfish.errors import ConfigError

if TYPE_CHECKING:
    from pilotfish.text import Tokenizer
    from pilotfish.training.capture import Capture
    from pilotfish.training.store import Sample

__all__ = ["CaptureCommand", "run_capture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCommand:
    """What is captured, and how."""

    temperature: Annotated[float, Option(help="Of the answers; 0 is greedy.")] = 0.0
    max_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 256
    max_prompt_tokens: Annotated[
        int, Option(help="Longer prompts are left out, and those that leave no room in the context.")
    ] = 1024
    keep_answers: Annotated[
        bool, Option("--keep-answers", help="Learn the answers in the data; the target writes none.")
    ] = False
    seed: Annotated[int, Option(help="Of the answers; matters above temperature 0.")] = 0
    limit: Annotated[int | None, Option(help="Most prompts.", show_default="all")] = None
    aux_layers: Annotated[
        str | None,
        Option(
            metavar="IDS|auto",
            help="Also keep the states that enter these layers, for EAGLE-3; auto: 2, the middle, the last but two.",
            show_default="none",
        ),
    ] = None
    shard_tokens: Annotated[
        int, Option(help="Tokens in a file of the capture, at least: what a kill may lose; Ctrl-C loses nothing.")
    ] = 100_000
    show: Annotated[int, Option(help="Print so many samples with what is to be learnt of them.")] = 0
    max_num_seqs: Annotated[int, Option(help="Sequences that run at once.")] = 64
    dtype: Annotated[str, Option(help="bfloat16 or float32, of the target.")] = EngineConfig().dtype
    threads: Annotated[int | None, Option(help="Threads of the kernels.", show_default="all CPUs")] = None


def run_capture(model: str, data: Path, out: Path, command: CaptureCommand) -> bool:
    """Capture what is missing in ``out``. False if Ctrl-C cut it short; the same command goes on then.

    Raises:
        ConfigError: options, prompts or a folder that cannot work.
        CheckpointError: the model cannot be loaded.
    """
    if command.show < 0:
        raise ConfigError(f"show={command.show}: must be at least 0")
    config = throughput_config(command.dtype, command.threads, command.max_num_seqs)
    err = Console(stderr=True, highlight=False)
    with loading_progress(f"reading {model}"):
        from pilotfish.training.capture import Capture, CaptureOptions

        options = CaptureOptions(
            temperature=command.temperature,
            max_tokens=command.max_tokens,
            max_prompt_tokens=command.max_prompt_tokens,
            keep_answers=command.keep_answers,
            seed=command.seed,
            limit=command.limit,
            aux_layers=_aux_layers(command.aux_layers, model),
            shard_tokens=command.shard_tokens,
        )
        capture = Capture(model, data, out, options, config)
    tokens, size = capture.size_estimate()
    err.print(
        f"{len(capture.prompts):,} prompts ({capture.num_done:,} done before); at most {tokens:,} tokens and "
        f"{size / 1e6:,.0f} MB in {out}"
    )
    if capture.loaded.num_too_long:
        err.print(
            f"{capture.loaded.num_too_long:,} prompts have more than {capture.longest_prompt:,} tokens and are left out"
        )
    if capture.loaded.num_without_answer:
        err.print(f"{capture.loaded.num_without_answer:,} prompts have no answer to learn and are left out")
    completed = _run(capture, command.show, err)
    manifest = capture.manifest
    err.print(
        f"{'' if completed else 'stopped: so far '}{manifest.num_samples:,} samples, {manifest.num_tokens:,} tokens, "
        f"{manifest.num_supervised:,} of them to be learnt"
    )
    return completed


def _run(capture: Capture, show: int, err: Console) -> bool:
    columns = (
        TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    samples = capture.run()
    try:
        with Progress(*columns, console=err, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("samples", total=len(capture.prompts), completed=capture.num_done, speed=0.0)
            num_learnt = 0
            for count, sample in enumerate(samples):
                if count < show:
                    show_sample(sample, capture.tokenizer, Console(highlight=False))
                num_learnt += int(sample.loss_mask.sum())
                elapsed = progress.tasks[0].elapsed or 0.0
                progress.update(task, advance=1, speed=num_learnt / elapsed if elapsed else 0.0)
    except KeyboardInterrupt:
        return False
    finally:
        samples.close()
    return True


def show_sample(sample: Sample, tokenizer: Tokenizer, console: Console) -> None:
    """The sample as the model sees it: what is to be learnt in green, special tokens by name."""
    from rich.text import Text

    console.rule(f"row {sample.row}  {sample.source}")
    text = Text()
    start, ids, mask = 0, sample.token_ids.tolist(), sample.loss_mask.tolist()
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            piece = tokenizer.decode(ids[start:end], skip_special_tokens=False)
            # Colours get lost in a file: brackets say it too.
            text.append(f"⟦{piece}⟧" if mask[start] else piece, style="green" if mask[start] else "dim")
            start = end
    console.print(text)


def _aux_layers(text: str | None, model: str) -> tuple[int, ...]:
    if text is None:
        return ()
    if text == "auto":
        from pilotfish.models.checkpoint import resolve_model
        from pilotfish.models.heads import default_aux_layers

        return default_aux_layers(resolve_model(model).config.num_layers)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"aux_layers={text!r}: must be auto or layer ids with commas, e.g. 2,15,27") from None
