"""The layouts of head checkpoints, told apart by ``config.json`` and the names of the tensors, and read as a contract.

=============  =========================================================================================================
``pilotfish``  ``config.json`` with ``"format": "pilotfish-head"``
speculators    ``speculators_model_type: eagle3``, the layer's shape in ``transformer_layer_config``
eagle3         ``midlayer.*`` (SafeAILab, SpecForge) or ``layers.0.hidden_norm`` (ModelOpt); vLLM's and SGLang's fields
eagle          ``fc.weight`` and ``layers.0.*`` without norms around it
deepseek       ``model.layers.{N}.*`` behind the target's N layers with ``eh_proj`` (DeepSeek-V3, GLM's nextn layers)
mimo           ``model.mtp_layers.{m}.*``
=============  =========================================================================================================

**Two conventions of auxiliary layer ids.** ``input``: id i is the state that enters layer i (vLLM, Speculators,
Pilotfish). ``output``: id i is the state that leaves layer i, one less for the same state (SpecForge, SGLang,
ModelOpt). A file does not say which. The rule here goes by the place, for each place has one reader: ids at the top
level, which vLLM reads and Speculators writes, are ``input``; ids in ``eagle_config``, which SGLang reads, are
``output``. The caller can overrule it. Without ids the states are those that enter layers 2, N // 2 and N - 3, as all
of them have it.

None of the other projects' heads has a row 0 (``first_row``): in training, row j >= 1 was the first with a state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pilotfish.errors import CheckpointError, ConfigError, UnsupportedModelError
from pilotfish.models.config import ModelConfig
from pilotfish.models.heads.config import FORMAT, HeadConfig, head_tensors
from pilotfish.models.heads.parts import check_token_ids
from pilotfish.models.llama import Llama
from pilotfish.models.weights.safetensors_ import SafetensorsMapping

__all__ = ["AuxConvention", "Layout", "default_aux_layers", "read_layout"]

AuxConvention = Literal["input", "output"]
"""What an auxiliary layer's id counts: the state that enters that layer, or the one that leaves it."""

_CLASS = re.compile(r"(?:Eagle3?|MTP)?(Llama|Qwen2|Qwen3|MiMo)(?:Eagle3?|MTP)?ForCausalLM(?:Eagle3?|NextN|MTP)?")
_BASE_CLASSES: Mapping[str, str] = {"MiMo": "Qwen2ForCausalLM"}
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|t2d|d2t")

_DEEPSEEK_NAMES: Mapping[str, tuple[str, ...]] = {
    "norm.weight": ("shared_head.norm.weight", "final_layernorm.weight"),
}
_MIMO_NAMES: Mapping[str, tuple[str, ...]] = {
    "enorm.weight": ("token_layernorm.weight",),
    "hnorm.weight": ("hidden_layernorm.weight",),
    "eh_proj.weight": ("input_proj.weight",),
    "norm.weight": ("final_layernorm.weight",),
}
"""Pilotfish's name of a module's tensor -> the names that it has in that layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checkpoint, understood.

    Attributes:
        name: of the layout, for messages.
        config: the contract. Of other projects' files it is not known yet whether stored copies differ from the
            target's tensors; ``own_embedding`` and ``own_lm_head`` are then False.
        sources: Pilotfish's name of a tensor -> the file's.
        copies: ``embed_tokens.weight`` and ``lm_head.weight`` -> the file's name of what may be a copy of the target's.
        ignored: other tensors that are known and need not be read.
        token_ids: int64 [D]; None: the whole vocabulary.
    """

    name: str
    config: HeadConfig
    sources: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    token_ids: Tensor | None = None


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose input states EAGLE-3 heads read where nothing else is said: early, middle, late."""
    return 2, num_layers // 2, num_layers - 3


def read_layout(
    raw: Mapping[str, Any],
    stored: SafetensorsMapping,
    folder: Path,
    target: ModelConfig,
    aux_convention: AuxConvention | None = None,
) -> Layout:
    """Tell which layout a checkpoint has, and read it.

    Args:
        raw: the content of ``config.json``.
        stored: the tensors.
        folder: where they are, for messages.
        target: the model that the head is to work for, which says what some layouts leave out.
        aux_convention: overrules the layout's rule for auxiliary layer ids.

    Raises:
        UnsupportedModelError: a layout or an option that Pilotfish does not know.
        CheckpointError: a config that is incomplete or contradicts the tensors.
    """
    where = str(folder / "config.json")
    reader = _Reader(raw, stored, where, target, aux_convention)
    try:
        if raw.get("format") == FORMAT:
            return reader.own()
        if "speculators_model_type" in raw:
            return reader.speculators()
        names = {name.removeprefix("model.") for name in stored}
        if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
            return reader.eagle3(raw, "eagle3")
        if "fc.weight" in names:
            return reader.eagle()
        if any(name.endswith(".eh_proj.weight") for name in names):
            return reader.deepseek()
        if "mtp_layers.0.input_proj.weight" in names:
            return reader.mimo()
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    raise UnsupportedModelError(
        f"{folder}: holds no draft head of a known layout. Known are Pilotfish's own, EAGLE (fc, layers.0), EAGLE-3 "
        "(midlayer), Speculators' eagle3, DeepSeek's MTP layers (model.layers.N.eh_proj) and MiMo's (model.mtp_layers)"
    )


class _Reader:
    def __init__(
        self,
        raw: Mapping[str, Any],
        stored: SafetensorsMapping,
        where: str,
        target: ModelConfig,
        aux_convention: AuxConvention | None,
    ) -> None:
        self._raw = raw
        self._stored = stored
        self._where = where
        self._target = target
        self._aux_convention = aux_convention
        # vLLM's and SGLang's classes take the tensors with and without this prefix.
        self._plain = {name.removeprefix("model."): name for name in stored}

    def own(self) -> Layout:
        config = HeadConfig.from_json(self._raw, self._where)
        d, v = config.draft_vocab_size, config.shape.vocab_size
        token_ids = self._stored.get("token_ids")
        return Layout(
            name="pilotfish",
            config=config,
            sources={name: name for name in head_tensors(config)},
            ignored=frozenset({"token_ids"}),
            token_ids=check_token_ids(token_ids, d, v),
        )

    def eagle(self) -> Layout:
        shape = self._shape(self._raw)
        config = HeadConfig(
            kind="eagle",
            shape=shape,
            target_hidden_size=shape.hidden_size,
            draft_vocab_size=shape.vocab_size,
            first_row=False,
            # The file knows better than the config's field "bias", which means True where it is missing.
            fc_bias="fc.bias" in self._plain,
        )
        return self._finish("eagle", config, {"layer": "layers.0"})

    def speculators(self) -> Layout:
        kind = self._raw["speculators_model_type"]
        if kind != "eagle3":
            raise UnsupportedModelError(f"{self._where}: speculators_model_type={kind!r}: only 'eagle3' is supported")
        flag = self._raw.get("norm_before_residual")
        if not isinstance(flag, bool):
            raise CheckpointError(
                f"{self._where}: norm_before_residual={flag!r}: must be true or false; readers of this layout differ "
                "about what it means to leave it out"
            )
        inner = self._raw.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise CheckpointError(f"{self._where}: transformer_layer_config={inner!r}: must be an object")
        return self.eagle3(inner, "speculators")

    def eagle3(self, shape_source: Mapping[str, Any], name: str) -> Layout:
        shape = self._shape(shape_source)
        for option in ("norm_before_fc", "attention_bias", "parallel_drafting"):
            if self._option(option):
                raise UnsupportedModelError(f"{self._where}: {option}={self._option(option)!r} is not supported")
        aux_layers = self._aux_layers()
        token_ids, d = self._draft_vocabulary(shape.vocab_size)
        config = HeadConfig(
            kind="eagle3",
            shape=shape,
            target_hidden_size=self._int("target_hidden_size", shape.hidden_size),
            draft_vocab_size=d,
            aux_layers=aux_layers,
            recycles="post_norm" if self._option("norm_output") else "pre_norm",
            first_row=False,
            fc_norm=bool(self._option("fc_norm")) or "fc_norm.0.weight" in self._plain,
            norm_before_residual=bool(self._option("norm_before_residual")),
        )
        layer = "midlayer" if any(key.startswith("midlayer.") for key in self._plain) else "layers.0"
        prefixes = {"layer": layer, "hidden_norm": f"{layer}.hidden_norm"}
        # SGLang builds an fc even where it is bypassed, so that a file may have one that does nothing.
        ignored = () if aux_layers else ("fc.weight",)
        return self._finish(name, config, prefixes, token_ids, ignored)

    def deepseek(self) -> Layout:
        first = self._target.num_layers
        count = 0
        while f"layers.{first + count}.eh_proj.weight" in self._plain:
            count += 1
        if not count:
            found = next(name for name in self._plain if name.endswith(".eh_proj.weight"))
            raise CheckpointError(
                f"{self._where}: the MTP layers must follow the target's num_layers={first}, and the file has {found}"
            )
        promised = self._raw.get("num_nextn_predict_layers") or self._raw.get("num_mtp_layers") or count
        if promised != count:
            raise CheckpointError(
                f"{self._where}: num_nextn_predict_layers={promised!r}, but the file has {count} MTP layers behind the "
                f"target's {first}"
            )
        config = self._mtp_config(
            count,
            hidden_first=bool(self._raw.get("mtp_hidden_states_first")),
            post_norm=bool(self._raw.get("chain_hidden_post_norm", True)),
        )
        return self._finish_mtp("deepseek", config, [f"layers.{first + m}" for m in range(count)], _DEEPSEEK_NAMES)

    def mimo(self) -> Layout:
        count = 0
        while f"mtp_layers.{count}.input_proj.weight" in self._plain:
            count += 1
        config = self._mtp_config(count, hidden_first=True, post_norm=True)
        return self._finish_mtp("mimo", config, [f"mtp_layers.{m}" for m in range(count)], _MIMO_NAMES)

    def _mtp_config(self, num_modules: int, *, hidden_first: bool, post_norm: bool) -> HeadConfig:
        shape = replace(self._shape(self._raw), num_layers=num_modules)
        return HeadConfig(
            kind="mtp",
            shape=shape,
            target_hidden_size=shape.hidden_size,
            draft_vocab_size=shape.vocab_size,
            hidden_first=hidden_first,
            recycles="post_norm" if post_norm else "pre_norm",
            first_row=False,
        )

    def _shape(self, source: Mapping[str, Any]) -> ModelConfig:
        """The decoder layer's shape. Heads name classes of their own for the layers of well-known models."""
        classes = [_CLASS.fullmatch(str(name)) for name in source.get("architectures") or ()]
        known = [match[1] for match in classes if match]
        values = dict(source)
        if known:
            values["architectures"] = [_BASE_CLASSES.get(known[0], f"{known[0]}ForCausalLM")]
        shape = ModelConfig.from_hf(values, self._where)
        # What the file says is how long the training's texts were; no rotary frequency hangs on it.
        return replace(shape, max_position_embeddings=self._target.max_position_embeddings, num_mtp_layers=0)

    def _option(self, name: str) -> Any:
        """An option of EAGLE-3, which may be at the top level or in ``eagle_config``."""
        nested = self._raw.get("eagle_config") or {}
        return nested[name] if name in nested else self._raw.get(name)

    def _aux_layers(self) -> tuple[int, ...]:
        nested = self._raw.get("eagle_config") or {}
        if self._option("use_aux_hidden_state") is False:
            return ()
        field = "eagle_aux_hidden_state_layer_ids"
        places: list[tuple[AuxConvention, Any]] = [("input", self._raw.get(field)), ("output", nested.get(field))]
        read = {}
        for rule, ids in places:
            if not ids:
                continue
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise CheckpointError(f"{self._where}: {field}={ids!r}: must be a list of layer ids")
            convention = self._aux_convention or rule
            read[rule] = tuple(i + (convention == "output") for i in ids)
        if len(set(read.values())) > 1:
            raise CheckpointError(
                f"{self._where}: {field}={self._raw[field]} at the top level (read by those who count what enters a "
                f"layer) and {nested[field]} in eagle_config (by those who count what leaves it) are different states"
            )
        return next(iter(read.values()), None) or default_aux_layers(self._target.num_layers)

    def _draft_vocabulary(self, vocab_size: int) -> tuple[Tensor | None, int]:
        """``d2t`` holds for each draft id what is to be added to get the target's: (ids, D)."""
        d = self._int("draft_vocab_size", vocab_size)
        if "d2t" not in self._plain:
            return check_token_ids(None, d, vocab_size), d
        offsets = self._stored[self._plain["d2t"]].to(torch.int64)
        if offsets.shape != (d,):
            raise CheckpointError(f"{self._where}: draft_vocab_size={d}, but d2t has shape {list(offsets.shape)}")
        ids = torch.arange(d) + offsets
        if "t2d" in self._plain and not torch.equal(self._stored[self._plain["t2d"]].bool().nonzero().flatten(), ids):
            raise CheckpointError(f"{self._where}: the tensors d2t and t2d name different tokens")
        return check_token_ids(ids, d, vocab_size), d

    def _int(self, name: str, default: int) -> int:
        value = self._raw.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self._where}: {name}={value!r}: must be an integer of at least 1")
        return value

    def _file_name(self, *plain: str) -> str:
        """The file's name of the first of these tensors that is there; else of the first, to be missed later."""
        return next((self._plain[name] for name in plain if name in self._plain), plain[0])

    def _finish(
        self,
        name: str,
        config: HeadConfig,
        renamed: Mapping[str, str],
        token_ids: Tensor | None = None,
        ignored: Sequence[str] = (),
    ) -> Layout:
        """The layout of an EAGLE head, most of whose tensors have Pilotfish's names behind another prefix."""
        sources = {}
        for own in head_tensors(config):
            prefix = next((prefix for prefix in renamed if own.startswith(f"{prefix}.")), "")
            sources[own] = self._file_name(renamed.get(prefix, "") + own[len(prefix) :])
        copies = ("embed_tokens.weight", "lm_head.weight")
        return Layout(
            name=name,
            config=config,
            sources=sources,
            copies={own: self._plain[own] for own in copies if own in self._plain},
            ignored=frozenset(
                self._plain[plain] for plain in self._plain if plain in ignored or _IGNORED.fullmatch(plain)
            ),
            token_ids=token_ids,
        )

    def _finish_mtp(
        self, name: str, config: HeadConfig, prefixes: Sequence[str], names: Mapping[str, tuple[str, ...]]
    ) -> Layout:
        """The layout of MTP modules, alone in their file or behind the target's own tensors."""
        sources = {}
        for own in head_tensors(config):
            _, m, part = own.split(".", 2)
            candidates = names.get(part, (part.removeprefix("layer."),))
            sources[own] = self._file_name(*(f"{prefixes[int(m)]}.{candidate}" for candidate in candidates))
        copies: dict[str, str] = {}
        repeated = []
        for own, part in (
            ("embed_tokens.weight", "embed_tokens.weight"),
            ("lm_head.weight", "shared_head.head.weight"),
        ):
            there = [self._plain[f"{prefix}.{part}"] for prefix in prefixes if f"{prefix}.{part}" in self._plain]
            if not there:
                continue
            copies[own], *others = there
            repeated += others
            for other in others:
                if not torch.equal(self._stored[other], self._stored[copies[own]]):
                    raise UnsupportedModelError(
                        f"{self._where}: the tensors {copies[own]} and {other} differ: the modules must share one"
                    )
        of_target = {*Llama.expected_tensors(self._target), "lm_head.weight"}
        known = [file for file in self._stored if file in of_target or _IGNORED.fullmatch(file)]
        return Layout(name=name, config=config, sources=sources, copies=copies, ignored=frozenset([*repeated, *known]))
