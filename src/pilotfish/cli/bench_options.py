"""The options of ``pilotfish bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from pilotfish.cli.options import ModelOptions, token_budget
from pilotfish.cli.speculation import (
    AllowMismatchOption,
    DraftOption,
    HeadOption,
    LookupOption,
    MaxNgramOption,
    MinNgramOption,
    NumDraftsOption,
    PMinOption,
    ThresholdOption,
    VerifyOption,
    given_options,
)
from pilotfish.config import EngineConfig, Speculation
from pilotfish.errors import ConfigError

__all__ = ["BenchOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is measured, on what."""

    model: Annotated[str, Option("--model", "-m", help="Folder, .gguf file, Hugging Face id or built-in name.")] = (
        ModelOptions().model
    )
    scheme: Annotated[
        str, Option(metavar="LIST", help="Schemes, with commas: none, draft, ngram, mtp, eagle. Ratios are to none.")
    ] = "none,ngram"
    data: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Prompts: one JSON object a line with question_id, category and turns; first turns are used.",
            show_default="a small set of our own",
        ),
    ] = None
    batch: Annotated[str, Option(metavar="LIST", help="Batch sizes, with commas.")] = "1"
    max_tokens: Annotated[int, Option(help="Most output tokens.")] = 128
    limit: Annotated[
        int | None, Option(help="Most prompts, taken from all categories in turn.", show_default="all")
    ] = None
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="Of every request; matters above temperature 0.")] = 0
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False
    draft: DraftOption = None
    head: HeadOption = None
    allow_mismatch: AllowMismatchOption = False
    num_drafts: NumDraftsOption = None
    p_min: PMinOption = None
    lookup: LookupOption = None
    verify: VerifyOption = None
    threshold: ThresholdOption = None
    max_ngram: MaxNgramOption = None
    min_ngram: MinNgramOption = None
    dtype: Annotated[str, Option(help="bfloat16 or float32.")] = EngineConfig().dtype
    threads: Annotated[int | None, Option(help="Threads of the kernels.", show_default="all CPUs")] = None
    backend: Annotated[str, Option(help="native, torch or auto.")] = EngineConfig().backend
    isa: Annotated[str, Option(help="auto, avx2, avx512, avx512_bf16 or amx.")] = EngineConfig().isa
    no_cache: Annotated[bool, Option("--no-cache", help="Do not keep the converted copy of a GGUF file.")] = False

    def batches(self) -> list[int]:
        """The batch sizes.

        Raises:
            ConfigError: one of them is not a number above 0, or is listed twice.
        """
        parts = [part.strip() for part in self.batch.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(set(parts)) < len(parts):
            raise ConfigError(f"batch={self.batch!r}: must list different numbers above 0 with commas, e.g. 1,4,16")
        return [int(part) for part in parts]

    def check(self) -> None:
        """Refuse a limit that leaves nothing; sampling parameters are checked where they are made.

        Raises:
            ConfigError: ``limit`` is below 1.
        """
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit}: must be at least 1")

    def speculation_options(self) -> dict[str, object]:
        """Options that belong to schemes, by name; None where not given."""
        names = ("draft", "head", "allow_mismatch", "num_drafts", "p_min", "lookup", "verify", "threshold")
        return given_options(self, (*names, "max_ngram", "min_ngram"))

    def engine_config(self, speculation: Speculation | None, max_model_len: int) -> EngineConfig:
        """Of one scheme's engine: rows and pages for the largest batch, and no prefix cache.

        Prompts come again with every scheme and batch size; a prefix cache would leave nothing of their prefill.
        """
        max_num_seqs = max(self.batches())
        return EngineConfig(
            dtype=self.dtype,  # type: ignore[arg-type]  # EngineConfig checks it, and the others
            backend=self.backend,  # type: ignore[arg-type]
            isa=self.isa,  # type: ignore[arg-type]
            threads=self.threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget(max_num_seqs),
            enable_prefix_caching=False,
            speculation=speculation,
            seed=self.seed % 2**63,
        )
