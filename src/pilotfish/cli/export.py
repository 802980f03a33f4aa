"""``pilotfish export``: a draft head in the layout of another engine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rich.console import Console

from pilotfish.cli.session import loading_progress
from pilotfish.config import EngineConfig
from pilotfish.errors import ConfigError

__all__ = ["run_export"]


def run_export(
    head: str,
    model: str,
    form: str,
    out: Path,
    num_drafts: int,
    *,
    allow_mismatch: bool,
    aux_convention: str | None,
) -> None:
    """Write the head and say what whoever serves it must know.

    Raises:
        ConfigError: an unknown format, one that cannot hold this head, or a folder that is not empty.
        CheckpointError: the model or the head cannot be read, or they do not belong together.
    """
    if num_drafts < 1:
        raise ConfigError(f"num_drafts={num_drafts}: must be at least 1")
    if aux_convention not in (None, "input", "output"):
        raise ConfigError(f"aux_convention={aux_convention!r}: must be input or output")
    with loading_progress(f"reading {model}") as progress:
        from pilotfish.models.checkpoint import resolve_model
        from pilotfish.training.export import export_head

        with closing(resolve_model(model, dtype=EngineConfig().dtype, progress=progress)) as checkpoint:
            notes = export_head(
                head,
                checkpoint,
                form,
                out,
                num_drafts=num_drafts,
                allow_mismatch=allow_mismatch,
                aux_convention=aux_convention,  # type: ignore[arg-type]  # checked above
            )
    err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    size = (out / "model.safetensors").stat().st_size
    err.print(f"{out}: {form}, {size / 1e6:.1f} MB")
    for note in notes:
        err.print(f"note: {note}")
