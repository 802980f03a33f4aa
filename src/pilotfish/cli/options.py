"""The options that commands share, as dataclasses: one field an option, named as the setting that it becomes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from pilotfish.config import EngineConfig
from pilotfish.errors import ConfigError, RequestError
from pilotfish.types import SamplingParams

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "ModelOptions",
    "PromptOptions",
    "SamplingOptions",
    "parse_size",
    "throughput_config",
    "token_budget",
    "with_options",
]

DEFAULT_MAX_TOKENS = 256
"""What ``--max-tokens`` is if it is not given, as far as the context has room."""

_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_MODEL = "Model and engine"
_SAMPLING = "Sampling"
_PROMPT = "Prompt"

Option = typer.Option


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and how the engine runs it."""

    model: Annotated[
        str,
        Option("--model", "-m", help="Folder, .gguf file, Hugging Face id or built-in name.", rich_help_panel=_MODEL),
    ] = "smollm2-135m"
    dtype: Annotated[str, Option(help="bfloat16 or float32.", rich_help_panel=_MODEL)] = EngineConfig().dtype
    threads: Annotated[
        int | None, Option(help="Threads of the kernels.", show_default="all CPUs", rich_help_panel=_MODEL)
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(help="Longest prompt + output, in tokens.", show_default="the model's context", rich_help_panel=_MODEL),
    ] = None
    max_num_seqs: Annotated[int, Option(help="Most sequences that run at once.", rich_help_panel=_MODEL)] = (
        EngineConfig().max_num_seqs
    )
    kv_cache_memory: Annotated[
        str | None,
        Option(help="Memory for the KV cache, e.g. 512M or 2G.", show_default="by free memory", rich_help_panel=_MODEL),
    ] = None
    backend: Annotated[str, Option(help="auto, native or torch.", rich_help_panel=_MODEL)] = EngineConfig().backend
    isa: Annotated[str, Option(help="auto, avx2, avx512, avx512_bf16 or amx.", rich_help_panel=_MODEL)] = (
        EngineConfig().isa
    )
    no_cache: Annotated[
        bool, Option("--no-cache", help="Do not keep the converted copy of a GGUF file.", rich_help_panel=_MODEL)
    ] = False

    def engine_settings(self) -> dict[str, Any]:
        """The fields of :class:`pilotfish.config.EngineConfig` that these options set."""
        memory = None if self.kv_cache_memory is None else parse_size("kv_cache_memory", self.kv_cache_memory)
        return {
            "dtype": self.dtype,
            "threads": self.threads,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": token_budget(self.max_num_seqs),
            "kv_cache_memory": memory,
            "backend": self.backend,
            "isa": self.isa,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The fields of :class:`pilotfish.types.SamplingParams`, greedy unless a temperature is given."""

    temperature: Annotated[
        float,
        Option(help="0 is greedy, and the default here: the same output every time.", rich_help_panel=_SAMPLING),
    ] = 0.0
    top_k: Annotated[int, Option(help="Keep the k most likely tokens; 0: all.", rich_help_panel=_SAMPLING)] = 0
    top_p: Annotated[
        float, Option(help="Keep the smallest set of tokens of this probability.", rich_help_panel=_SAMPLING)
    ] = 1.0
    min_p: Annotated[
        float, Option(help="Drop tokens below this share of the most likely one.", rich_help_panel=_SAMPLING)
    ] = 0.0
    max_tokens: Annotated[
        int | None,
        Option(
            help="Most output tokens.",
            show_default=f"{DEFAULT_MAX_TOKENS}, or less at the context's end",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    min_tokens: Annotated[
        int, Option(help="No EOS or stop token before this many tokens.", rich_help_panel=_SAMPLING)
    ] = 0
    stop: Annotated[
        list[str] | None, Option(help="String that ends the output; repeatable.", rich_help_panel=_SAMPLING)
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Option(help="Token id that ends the output; repeatable.", rich_help_panel=_SAMPLING)
    ] = None
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Go on after the end-of-sequence token.", rich_help_panel=_SAMPLING)
    ] = False
    seed: Annotated[
        int | None, Option(help="Makes sampling reproducible.", show_default="random", rich_help_panel=_SAMPLING)
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        Option(metavar="ID=VALUE", help="Add VALUE to a token's logit; repeatable.", rich_help_panel=_SAMPLING),
    ] = None
    presence_penalty: Annotated[
        float, Option(help="Subtracted from tokens already in the output.", rich_help_panel=_SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="Subtracted for each occurrence in the output.", rich_help_panel=_SAMPLING)
    ] = 0.0
    repetition_penalty: Annotated[
        float, Option(help="Divides logits of tokens in prompt or output.", rich_help_panel=_SAMPLING)
    ] = 1.0

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters; ``max_tokens`` None stays None, for :meth:`within` to decide."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["logit_bias"] = _parse_logit_bias(self.logit_bias or [])
        values["stop"] = self.stop or None
        values["stop_token_ids"] = self.stop_token_ids or None
        return SamplingParams(**values, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How a prompt becomes tokens."""

    chat: Annotated[
        bool | None,
        Option(
            "--chat/--no-chat",
            help="Put the prompt through the model's chat template.",
            show_default="where there is one",
            rich_help_panel=_PROMPT,
        ),
    ] = None
    system: Annotated[
        str | None, Option(help="System message before the prompt.", show_default=False, rich_help_panel=_PROMPT)
    ] = None


def token_budget(max_num_seqs: int) -> int:
    """``max_num_batched_tokens`` of a command whose user names only the number of sequences: each needs a token."""
    return max(EngineConfig().max_num_batched_tokens, max_num_seqs)


def throughput_config(dtype: str, threads: int | None, max_num_seqs: int) -> EngineConfig:
    """Of an engine that works off a file: many rows and no drafts, for throughput is all that counts."""
    return EngineConfig(
        dtype=dtype,  # type: ignore[arg-type]  # EngineConfig checks it
        threads=threads,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget(max_num_seqs),
        speculation=None,
    )


def parse_size(name: str, text: str) -> int:
    """Bytes of "1000", "512M" or "2GiB" (units of 1,024).

    Raises:
        ConfigError: ``text`` is not such a size; names ``name``.
    """
    value = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = value[-1:] if value[-1:] in _SIZE_UNITS else ""
    try:
        size = int(float(value.removesuffix(unit)) * _SIZE_UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"{name}={text!r}: must be a number of bytes above 0, with or without K, M, G or T (2G)")
    return size


def with_options(**groups: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take option dataclasses: Typer sees one option for each of their fields.

    A field that the command has as a parameter too, say as an argument, is set from that.

    Args:
        **groups: name of the command's keyword argument -> its dataclass.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p for p in own.values() if p.name not in groups]
        for group in groups.values():
            hints = get_type_hints(group, include_extras=True)
            for field in fields(group):
                if field.name in own:
                    continue
                assert field.default is not MISSING
                parameters.append(
                    inspect.Parameter(
                        field.name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=field.default,
                        annotation=hints[field.name],
                    )
                )

        @functools.wraps(command)
        def wrapper(*args: Any, **values: Any) -> Any:
            mine = {name: values[name] for name in own if name not in groups}
            made = {name: group(**{f.name: values[f.name] for f in fields(group)}) for name, group in groups.items()}
            return command(*args, **mine, **made)

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _parse_logit_bias(entries: list[str]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise RequestError(f"logit_bias {entry!r}: must be ID=VALUE, such as 42=-1.5", "logit_bias") from None
    return bias or None
