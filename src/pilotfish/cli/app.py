"""The commands, and the one place where errors become a line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from pilotfish.cli.options import ModelOptions, PromptOptions, SamplingOptions, with_options
from pilotfish.errors import ConfigError, PilotfishError, RequestError

if TYPE_CHECKING:
    from pilotfish.llm import LLM
    from pilotfish.types import RequestOutput, SamplingParams

__all__ = ["app", "main", "run"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="pilotfish",
    help="An LLM inference engine with speculative decoding in its heart.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _app() -> None:
    """Keeps the commands' names, however few commands there are."""


@app.command()
@with_options(options=PromptOptions, model_options=ModelOptions, sampling=SamplingOptions)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    n: Annotated[int, typer.Option("--n", help="Completions.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of each token and of this many alternatives.")
    ] = None,
    options: PromptOptions,
    model_options: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete a prompt, or answer it where the model has a chat template.

    The text goes to stdout as it comes, a line of statistics to stderr. The same command gives the same text, unless
    a temperature above 0 is given without a seed.
    """
    from pilotfish.cli.session import load_llm, prompt_tokens, with_room

    params = sampling.params(n=n, logprobs=logprobs)
    if logprobs is not None and not json:
        raise ConfigError(f"logprobs={logprobs}: are printed only with --json")
    text = _read_stdin() if prompt == "-" else prompt
    llm = load_llm(model_options)
    token_ids = prompt_tokens(llm, text, options)
    _generate(llm, token_ids, with_room(llm, params, len(token_ids)), as_json=json)


@app.command()
@with_options(model_options=ModelOptions, sampling=SamplingOptions)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Statistics after each answer.")] = False,
    model_options: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /reset starts anew, /exit ends."""
    from pilotfish.cli.chat import run_chat

    run_chat(model_options, sampling, system, verbose=verbose)


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
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return EXIT_ERROR


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompt on stdin is not UTF-8: {error}", "prompt") from error


def _generate(llm: LLM, token_ids: list[int], params: SamplingParams, *, as_json: bool) -> None:
    from pilotfish.cli.render import output_json, stats_line, to_json

    streamed = not as_json and params.n == 1
    output: RequestOutput | None = None
    for piece in llm.stream(token_ids, params):
        output = piece.output
        if streamed:
            typer.echo(piece.text, nl=False)
    assert output is not None
    if as_json:
        typer.echo(to_json(output_json(output, llm.tokenizer.token_text)))
        return
    if streamed:
        typer.echo()
    else:
        for completion in output.outputs:
            typer.echo(f"--- {completion.index + 1} of {params.n}\n{completion.text}")
    typer.echo(stats_line(output), err=True)
