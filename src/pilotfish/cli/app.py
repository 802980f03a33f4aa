"""The commands, and the one place where errors become a line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from pilotfish import __version__
from pilotfish.cli.bench_options import BenchOptions
from pilotfish.cli.bench_serve import BenchServeOptions
from pilotfish.cli.capture import CaptureCommand
from pilotfish.cli.evaluate import EvaluateCommand
from pilotfish.cli.options import ModelOptions, PromptOptions, SamplingOptions, with_options
from pilotfish.cli.prompts import PromptsCommand
from pilotfish.cli.serve import ServeOptions
from pilotfish.cli.speculation import SpeculationOptions
from pilotfish.cli.structured import StructuredOptions
from pilotfish.cli.train import TrainCommand
from pilotfish.errors import ConfigError, PilotfishError, RequestError

__all__ = ["app", "main", "run"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="pilotfish",
    help="An LLM inference engine with speculative decoding in its heart.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pilotfish {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An LLM inference engine with speculative decoding in its heart."""


@app.command()
@with_options(
    options=PromptOptions,
    structured=StructuredOptions,
    speculation=SpeculationOptions,
    model_options=ModelOptions,
    sampling=SamplingOptions,
)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    n: Annotated[int, typer.Option("--n", help="Completions.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of each token and of this many alternatives.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run it without speculation too (loads the model twice).")
    ] = False,
    options: PromptOptions,
    structured: StructuredOptions,
    speculation: SpeculationOptions,
    model_options: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete a prompt, or answer it where the model has a chat template.

    The text goes to stdout as it comes, a line of statistics to stderr. The same command gives the same text, unless
    a temperature above 0 is given without a seed. With speculation a terminal shows accepted drafts in green and the
    target's own tokens in cyan.
    """
    from pilotfish.cli.generate import run_generate
    from pilotfish.cli.session import load_llm, prompt_tokens, with_room

    params = sampling.params(n=n, logprobs=logprobs, structured_outputs=structured.structured_outputs())
    if logprobs is not None and not json:
        raise ConfigError(f"logprobs={logprobs}: are printed only with --json")
    settings = speculation.settings()
    if compare and settings is None:
        raise ConfigError("--compare: there is nothing to compare with --scheme none. Choose a scheme.")
    text = _read_stdin() if prompt == "-" else prompt
    llm = load_llm(model_options, settings)
    token_ids = prompt_tokens(llm, text, options)
    plain = load_llm(model_options, None) if compare else None
    run_generate(llm, plain, token_ids, with_room(llm, params, len(token_ids)), as_json=json)


@app.command()
@with_options(speculation=SpeculationOptions, model_options=ModelOptions, sampling=SamplingOptions)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Statistics after each answer.")] = False,
    speculation: SpeculationOptions,
    model_options: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /reset starts anew, /exit ends."""
    from pilotfish.cli.chat import run_chat

    run_chat(model_options, sampling, speculation.settings(), system, verbose=verbose)


@app.command()
@with_options(options=ServeOptions, speculation=SpeculationOptions, model_options=ModelOptions)
def serve(
    model: Annotated[
        str, typer.Argument(help="Folder, .gguf file, Hugging Face id or built-in name.")
    ] = ModelOptions().model,
    *,
    options: ServeOptions,
    speculation: SpeculationOptions,
    model_options: ModelOptions,
) -> None:
    """Serve a model over HTTP with OpenAI's API, metrics and a playground.

    Ctrl-C lets requests under way finish; once more ends at once.
    """
    from pilotfish.cli.serve import run_serve

    run_serve(options, speculation.settings(), model_options)


@app.command()
@with_options(options=BenchOptions)
def bench(
    *,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write everything measured to this file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw the speedups (needs matplotlib).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that --json OUT holds, of the same settings.")
    ] = False,
    options: BenchOptions,
) -> None:
    """Measure speculation schemes beside plain decoding, in turn within one run.

    Ctrl-C prints what has been measured so far.
    """
    from pilotfish.cli.bench import run_bench

    if not run_bench(options, json, plot, resume=resume):
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
@with_options(options=BenchServeOptions)
def bench_serve(
    *,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write everything measured to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw throughput and latencies (needs matplotlib).")
    ] = None,
    options: BenchServeOptions,
) -> None:
    """Put load on an OpenAI-compatible server and measure throughput and latencies.

    Inter-token latency is the wait for a chunk, shared by its tokens. Ctrl-C prints what has been measured so far.
    """
    from pilotfish.cli.bench_serve import run_bench_serve

    if not run_bench_serve(options, json, plot):
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
@with_options(command=PromptsCommand)
def prompts(
    model: Annotated[str, typer.Argument(help="A chat model: folder, .gguf file, Hugging Face id or built-in name.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the prompts.", show_default=False)],
    command: PromptsCommand,
) -> None:
    """Let a chat model write what a user might ask it, as data for capture where there is none.

    Ctrl-C keeps what is done; the same command goes on with it.
    """
    from pilotfish.cli.prompts import run_prompts

    if not run_prompts(model, out, command):
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
@with_options(command=CaptureCommand)
def capture(
    model: Annotated[str, typer.Argument(help="The target: folder, .gguf file, Hugging Face id or built-in name.")],
    *,
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Prompts: one JSON object a line with messages, turns, text or prompt.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the capture.", show_default=False)],
    command: CaptureCommand,
) -> None:
    """Let a model answer prompts and keep its hidden states, to train draft heads on.

    Ctrl-C keeps what is done; the same command goes on with it.
    """
    from pilotfish.cli.capture import run_capture

    if not run_capture(model, data, out, command):
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
@with_options(command=TrainCommand)
def train(
    model: Annotated[str, typer.Argument(help="The target: folder, .gguf file, Hugging Face id or built-in name.")],
    *,
    data: Annotated[
        list[Path],
        typer.Option(metavar="DIR", help="A capture of this target's; repeatable.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the head.", show_default=False)],
    command: TrainCommand,
) -> None:
    """Train a draft head on captured text. Under torchrun each process takes its share of the batches.

    Ctrl-C saves; --resume goes on. The folder holds the head, log.jsonl and the state of the run.
    """
    from pilotfish.cli.train import run_train

    if not run_train(model, data, out, command):
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
@with_options(command=EvaluateCommand)
def evaluate(
    model: Annotated[str, typer.Argument(help="The target: folder, .gguf file, Hugging Face id or built-in name.")],
    *,
    data: Annotated[
        Path,
        typer.Option(
            metavar="DIR|FILE",
            help="A capture, for the accuracy of each draft on its text; or prompts as for capture, for lengths.",
            show_default=False,
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    command: EvaluateCommand,
) -> None:
    """Say how good a draft head is, by the code that drafts with it."""
    from pilotfish.cli.evaluate import run_evaluate

    run_evaluate(model, data, command, as_json=json)


@app.command()
def export(
    head: Annotated[str, typer.Argument(help="The head: a folder or a Hugging Face id, in any layout that is read.")],
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="Its target.")] = ModelOptions().model,
    format: Annotated[
        str,
        typer.Option(
            help="eagle3-vllm, eagle3-sglang, speculators, eagle-vllm, eagle-sglang, deepseek-mtp or pilotfish.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.", show_default=False)],
    num_drafts: Annotated[int, typer.Option(help="Drafts a step that the folder recommends.")] = 4,
    allow_mismatch: Annotated[
        bool, typer.Option("--allow-mismatch", help="Take a head of other weights or another chat template.")
    ] = False,
    aux_convention: Annotated[
        str | None,
        typer.Option(
            help="EAGLE-3: an auxiliary layer's id in the file counts the state that enters it (input) or leaves it "
            "(output). Exported with --format pilotfish, a head says so itself.",
            show_default="by the layout",
        ),
    ] = None,
) -> None:
    """Write a draft head in the layout of another engine, or say why it has none there."""
    from pilotfish.cli.export import run_export

    run_export(head, model, format, out, num_drafts, allow_mismatch=allow_mismatch, aux_convention=aux_convention)


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, Hugging Face id or built-in name.")],
    *,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32; sizes are for it.")] = ModelOptions().dtype,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Do not keep the converted copy of a GGUF file.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what a model is, whether it is supported, and what it costs."""
    from pilotfish.cli.info import model_info, print_info
    from pilotfish.cli.render import to_json

    facts = model_info(ModelOptions(model=model, dtype=dtype, no_cache=no_cache))
    if json:
        typer.echo(to_json(facts))
    else:
        print_info(facts)


def main() -> None:
    """The ``pilotfish`` program."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code: 2 after an error, which is one line on stderr."""
    try:
        code = app(args=list(args) or ["--help"], prog_name="pilotfish", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        return _fail(error.format_message())
    except PilotfishError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (a pager, head): no error of ours. Python would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"the output cannot be written: {error}")
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return EXIT_ERROR


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompt on stdin is not UTF-8: {error}", "prompt") from error
