"""What a model is, whether this engine runs it, and what it costs."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from pilotfish.cli.options import ModelOptions
from pilotfish.cli.session import loading_progress
from pilotfish.config import EngineConfig
from pilotfish.errors import UnsupportedModelError

__all__ = ["model_info", "print_info"]


def model_info(options: ModelOptions) -> dict[str, Any]:
    """The facts of a model, read without loading its weights into an engine.

    A model of a kind that is not supported has ``supported`` false and a ``reason``; one that cannot be found or read
    is an error.
    """
    EngineConfig(**options.engine_settings())  # refuses a wrong dtype before anything is read
    with loading_progress(f"reading {options.model}") as progress:
        from pilotfish.models import expected_tensors
        from pilotfish.models.checkpoint import resolve_model
        from pilotfish.speculation import find_head

        try:
            checkpoint = resolve_model(
                options.model,
                dtype=options.dtype,  # type: ignore[arg-type]  # EngineConfig has checked it
                cache=not options.no_cache,
                progress=progress,
            )
        except UnsupportedModelError as error:
            return {"model": options.model, "supported": False, "reason": str(error), "isas": _isas()}
        config = checkpoint.config
        num_parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
        head = find_head(checkpoint)
        has_template = checkpoint.load_tokenizer().has_chat_template
        checkpoint.close()
    itemsize = checkpoint.dtype.itemsize
    return {
        "model": options.model,
        "source": str(checkpoint.source),
        "supported": True,
        "architecture": config.architecture,
        "parameters": num_parameters,
        "dtype": options.dtype,
        "weight_bytes": num_parameters * itemsize,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_q_heads": config.num_q_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tie_word_embeddings,
        "context_tokens": config.max_position_embeddings,
        "kv_bytes_per_token": 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize,
        "eos_token_ids": list(config.eos_token_ids),
        "chat_template": has_template,
        "draft_head": None if head is None else str(head),
        "isas": _isas(),
    }


def print_info(info: dict[str, Any]) -> None:
    """A table of the facts on stdout."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in info.items():
        table.add_row(name.replace("_", " "), _shown(name, value))
    # Where a program reads it, a long path stays on one line.
    width = None if sys.stdout.isatty() else 1000
    Console(highlight=False, markup=False, width=width).print(table)


def _shown(name: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and name in ("weight_bytes", "kv_bytes_per_token"):
        return f"{value:,} ({value / 2**20:.1f} MiB)" if value >= 2**20 else f"{value:,} ({value / 2**10:.1f} KiB)"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _isas() -> list[str]:
    """Instruction sets of the native kernels that this CPU can run; empty without the native module."""
    try:
        native = importlib.import_module("pilotfish._native")
    except ImportError:
        return []
    return [str(isa) for isa in native.supported_isas()]
