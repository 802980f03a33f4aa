"""Draft heads in the layouts that other engines load.

A head is exported only where the other engine computes the same function; where none of a layout's readers does, the
error says what the layout cannot hold and what to train instead. Tensors are renamed, not recomputed, and keep their
dtype. Which engine reads what, and where that is known from, is in ``docs/heads.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from pilotfish.errors import ConfigError
from pilotfish.models.checkpoint import BUILT_IN_MODELS, Checkpoint
from pilotfish.models.config import Architecture
from pilotfish.models.heads import (
    AuxConvention,
    HeadConfig,
    HeadKind,
    TargetStamp,
    open_head,
    save_head,
    target_stamp,
)
from pilotfish.training.export_readme import readme
from pilotfish.training.folder import check_folder

__all__ = ["ExportFormat", "Exported", "HeadTensors", "convert", "export_head"]

ExportFormat = Literal[
    "pilotfish", "eagle3-vllm", "eagle3-sglang", "speculators", "eagle-vllm", "eagle-sglang", "deepseek-mtp"
]

_SPECULATORS_VERSION = "0.3.0"
_SPECULATORS_LAYERS = 3
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """A head, and what it borrows from its target.

    Attributes:
        config: its contract.
        weights: its own tensors, by the names of :func:`pilotfish.models.heads.head_tensors`.
        token_ids: int64 [D], the target's id of each draft id; None: the whole vocabulary.
        embedding: [V, H] of the target.
        lm_head: [V, H] of the target; the embedding where they are tied.
        target: whose head it is.
        target_name: what other engines find the target by.
    """

    config: HeadConfig
    weights: Mapping[str, Tensor]
    token_ids: Tensor | None
    embedding: Tensor
    lm_head: Tensor
    target: TargetStamp
    target_name: str

    @property
    def draft_lm_head(self) -> Tensor:
        """What the head's logits are computed with, [D, H]: its own, or its slice of the target's."""
        if self.config.own_lm_head:
            return self.weights["lm_head.weight"]
        return (self.lm_head if self.token_ids is None else self.lm_head[self.token_ids]).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's own weights, and of all that is written."""
        return next(iter(self.weights.values())).dtype

    @property
    def dtype_name(self) -> str:
        """As ``config.json`` has it."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Exported:
    """A head in another layout.

    Attributes:
        config: the content of ``config.json``.
        tensors: the content of ``model.safetensors``.
        token_map: target ids for a file of their own, where the engine wants one.
        notes: what whoever serves it must know.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    token_map: list[int] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Format:
    """A layout: the kind of head that it holds, the decoder layers that its engine builds, and how to write it."""

    kind: HeadKind
    layers: tuple[Architecture, ...]
    write: Callable[[HeadTensors, int], Exported]


def export_head(
    name: str | Path,
    checkpoint: Checkpoint,
    form: str,
    out: Path,
    *,
    num_drafts: int = 4,
    allow_mismatch: bool = False,
    aux_convention: AuxConvention | None = None,
) -> tuple[str, ...]:
    """Read a head in any layout and write it in another.

    Args:
        name: of the head: a folder or a Hugging Face id.
        checkpoint: its target's.
        form: the layout to write, one of :data:`ExportFormat`.
        out: folder to write; must not hold anything.
        num_drafts: drafts a step that the folder recommends.
        allow_mismatch: of the target: see :func:`pilotfish.models.heads.load_head`.
        aux_convention: how the file that is read counts layers: see there.

    Returns:
        What whoever serves it must know, sentence by sentence; also in the folder's ``README.md``.

    Raises:
        ConfigError: an unknown layout or one that cannot hold this head, or ``out`` holds something.
        CheckpointError: the head cannot be read, or is not of this target.
    """
    if form not in get_args(ExportFormat):
        raise ConfigError(f"format={form!r}: must be one of {', '.join(get_args(ExportFormat))}")
    check_folder(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out={str(out)!r}: exists and is not an empty folder; choose another")
    stored = open_head(name, checkpoint, allow_mismatch=allow_mismatch, aux_convention=aux_convention)
    target = checkpoint.tensors()
    embedding = target["model.embed_tokens.weight"]
    head = HeadTensors(
        config=stored.config,
        weights=stored.weights,
        token_ids=stored.token_ids,
        embedding=embedding,
        lm_head=embedding if checkpoint.config.tie_word_embeddings else target["lm_head.weight"],
        target=target_stamp(checkpoint),
        target_name=_public_name(checkpoint),
    )
    if form == "pilotfish":
        save_head(out, head.config, head.weights, head.token_ids, head.dtype)
        return ()
    exported = convert(head, form, num_drafts)
    _write(exported, out)
    has_map = exported.token_map is not None
    text = readme(head.target, head.target_name, form, num_drafts, exported.notes, has_token_map=has_map)
    (out / "README.md").write_text(text, encoding="utf-8")
    return exported.notes


def convert(head: HeadTensors, form: str, num_drafts: int = 4) -> Exported:
    """The head in the layout of another project: any of :data:`ExportFormat` but ``pilotfish``.

    Raises:
        ConfigError: the layout cannot hold this head; says what, and what to do.
    """
    layout = _FORMATS[form]
    _check(head.config, form, layout)
    exported = layout.write(head, num_drafts)
    return replace(exported, notes=exported.notes + _notes(head.config))


def _public_name(checkpoint: Checkpoint) -> str:
    built_in = BUILT_IN_MODELS.get(checkpoint.name)
    return checkpoint.name if built_in is None else built_in.hub_id


def _write(exported: Exported, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # Clones: one tensor may be stored under two names, and safetensors writes none that share memory.
    tensors = {name: tensor.contiguous().clone() for name, tensor in exported.tensors.items()}
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    if exported.token_map is not None:
        torch.save(exported.token_map, out / "token_map.pt")
    (out / "config.json").write_text(json.dumps(exported.config, indent=2) + "\n", encoding="utf-8")


def _check(config: HeadConfig, form: str, layout: _Format) -> None:
    """Refuse what readers of the layout would compute otherwise."""

    def refuse(field: str, reason: str) -> None:
        raise ConfigError(f"format={form!r}: cannot hold a head with {field}={getattr(config, field)!r}: {reason}")

    if config.kind != layout.kind:
        raise ConfigError(_wrong_kind(config, form, layout))
    if config.shape.architecture not in layout.layers:
        raise ConfigError(
            f"format={form!r}: cannot hold a head with a layer of {config.shape.architecture}: its engine builds heads "
            f"of {' or '.join(layout.layers)} layers"
        )
    if config.hidden_first and config.kind != "mtp":
        refuse("hidden_first", "there the embedding comes first")
    if config.fc_bias and form == "eagle-vllm":
        refuse("fc_bias", "vLLM's fc has no bias. SGLang's has one: --format eagle-sglang")
    if config.own_embedding and form in ("eagle3-sglang", "eagle-sglang", "eagle-vllm"):
        refuse("own_embedding", "its engine puts the target's embedding in the place of the head's")
    if config.own_lm_head and config.kind == "eagle":
        refuse("own_lm_head", "its engine takes the target's output head")
    if config.norm_before_residual and form == "eagle3-sglang":
        refuse("norm_before_residual", "SGLang's residual starts from the state before its norm")
    if config.kind == "mtp" and config.recycles != "post_norm":
        refuse("recycles", "readers recycle the state after shared_head.norm")
    if form == "speculators":
        if len(config.aux_layers) != _SPECULATORS_LAYERS:
            refuse("aux_layers", f"there fc joins {_SPECULATORS_LAYERS} layers. Use --format eagle3-vllm")
        if config.target_hidden_size != config.shape.hidden_size:
            refuse("target_hidden_size", f"there it is the head's hidden size, {config.shape.hidden_size}")


def _wrong_kind(config: HeadConfig, form: str, layout: _Format) -> str:
    fitting = ", ".join(["pilotfish", *(name for name, other in _FORMATS.items() if other.kind == config.kind)])
    message = (
        f"format={form!r}: holds heads of kind {layout.kind}, and this one is of kind {config.kind}, which can be "
        f"exported as {fitting}."
    )
    if config.kind != "mtp":
        return message
    if layout.kind == "eagle3":
        return (
            f"{message} No weights make the two compute the same: an mtp layer adds its attention to "
            "eh_proj([embedding; state]) and norms that sum before q, k and v; an EAGLE-3 layer adds it to the state "
            "alone and norms embedding and state apart. Train --kind eagle3 on a capture without --aux-layers: that "
            "head reads one state too, and has norms."
        )
    return f"{message} An EAGLE layer has none of its norms: train --kind eagle."


def _notes(config: HeadConfig) -> tuple[str, ...]:
    """What holds for a head in any layout."""
    notes: tuple[str, ...] = ()
    if config.kind == "eagle3" and (config.fc_norm or config.recycles == "post_norm"):
        notes += (
            "The head needs an engine that knows the fields norm_output and fc_norm of EAGLE-3.1, as vLLM 0.33 and "
            "SGLang 0.5.23 do. An older one may ignore norm_output, and then drafts worse from the second token on.",
        )
    if config.first_row:
        notes += (
            "The head was trained with a row for position 0, which reads a state of zeros. Other engines begin at "
            "position 1: their heads attend to one key less. Output is not affected; acceptance may differ a little.",
        )
    return notes


def _eagle3_tensors(head: HeadTensors, layer: str) -> dict[str, Tensor]:
    """EAGLE-3's names; ``layer`` is the decoder layer's prefix."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.weights.items():
        in_layer = name.startswith("layer.") or name == "hidden_norm.weight"
        tensors[f"{layer}.{name.removeprefix('layer.')}" if in_layer else name] = tensor
    tensors["lm_head.weight"] = head.draft_lm_head
    if head.token_ids is not None:
        drafted = torch.zeros(head.config.shape.vocab_size, dtype=torch.bool)
        drafted[head.token_ids] = True
        tensors["d2t"] = head.token_ids - torch.arange(head.config.draft_vocab_size)
        tensors["t2d"] = drafted
    return tensors


def _eagle3_config(head: HeadTensors, architecture: str) -> dict[str, Any]:
    """What vLLM and SGLang read alike: everything but the layers' ids."""
    config = head.config
    result: dict[str, Any] = {
        **_layer_config(head),
        "architectures": [architecture],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_output": config.recycles == "post_norm",
        "eagle_config": {"use_aux_hidden_state": bool(config.aux_layers)},
    }
    if config.aux_layers:
        result |= {"num_aux_hidden_states": len(config.aux_layers), "fc_norm": config.fc_norm}
    return result


def _eagle3_vllm(head: HeadTensors, num_drafts: int) -> Exported:
    names = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
    config = _eagle3_config(head, names[head.config.shape.architecture])
    config["norm_before_residual"] = head.config.norm_before_residual
    if head.config.aux_layers:
        # vLLM counts what enters a layer, as Pilotfish does, and looks at the top level first.
        config[_AUX_IDS] = list(head.config.aux_layers)
    return Exported(config, _eagle3_tensors(head, "midlayer"))


def _eagle3_sglang(head: HeadTensors, num_drafts: int) -> Exported:
    config = _eagle3_config(head, "LlamaForCausalLMEagle3")
    if head.config.aux_layers:
        # SGLang counts what leaves a layer, one less for the same state.
        config["eagle_config"][_AUX_IDS] = [layer - 1 for layer in head.config.aux_layers]
    return Exported(config, _eagle3_tensors(head, "midlayer"))


def _speculators(head: HeadTensors, num_drafts: int) -> Exported:
    config = head.config
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_drafts}
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": head.target_name, "architectures": []},
        },
        "transformer_layer_config": _layer_config(head),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.recycles == "post_norm",
        _AUX_IDS: list(config.aux_layers),
        "tie_word_embeddings": False,
        "dtype": head.dtype_name,
    }
    tensors = _eagle3_tensors(head, "layers.0")
    # The library reads a folder without its verifier. vLLM finds the table equal to the target's and shares that.
    tensors.setdefault("embed_tokens.weight", head.embedding.to(head.dtype))
    return Exported(content, tensors)


def _eagle_tensors(head: HeadTensors) -> dict[str, Tensor]:
    return {
        f"layers.0.{name.removeprefix('layer.')}" if name.startswith("layer.") else name: tensor
        for name, tensor in head.weights.items()
    }


def _eagle_vllm(head: HeadTensors, num_drafts: int) -> Exported:
    config = {**_layer_config(head), "architectures": ["LlamaForCausalLM"], "bias": False}
    notes: tuple[str, ...] = ()
    if head.token_ids is not None:
        notes = (
            f"In Pilotfish the head drafts from {head.config.draft_vocab_size} tokens. vLLM computes the logits of all "
            f"{head.config.shape.vocab_size} with the target's lm_head, which costs more.",
        )
    return Exported(config, _eagle_tensors(head), notes=notes)


def _eagle_sglang(head: HeadTensors, num_drafts: int) -> Exported:
    config = {**_layer_config(head), "architectures": ["LlamaForCausalLMEagle"], "bias": True}
    tensors = _eagle_tensors(head)
    # SGLang's fc always has a bias, which keeps its random start if the file has none.
    tensors.setdefault("fc.bias", tensors["fc.weight"].new_zeros(head.config.shape.hidden_size))
    return Exported(config, tensors, None if head.token_ids is None else head.token_ids.tolist())


def _deepseek_mtp(head: HeadTensors, num_drafts: int) -> Exported:
    config, first = head.config, head.target.num_layers
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.weights.items():
        if not name.startswith("modules."):
            continue  # an embedding or output head of its own: see below
        _, module, part = name.split(".", 2)
        if part == "eh_proj.weight" and config.hidden_first:
            tensor = tensor.roll(config.shape.hidden_size, 1)
        part = "shared_head.norm.weight" if part == "norm.weight" else part.removeprefix("layer.")
        tensors[f"model.layers.{first + int(module)}.{part}"] = tensor
    for own, place in (("embed_tokens.weight", "embed_tokens.weight"), ("lm_head.weight", "shared_head.head.weight")):
        if own in head.weights:
            tensors |= {f"model.layers.{first + m}.{place}": head.weights[own] for m in range(config.num_modules)}
    content = {**_layer_config(head), "num_hidden_layers": first, "num_nextn_predict_layers": config.num_modules}
    notes: tuple[str, ...] = (
        "No released engine serves this layout beside a dense Llama or Qwen target. It is for tools that know "
        "DeepSeek's names, and for Pilotfish. What is the target's (embedding, output head) is not in the file.",
    )
    if head.token_ids is not None:
        notes += (
            f"The layout has no draft vocabulary: readers draft from all {config.shape.vocab_size} tokens, and not "
            f"from the {config.draft_vocab_size} that the head was trained for.",
        )
    return Exported(content, tensors, notes=notes)


def _layer_config(head: HeadTensors) -> dict[str, Any]:
    """The head's decoder layer in the keys of a Hugging Face ``config.json``."""
    return {
        **head.config.shape.to_hf(),
        "attention_bias": False,  # Qwen2's class has its biases without being told
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": head.dtype_name,
    }


_FORMATS: Mapping[str, _Format] = {
    "eagle3-vllm": _Format("eagle3", ("llama", "qwen3"), _eagle3_vllm),
    "eagle3-sglang": _Format("eagle3", ("llama",), _eagle3_sglang),
    "speculators": _Format("eagle3", ("llama", "qwen3"), _speculators),
    "eagle-vllm": _Format("eagle", ("llama",), _eagle_vllm),
    "eagle-sglang": _Format("eagle", ("llama",), _eagle_sglang),
    "deepseek-mtp": _Format("mtp", ("llama", "qwen2", "qwen3"), _deepseek_mtp),
}
