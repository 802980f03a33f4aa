"""A conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from pilotfish.cli.options import ModelOptions, SamplingOptions
from pilotfish.cli.paint import Painter, wants_colour
from pilotfish.cli.render import stats_line
from pilotfish.cli.session import load_llm, with_room
from pilotfish.config import SpeculationChoice
from pilotfish.errors import ConfigError, RequestError
from pilotfish.types import SamplingParams

if TYPE_CHECKING:
    from pilotfish.llm import LLM
    from pilotfish.text import Message

__all__ = ["run_chat"]

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer."


def run_chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    speculation: SpeculationChoice,
    system: str | None,
    *,
    verbose: bool,
) -> None:
    """Read questions and stream answers until /exit or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and history

    params = sampling.params()
    llm = load_llm(model, speculation)
    if not llm.tokenizer.has_chat_template:
        raise ConfigError(
            f"model={model.model!r} has no chat template. Use `pilotfish generate`, or an instruct model."
        )
    err = Console(stderr=True, highlight=False)
    err.print(f"{model.model}. {_HELP}", style="dim")

    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    cue = "> " if sys.stdin.isatty() else ""  # piped questions: stdout holds the answers alone
    while True:
        try:
            question = input(cue).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            err.print()
            continue
        if question == "/exit":
            return
        if question == "/reset":
            messages = list(opening)
        elif question.startswith("/"):
            err.print(_HELP, style="dim")
        elif question:
            messages.append({"role": "user", "content": question})
            try:
                answer = _answer(llm, messages, params, err, verbose=verbose)
            except RequestError as error:
                err.print(f"error: {error}", style="red", markup=False)
                messages.pop()  # the conversation goes on without this question
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, messages: list[Message], params: SamplingParams, err: Console, *, verbose: bool) -> str:
    """Stream one answer to stdout; Ctrl-C keeps what has come so far."""
    token_ids = llm.tokenizer.apply_chat_template(messages)
    stream = llm.stream(token_ids, with_room(llm, params, len(token_ids)))
    painter = Painter(coloured=llm.engine.config.speculation is not None and wants_colour(sys.stdout))
    answer, output = "", None
    try:
        for piece in stream:
            answer += piece.text
            output = piece.output
            print(painter.new_text(piece.output.outputs[0]), end="", flush=True)  # noqa: T201
    except KeyboardInterrupt:
        pass
    finally:
        stream.close()
    print(flush=True)  # noqa: T201
    if verbose and output is not None:
        err.print(stats_line(output), style="dim", soft_wrap=True)
    return answer
