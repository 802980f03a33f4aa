"""``pilotfish prompts``: prompts that a model writes itself."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Option

from pilotfish.cli.options import throughput_config
from pilotfish.cli.session import loading_progress
from pilotfish.config import EngineConfig
from pilotfish.errors import ConfigError

__all__ = ["PromptsCommand", "run_prompts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsCommand:
    """How many prompts, and how they are written."""

    num: Annotated[int, Option(help="Prompts in the file, those of an earlier run included.")] = 1000
    temperature: Annotated[float, Option(help="Of the sampling; above 0.")] = 1.0
    top_p: Annotated[float, Option(help="Keep the smallest set of tokens of this probability.")] = 0.95
    max_tokens: Annotated[int, Option(help="Longer prompts are left out.")] = 256
    seed: Annotated[int, Option(help="Of the first attempt; later ones count on.")] = 0
    begin: Annotated[str, Option(help="Every prompt begins with this: prompts of a kind.", show_default=False)] = ""
    max_num_seqs: Annotated[int, Option(help="Sequences that run at once.")] = 64
    dtype: Annotated[str, Option(help="bfloat16 or float32.")] = EngineConfig().dtype
    threads: Annotated[int | None, Option(help="Threads of the kernels.", show_default="all CPUs")] = None


def run_prompts(model: str, out: Path, command: PromptsCommand) -> bool:
    """Write prompts until the file has enough. False if Ctrl-C cut it short; the same command goes on then.

    Raises:
        ConfigError: options that cannot work, or a file that holds something else.
        CheckpointError: the model cannot be loaded.
    """
    if command.num < 1:
        raise ConfigError(f"num={command.num}: must be at least 1")
    written = _read(out)
    first_attempt = max(written) + 1 if written else 0
    config = throughput_config(command.dtype, command.threads, command.max_num_seqs)
    with loading_progress(f"loading {model}") as progress:
        from pilotfish.engine import load_engine
        from pilotfish.training.prompts import PromptOptions, write_prompts

        options = PromptOptions(
            temperature=command.temperature,
            top_p=command.top_p,
            max_tokens=command.max_tokens,
            seed=command.seed,
            begin=command.begin,
        )
        engine = load_engine(model, config, progress=progress)
    columns = (
        TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    console = Console(stderr=True, highlight=False)
    count = len(written)
    try:
        with (
            out.open("a", encoding="utf-8") as file,
            closing(write_prompts(engine, options, first_attempt, written.values())) as prompts,
            Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress_bar,
        ):
            task = progress_bar.add_task("prompts", total=command.num, completed=count)
            while count < command.num:
                attempt, text = next(prompts)
                entry = {"id": attempt, "source": "self", "messages": [{"role": "user", "content": text}]}
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
                count += 1
                progress_bar.update(task, completed=count)
    except KeyboardInterrupt:
        console.print(f"stopped: so far {count:,} prompts in {out}")
        return False
    console.print(f"{count:,} prompts in {out}")
    return True


def _read(file: Path) -> dict[int, str]:
    """The prompts in the file, by the number of their attempt."""
    if file.is_dir():
        raise ConfigError(f"out={str(file)!r}: is a folder; must be a file, new or of an earlier run")
    if not file.parent.is_dir():
        raise ConfigError(f"out={str(file)!r}: there is no folder {file.parent}; make it first")
    if not file.exists():
        return {}
    try:
        entries = [json.loads(line) for line in file.read_bytes().split(b"\n") if line.strip()]
        return {int(entry["id"]): entry["messages"][0]["content"] for entry in entries}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"out={str(file)!r}: holds something else than prompts of an earlier run: {error}") from error
