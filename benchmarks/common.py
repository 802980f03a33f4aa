"""What the benchmarks share: both engines on one model, paired rounds, medians, the machine's own limits."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pilotfish.bench.results import machine_facts
from pilotfish.config import EngineConfig
from pilotfish.engine import Engine, load_engine
from pilotfish.models.checkpoint import resolve_model
from pilotfish.types import SamplingParams

_TEXT = (
    "The harbour lies between two hills, and from the higher one a visitor sees the whole town at once: the market "
    "with its striped awnings, the church whose clock has been slow for as long as anyone remembers, and beyond the "
    "roofs the boats that go out before dawn and come back at noon with mackerel, sole and, in a good year, tuna. "
)


class PilotfishRunner:
    """Our engine, stepped by hand so that prefill and decoding are timed apart."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        self.engine: Engine = load_engine(model, config)
        self._num_requests = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt of real text of exactly this length."""
        ids = self.engine.tokenizer.encode(_TEXT * (num_tokens // 40 + 1))
        return ids[:num_tokens]

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Queue greedy requests that run to ``max_tokens`` and compute their prompts."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        names = set()
        for prompt in prompts:
            self._num_requests += 1
            names.add(str(self._num_requests))
            self.engine.add_request(str(self._num_requests), prompt, params)
        started: set[str] = set()
        while started != names:
            started |= {output.request_id for output in self.engine.step()}

    def finish(self) -> None:
        while self.engine.has_unfinished:
            self.engine.step()


class TransformersRunner:
    """transformers on the same weights and threads, called directly: no generate() overhead."""

    def __init__(self, model: str, dtype: torch.dtype, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        folder = resolve_model(model, dtype="bfloat16" if dtype == torch.bfloat16 else "float32").path
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Any]:
        out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, cache: Any, num_steps: int) -> torch.Tensor:
        for _ in range(num_steps):
            tokens = self.model(tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        return tokens


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json [OUT]``, for :func:`write_figures`."""
    parser.add_argument("--json", nargs="?", const="-", default=None, metavar="OUT", help="also JSON: to OUT or stdout")


def write_figures(title: str, args: argparse.Namespace, **figures: Any) -> None:
    """The figures with the machine and the settings that they are of, where ``--json`` says; nowhere without it."""
    if args.json is None:
        return
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "log")}
    content = {"benchmark": title, "machine": machine_facts(), "settings": settings, **figures}
    text = json.dumps(content, indent=2) + "\n"
    sys.stdout.write(text) if args.json == "-" else Path(args.json).write_text(text)


def report(title: str, rows: Sequence[dict[str, Any]], facts: dict[str, Any], as_json: bool) -> None:
    """Print the figures: one JSON object, or a table with one line a row."""
    if as_json:
        json.dump(
            {"benchmark": title, "machine": machine_facts(), **facts, "results": list(rows)}, sys.stdout, indent=2
        )
        print()
        return
    console = Console()
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    for name, value in {**machine_facts(), **facts}.items():
        console.print(f"{name}: {value}", highlight=False)
