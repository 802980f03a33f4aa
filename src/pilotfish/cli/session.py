"""What the commands share: a loaded model behind a progress display, and prompts as token ids."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pilotfish.cli.options import DEFAULT_MAX_TOKENS, ModelOptions, PromptOptions
from pilotfish.config import SpeculationChoice
from pilotfish.errors import ConfigError, RequestError
from pilotfish.types import SamplingParams

if TYPE_CHECKING:
    from pilotfish.llm import LLM
    from pilotfish.text import Message

__all__ = ["load_llm", "loading_progress", "prompt_tokens", "with_room"]


def load_llm(options: ModelOptions, speculation: SpeculationChoice = None) -> LLM:
    """Load the model and its draft, with a progress display on stderr if that is a terminal."""
    settings = options.engine_settings()
    with loading_progress(f"loading {options.model}") as progress:
        from pilotfish.llm import LLM

        return LLM(
            options.model, use_cache=not options.no_cache, progress=progress, speculation=speculation, **settings
        )


@contextlib.contextmanager
def loading_progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """A progress display that is gone afterwards; yields what reports to it, when torch is imported."""
    if not sys.stderr.isatty():
        _import_torch()
        yield lambda what, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)

        def report(what: str, fraction: float) -> None:
            progress.update(task, description=what, completed=fraction, total=1.0)

        # It takes a second or more; the display is up by then.
        _import_torch()
        yield report


def _import_torch() -> None:
    """Ctrl-C within the import of a C++ extension aborts the process or is lost: it is taken when that is over."""
    if threading.current_thread() is not threading.main_thread():
        return
    interrupted: list[bool] = []
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    try:
        import torch  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt


def prompt_tokens(llm: LLM, prompt: str, options: PromptOptions) -> list[int]:
    """Token ids of a prompt: through the chat template by ``--chat``, by default where the model has one."""
    if not prompt:
        raise RequestError("The prompt is empty: give some text, or - to read it from stdin.", "prompt")
    use_template = llm.tokenizer.has_chat_template if options.chat is None else options.chat
    if use_template:
        return llm.tokenizer.apply_chat_template(_conversation(options.system, prompt))
    if options.system is not None:
        why = "it has no chat template" if options.chat is None else "--no-chat was given"
        raise ConfigError(f"system={options.system!r}: a system message needs the model's chat template, but {why}")
    return llm.tokenizer.encode(prompt)


def _conversation(system: str | None, prompt: str) -> Sequence[Message]:
    """One question, after the system message if there is one."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": prompt}]


def with_room(llm: LLM, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
    """The default ``max_tokens``, as far as the context has room, where ``params`` says None."""
    if params.max_tokens is not None:
        return params
    room = max(llm.engine.max_model_len - num_prompt_tokens, 1)  # no room at all: the engine says so better
    return replace(params, max_tokens=min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room))
