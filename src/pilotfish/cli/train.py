"""``pilotfish train``: a draft head out of captured text."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Option

from pilotfish.cli.session import loading_progress
from pilotfish.errors import ConfigError

if TYPE_CHECKING:
    from pilotfish.training.evaluate import Accuracy
    from pilotfish.training.options import TrainOptions
    from pilotfish.training.train import Report, TrainResult

__all__ = ["TrainCommand", "run_train"]

_HEAD = "Head"
_LOSS = "Loss"
_RUN = "Run"
_LINE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """What is trained, and how: the fields of :class:`pilotfish.training.options.TrainOptions`, and the run's own."""

    kind: Annotated[
        str,
        Option(help="mtp, eagle or eagle3; or draft: an LLM of the target's first layers.", rich_help_panel=_HEAD),
    ] = "mtp"
    layers: Annotated[
        int | None, Option(help="Layers of the draft LLM.", show_default=False, rich_help_panel=_HEAD)
    ] = None
    draft_vocab: Annotated[
        int | None,
        Option(
            help="Tokens that the head can draft: those written most often; 0: all.",
            show_default="8192; draft: all",
            rich_help_panel=_HEAD,
        ),
    ] = None
    init: Annotated[
        str, Option(help="Start of the decoder layer: random, or last: the target's.", rich_help_panel=_HEAD)
    ] = "random"
    train_lm_head: Annotated[
        bool, Option("--train-lm-head", help="Give the head an output layer of its own.", rich_help_panel=_HEAD)
    ] = False
    modules: Annotated[
        int, Option(help="mtp: modules in a chain, one for each token ahead.", rich_help_panel=_HEAD)
    ] = 1
    steps_ahead: Annotated[int, Option(help="Drafts in a row to train for.", rich_help_panel=_LOSS)] = 3
    loss: Annotated[str, Option(help="On logits: kl or lk.", rich_help_panel=_LOSS)] = "kl"
    logits_weight: Annotated[float, Option(help="Of the loss on logits.", rich_help_panel=_LOSS)] = 1.0
    hidden_weight: Annotated[float, Option(help="Of the loss on hidden states.", rich_help_panel=_LOSS)] = 0.0
    step_decay: Annotated[float, Option(help="Draft k weighs this to the k.", rich_help_panel=_LOSS)] = 0.8
    mean: Annotated[str, Option(help="Over token (all alike) or sample first.", rich_help_panel=_LOSS)] = "token"
    epochs: Annotated[int, Option(help="Passes over the data.", rich_help_panel=_RUN)] = 2
    max_steps: Annotated[
        int | None, Option(help="Stop there if it is earlier.", show_default="none", rich_help_panel=_RUN)
    ] = None
    learning_rate: Annotated[float, Option("--lr", help="Peak learning rate.", rich_help_panel=_RUN)] = 1e-3
    warmup: Annotated[float, Option(help="Share of the steps over which it rises.", rich_help_panel=_RUN)] = 0.04
    weight_decay: Annotated[float, Option(help="AdamW's.", rich_help_panel=_RUN)] = 0.01
    clip: Annotated[float, Option(help="Largest norm of the gradient.", rich_help_panel=_RUN)] = 1.0
    batch_tokens: Annotated[int, Option(help="Tokens of a batch, prompts included.", rich_help_panel=_RUN)] = 4096
    validation: Annotated[float, Option(help="Share of the samples that is held out.", rich_help_panel=_RUN)] = 0.02
    validate_every: Annotated[
        int | None, Option(help="Steps between validations.", show_default="an epoch", rich_help_panel=_RUN)
    ] = None
    dtype: Annotated[str, Option(help="bfloat16 or float32, of the computation.", rich_help_panel=_RUN)] = "bfloat16"
    seed: Annotated[int, Option(help="Of the data's order and of random weights.", rich_help_panel=_RUN)] = 0
    threads: Annotated[int | None, Option(help="CPU threads.", show_default="torch's", rich_help_panel=_RUN)] = None
    save_every: Annotated[float, Option(help="Seconds between saves.", rich_help_panel=_RUN)] = 300.0
    resume: Annotated[bool, Option("--resume", help="Go on with the run in the folder.", rich_help_panel=_RUN)] = False
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the run in the folder.", rich_help_panel=_RUN)] = (
        False
    )
    plot: Annotated[
        Path | None, Option(metavar="PNG", help="Draw loss and accuracy (needs matplotlib).", rich_help_panel=_RUN)
    ] = None
    no_cache: Annotated[
        bool, Option("--no-cache", help="Do not keep the converted copy of a GGUF file.", rich_help_panel=_RUN)
    ] = False

    def options(self) -> TrainOptions:
        """Those that decide what is computed, checked."""
        from dataclasses import fields

        from pilotfish.training.options import TrainOptions

        return TrainOptions(**{field.name: getattr(self, field.name) for field in fields(TrainOptions)})


def run_train(model: str, data: list[Path], out: Path, command: TrainCommand) -> bool:
    """Train, show progress, write the head. False if Ctrl-C cut the run short; ``--resume`` goes on with it.

    Raises:
        ConfigError: settings that cannot work, as far as possible before anything is computed.
        CheckpointError: a model or capture that cannot be read.
    """
    if command.threads is not None and command.threads < 1:
        raise ConfigError(f"threads={command.threads}: must be at least 1")
    if command.validate_every is not None and command.validate_every < 1:
        raise ConfigError(f"validate_every={command.validate_every}: must be at least 1 step")
    if not command.save_every > 0:
        raise ConfigError(f"save_every={command.save_every}: must be a number of seconds above 0")
    with loading_progress(f"reading {model}") as progress:
        import torch

        from pilotfish.models.checkpoint import resolve_model
        from pilotfish.plots import check_plot
        from pilotfish.training.distributed import World
        from pilotfish.training.plot import draw_log
        from pilotfish.training.state import LOG_FILE
        from pilotfish.training.store import CaptureReader
        from pilotfish.training.train import train

        options = command.options()
        if command.plot is not None:
            check_plot(command.plot)
        reader = CaptureReader(data)
        checkpoint = resolve_model(model, dtype="bfloat16", cache=not command.no_cache, progress=progress)
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    world = World.join()
    speaks = world.rank == 0
    with closing(checkpoint), world, _Display(speaks) as display:
        result = train(
            checkpoint,
            reader,
            options,
            out,
            world=world,
            resume=command.resume,
            overwrite=command.overwrite,
            save_every_s=command.save_every,
            validate_every=command.validate_every,
            report=display.report,
        )
    if speaks:
        _conclude(result, out, "draft LLM" if command.kind == "draft" else "head")
        if command.plot is not None:
            draw_log(out / LOG_FILE, command.plot)
    return result.complete


class _Display:
    """A progress bar on a terminal, a line now and then elsewhere; validations on lines of their own."""

    def __init__(self, speaks: bool) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._on_terminal = speaks and sys.stderr.isatty()
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not self._on_terminal)
        self._task = self._progress.add_task("training", total=None)
        self._last_line = 0.0

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, report: Report) -> None:
        accuracy = " ".join(f"{share:.1%}" for share in report.accuracy)
        text = f"loss {report.loss:.3f}, top-1 {accuracy}, {report.tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._task, completed=report.step, total=report.num_steps, description=text)
        now = time.monotonic()
        if not self._on_terminal and now - self._last_line > _LINE_EVERY_S:
            self._last_line = now
            self._console.print(f"step {report.step}/{report.num_steps}: {text}", soft_wrap=True)
        if report.validation is not None and report.step < report.num_steps:  # the last is in the last line
            self._console.print(
                f"step {report.step}/{report.num_steps}: {_held_out(report.validation)}", soft_wrap=True
            )


def _held_out(accuracy: Accuracy) -> str:
    shares = accuracy.by_step
    return (
        f"held out, by the engine's code: top-1 {' '.join(f'{share:.1%}' for share in shares)}, "
        f"accepted length from any row {accuracy.accepted_length:.2f} with {len(shares)} drafts"
    )


def _conclude(result: TrainResult, out: Path, what: str) -> None:
    console = Console(stderr=True, highlight=False)
    if result.complete:
        measured = "" if result.validation is None else f"; {_held_out(result.validation)}"
        console.print(f"{out}: the {what} after {result.step} steps{measured}", soft_wrap=True)
    else:
        done = f"stopped after {result.step} of {result.num_steps} steps"
        console.print(f"{done}: --resume goes on; {out} holds the {what} so far", soft_wrap=True)
