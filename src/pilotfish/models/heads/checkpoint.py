"""Heads on disk: Pilotfish's own layout out and in, those of other projects in, and the check that a head fits.

Its own layout is a folder with ``config.json`` (:meth:`HeadConfig.to_json`) and ``model.safetensors`` (the tensors of
``head_tensors``, and ``token_ids``). What a head shares with its target is not stored: it is taken from the target.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from pilotfish.errors import CheckpointError
from pilotfish.models.base import Model
from pilotfish.models.checkpoint import Checkpoint, download_folder, is_hub_id, read_float, read_json
from pilotfish.models.config import ModelConfig
from pilotfish.models.heads.base import DraftHead
from pilotfish.models.heads.build import build_head
from pilotfish.models.heads.config import HeadConfig, TargetStamp, head_tensors
from pilotfish.models.heads.layouts import AuxConvention, Layout, read_layout
from pilotfish.models.weights.safetensors_ import SafetensorsMapping
from pilotfish.ops import Linear, Ops

__all__ = ["StoredHead", "load_head", "open_head", "pack_lm_head", "save_head", "target_stamp"]

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_HASH_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredHead:
    """A head's checkpoint, read and found to fit its target.

    Attributes:
        config: its contract.
        weights: its own tensors, by the names of ``head_tensors(config)``, in their stored dtype; views of the file.
        token_ids: int64 [D], the target's id of each draft id; None: the whole vocabulary.
    """

    config: HeadConfig
    weights: Mapping[str, Tensor]
    token_ids: Tensor | None


def open_head(
    name: str | Path,
    checkpoint: Checkpoint,
    *,
    aux_convention: AuxConvention | None = None,
    allow_mismatch: bool = False,
) -> StoredHead:
    """Read a head for a target, from any layout that :mod:`pilotfish.models.heads.layouts` describes.

    Args:
        name: a folder, or a Hugging Face id.
        checkpoint: the target's.
        aux_convention: how another project's file counts ``eagle_aux_hidden_state_layer_ids``. None: as the layout's
            rule says.
        allow_mismatch: a target with another embedding, chat template or name is a warning, not an error.

    Raises:
        CheckpointError: no head there, one that is damaged, or one that does not fit the target: names the field and
            both values.
        UnsupportedModelError: a head of a kind that Pilotfish does not run.
    """
    folder = _locate(name)
    stored = SafetensorsMapping(folder)
    layout = read_layout(read_json(folder / "config.json"), stored, folder, checkpoint.config, aux_convention)
    layout = _share(layout, stored, checkpoint.tensors(), checkpoint.config)
    _check_fit(layout.config, checkpoint, str(folder), allow_mismatch)
    _check_tensors(layout, stored, folder)
    weights = {own: read_float(stored, source) for own, source in layout.sources.items()}
    return StoredHead(config=layout.config, weights=weights, token_ids=layout.token_ids)


def load_head(
    name: str | Path,
    *,
    checkpoint: Checkpoint,
    model: Model,
    ops: Ops,
    max_model_len: int | None = None,
    aux_convention: AuxConvention | None = None,
    allow_mismatch: bool = False,
) -> DraftHead:
    """:func:`open_head`, and :func:`build_head` with what the head shares with its target.

    Args:
        name: a folder, or a Hugging Face id.
        checkpoint: the target's.
        model: the target, built with ``ops``; the head shares its embedding, and its output head or rows of it.
        ops: the backend, in the dtype that the head is to run in.
        max_model_len: positions that will be asked for, in tokens. None: the head's whole context.
        aux_convention: see :func:`open_head`.
        allow_mismatch: see :func:`open_head`.

    Raises:
        CheckpointError, UnsupportedModelError: see :func:`open_head`.
    """
    stored = open_head(name, checkpoint, aux_convention=aux_convention, allow_mismatch=allow_mismatch)
    lm_head: Linear | None = None
    if not stored.config.own_lm_head:
        whole = stored.token_ids is None
        lm_head = model.lm_head if whole else pack_lm_head(checkpoint.tensors(), model.config, ops, stored.token_ids)
    return build_head(
        stored.config,
        stored.weights,
        ops,
        embedding=None if stored.config.own_embedding else model.embedding,
        lm_head=lm_head,
        token_ids=stored.token_ids,
        max_model_len=max_model_len,
    )


def save_head(
    path: Path,
    config: HeadConfig,
    weights: Mapping[str, Tensor],
    token_ids: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head in Pilotfish's own layout. A head that is there already is replaced.

    Args:
        path: of the folder.
        config: the contract.
        weights: the tensors of ``head_tensors(config)``; others are an error.
        token_ids: int64 [D], ascending; None: the whole vocabulary.
        dtype: of the tensors in the file.

    Raises:
        ValueError: weights that are not those of the config.
    """
    shapes = head_tensors(config)
    given = {name: tuple(weight.shape) for name, weight in weights.items()}
    if given != shapes:
        wrong = sorted(name for name in {*shapes, *given} if shapes.get(name) != given.get(name))
        raise ValueError(f"weights: {wrong[0]} is {given.get(wrong[0])}, the config says {shapes.get(wrong[0])}")
    if (token_ids is None) != (config.draft_vocab_size == config.shape.vocab_size):
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size}: token_ids must be given if it is a slice")
    tensors = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in shapes}
    if token_ids is not None:
        tensors["token_ids"] = token_ids.detach().to("cpu", torch.int64).contiguous()
    path.mkdir(parents=True, exist_ok=True)
    # Whoever reads meanwhile gets whole files; safetensors itself would make them readable for their owner only.
    scratch = path / ".writing"
    scratch.write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(scratch, path / "model.safetensors")
    scratch.write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path / "config.json")


def target_stamp(checkpoint: Checkpoint) -> TargetStamp:
    """What a head remembers of its target. Reads the whole embedding."""
    config = checkpoint.config
    template = _chat_template(checkpoint.path)
    return TargetStamp(
        name=Path(checkpoint.name).name if Path(checkpoint.name).exists() else checkpoint.name,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embedding_sha256=_embedding_sha256(checkpoint.tensors()[_EMBEDDING]),
        chat_template_sha256=None if template is None else hashlib.sha256(template.encode("utf-8")).hexdigest(),
    )


def pack_lm_head(weights: Mapping[str, Tensor], config: ModelConfig, ops: Ops, token_ids: Tensor | None) -> Linear:
    """The target's output head over a draft vocabulary, packed.

    Args:
        weights: the target's tensors by Hugging Face name.
        config: the target's.
        ops: the backend.
        token_ids: int64 [D]; None: the whole vocabulary.
    """
    weight = weights[_EMBEDDING if config.tie_word_embeddings else _LM_HEAD]
    return ops.pack_linear((weight if token_ids is None else weight[token_ids]).to(ops.dtype))


def _locate(name: str | Path) -> Path:
    path = Path(name).expanduser()
    allowed = "a folder with config.json and model.safetensors, or a Hugging Face id"
    if not path.is_dir():
        if path.exists() or not is_hub_id(str(name)):
            raise CheckpointError(f"head {str(name)!r}: there is no such folder; expected {allowed}")
        path = download_folder(str(name), f"head {str(name)!r}", allowed)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: holds no config.json; expected {allowed}")
    return path


def _chat_template(folder: Path) -> str | None:
    """The text of the default chat template, where transformers 4 and 5 keep it."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        template = read_json(file).get("chat_template") if file.is_file() else None
        if isinstance(template, list):  # several, each with a name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None:
            return str(template)
    return None


def _embedding_sha256(embedding: Tensor) -> str:
    digest = hashlib.sha256()
    for rows in embedding.split(_HASH_ROWS):
        digest.update(rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _share(layout: Layout, stored: SafetensorsMapping, target: SafetensorsMapping, config: ModelConfig) -> Layout:
    """Use the target's embedding and output head where another project's file holds mere copies of them."""
    lm_head = _EMBEDDING if config.tie_word_embeddings else _LM_HEAD
    sources = dict(layout.sources)
    for own, name, rows in (("embed_tokens.weight", _EMBEDDING, None), ("lm_head.weight", lm_head, layout.token_ids)):
        copy = layout.copies.get(own)
        if copy is not None and not _equal_rows(stored[copy], target[name], rows):
            sources[own] = copy
    head = replace(
        layout.config,
        own_embedding=layout.config.own_embedding or "embed_tokens.weight" in sources,
        own_lm_head=layout.config.own_lm_head or "lm_head.weight" in sources,
    )
    return replace(layout, config=head, sources=sources)


def _equal_rows(copy: Tensor, original: Tensor, rows: Tensor | None) -> bool:
    if rows is not None:
        if original.shape[0] <= int(rows[-1]):
            return False  # the check of sizes will say so
        original = original[rows]
    return copy.shape == original.shape and torch.equal(copy.to(torch.bfloat16), original.to(torch.bfloat16))


def _check_tensors(layout: Layout, stored: SafetensorsMapping, folder: Path) -> None:
    for own, shape in head_tensors(layout.config).items():
        source = layout.sources.get(own)
        if source is None or source not in stored:
            raise CheckpointError(
                f"{folder}: tensor {source or own} is missing; a head of layout {layout.name} so configured has it, "
                f"with shape {list(shape)}"
            )
        if stored.shape_of(source) != shape:
            raise CheckpointError(
                f"{stored.file_of(source)}: tensor {source} has shape {list(stored.shape_of(source))}, but the config "
                f"promises {list(shape)}"
            )
    used = {*layout.sources.values(), *layout.copies.values(), *layout.ignored}
    extra = [name for name in stored if name not in used]
    if extra:
        raise CheckpointError(
            f"{stored.file_of(extra[0])}: tensor {extra[0]} of shape {list(stored.shape_of(extra[0]))} is not part of "
            f"a head of layout {layout.name} so configured: without it the head would compute something else"
        )


def _check_fit(config: HeadConfig, checkpoint: Checkpoint, where: str, allow_mismatch: bool) -> None:
    """Refuse a head that was made for another target."""
    target = checkpoint.config
    sizes: list[tuple[str, Any, Any]] = [
        ("hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.shape.vocab_size, target.vocab_size),
    ]
    soft: list[tuple[str, Any, Any]] = []
    if config.target is not None:
        made_for, stamp = config.target, target_stamp(checkpoint)
        names = ["embedding_sha256" if made_for.embedding_sha256 else "name"]
        if made_for.chat_template_sha256:
            names.append("chat_template_sha256")
        sizes += [_compared(name, made_for, stamp) for name in ("hidden_size", "num_layers", "vocab_size")]
        soft = [_compared(name, made_for, stamp) for name in names]
    for field, wanted, got in sizes:
        if wanted != got:
            raise CheckpointError(
                f"{where}: the head is for a target with {field}={wanted}, but {checkpoint.name} has {got}"
            )
    beyond = [layer for layer in config.aux_layers if layer > target.num_layers]
    if beyond:
        raise CheckpointError(
            f"{where}: aux_layers={list(config.aux_layers)}: {checkpoint.name} has num_layers={target.num_layers}, so "
            f"there is no state that enters layer {beyond[0]}"
        )
    for field, wanted, got in soft:
        if wanted == got:
            continue
        message = f"{where}: the head is for a target with {field}={wanted}, but {checkpoint.name} has {got}"
        if not allow_mismatch:
            raise CheckpointError(
                f"{message}. It would draft badly; allow_mismatch=True (--allow-mismatch) loads it all the same"
            )
        logger.warning("%s. Loaded all the same: allow_mismatch is on.", message)


def _compared(field: str, made_for: TargetStamp, target: TargetStamp) -> tuple[str, Any, Any]:
    return f"target.{field}", getattr(made_for, field), getattr(target, field)
