"""A draft head's contract: what goes in, what comes out, what it recycles, and which target it was made for.

The same object describes heads of other projects, whose files say it in other words or not at all (see
:mod:`pilotfish.models.heads.layouts`). In Pilotfish's own files it is ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from pilotfish.errors import CheckpointError, ConfigError
from pilotfish.models.config import ModelConfig
from pilotfish.models.decoder_layer import layer_tensors

__all__ = ["FORMAT", "FORMAT_VERSION", "HeadConfig", "HeadKind", "Recycled", "TargetStamp", "head_tensors"]

HeadKind = Literal["mtp", "eagle", "eagle3"]

Recycled = Literal["post_norm", "pre_norm"]

FORMAT = "pilotfish-head"
"""Value of the key ``format`` in a ``config.json`` that Pilotfish wrote."""

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStamp:
    """Which model a head was trained for.

    Attributes:
        name: what the user called it; for people, and compared only where there is no ``embedding_sha256``.
        hidden_size: width of its states.
        num_layers: its decoder layers.
        vocab_size: rows of its embedding.
        embedding_sha256: of the embedding's bytes, rounded to bfloat16. None: not known.
        chat_template_sha256: of the chat template's text. None: it has none, or not known.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    embedding_sha256: str | None
    chat_template_sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Everything about a head that its tensors do not say.

    Feature g_j is the target's state at position j. A head's row j takes the embedding of token j and the state of
    position j - 1, and predicts token j + 1.

    Attributes:
        kind: ``mtp``: DeepSeek's module, with norms; ``eagle``: EAGLE-1 and 2, without; ``eagle3``.
        shape: of the head's decoder layer: architecture, sizes, rope. ``vocab_size`` is the target's; ``num_layers``
            is the number of modules in the chain (1 but for ``mtp``).
        target_hidden_size: width of one of the target's states.
        draft_vocab_size: D, rows of the head's logits; less than ``shape.vocab_size``: a slice of the target's ids.
        aux_layers: ``eagle3``: the states that enter these layers of the target go in side by side (ids as in
            :class:`pilotfish.models.AuxStates`). (): the state after the target's final norm goes in.
        hidden_first: order of the concatenation with the embedding; False: [embedding; hidden].
        recycles: which of the head's own states the next drafted row reads: the one that its logits are computed of,
            after the final norm, or the one before that norm. ``eagle`` has no final norm: ``post_norm``.
        first_row: whether there is a row 0, which reads a state of zeros.
        fc_bias: ``eagle``: ``fc`` has a bias.
        fc_norm: ``eagle3``: each layer's state is normed before ``fc`` (EAGLE-3.1).
        norm_before_residual: ``eagle3``: the residual stream starts from the normed state.
        own_embedding: has an embedding of its own, [V, H]; False: the target's.
        own_lm_head: has an output head of its own, [D, H]; False: those rows of the target's.
        target: None: a checkpoint of another project, which does not say.
        training: free-form summary of how it came about.

    Raises:
        ConfigError: a combination that cannot be.
    """

    kind: HeadKind
    shape: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] = ()
    hidden_first: bool = False
    recycles: Recycled = "post_norm"
    first_row: bool = True
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    own_embedding: bool = False
    own_lm_head: bool = False
    target: TargetStamp | None = None
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in (("kind", get_args(HeadKind)), ("recycles", get_args(Recycled))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(choices)}")
        if not 1 <= self.draft_vocab_size <= self.shape.vocab_size:
            raise ConfigError(
                f"draft_vocab_size={self.draft_vocab_size}: must be from 1 to the target's {self.shape.vocab_size}"
            )
        if len(set(self.aux_layers)) != len(self.aux_layers) or any(layer < 1 for layer in self.aux_layers):
            raise ConfigError(f"aux_layers={list(self.aux_layers)}: must be different layer ids of at least 1")
        if self.kind != "mtp" and self.shape.num_layers != 1:
            raise ConfigError(f"shape.num_layers={self.shape.num_layers}: a head of kind {self.kind} has one layer")
        kinds = {"fc_bias": "eagle", "aux_layers": "eagle3", "fc_norm": "eagle3", "norm_before_residual": "eagle3"}
        for name, kind in kinds.items():
            if getattr(self, name) and self.kind != kind:
                raise ConfigError(f"{name}={getattr(self, name)!r} is for heads of kind {kind}, and kind={self.kind!r}")
        if self.fc_norm and not self.aux_layers:
            raise ConfigError("fc_norm=True needs aux_layers: without them there is no fc")
        if self.kind == "eagle" and self.recycles != "post_norm":
            raise ConfigError(f"recycles={self.recycles!r}: a head of kind eagle has no final norm, so post_norm it is")
        if not self.aux_layers and self.target_hidden_size != self.shape.hidden_size:
            raise ConfigError(
                f"target_hidden_size={self.target_hidden_size} and shape.hidden_size={self.shape.hidden_size}: must be "
                "equal, for only the fc of aux_layers changes the width"
            )

    @property
    def num_modules(self) -> int:
        """Modules in the chain, each with a KV layer of its own."""
        return self.shape.num_layers

    @property
    def feature_size(self) -> int:
        """F, the width of what the target's runner hands over for each position."""
        return self.target_hidden_size * max(1, len(self.aux_layers))

    def to_json(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        content: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSION}
        for f in fields(self):
            content[f.name] = getattr(self, f.name)
        content["shape"] = self.shape.to_hf()
        content["aux_layers"] = list(self.aux_layers)
        content["target"] = None if self.target is None else asdict(self.target)
        content["training"] = dict(self.training)
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> HeadConfig:
        """The inverse of :meth:`to_json`.

        Raises:
            CheckpointError: a version that is newer, a key that is missing, unknown or of the wrong type.
        """
        if content.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{where}: version={content.get('version')!r}: this Pilotfish reads version {FORMAT_VERSION}"
            )
        values = {name: value for name, value in content.items() if name not in ("format", "version")}
        _check_keys(cls, values, where)
        values["shape"] = ModelConfig.from_hf(_object(values, "shape", where), f"{where}: shape")
        values["aux_layers"] = tuple(values["aux_layers"])
        if values["target"] is not None:
            target = _object(values, "target", where)
            _check_keys(TargetStamp, target, f"{where}: target")
            values["target"] = TargetStamp(**target)
        values["training"] = _object(values, "training", where) if "training" in values else {}
        try:
            return cls(**values)
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}") from error


def head_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's own tensors, in Pilotfish's own layout. All of them can be trained.

    What it shares with the target is not among them, nor is ``token_ids``, the int64 [D] list of the draft vocabulary.
    """
    shape = config.shape
    h = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (shape.vocab_size, h)
    match config.kind:
        case "mtp":
            for m in range(config.num_modules):
                prefix = f"modules.{m}"
                shapes |= {f"{prefix}.enorm.weight": (h,), f"{prefix}.hnorm.weight": (h,)}
                shapes[f"{prefix}.eh_proj.weight"] = (h, 2 * h)
                shapes |= layer_tensors(shape, f"{prefix}.layer")
                shapes[f"{prefix}.norm.weight"] = (h,)
        case "eagle":
            shapes["fc.weight"] = (h, 2 * h)
            if config.fc_bias:
                shapes["fc.bias"] = (h,)
            shapes |= layer_tensors(shape, "layer", input_norm=False)
        case "eagle3":
            if config.aux_layers:
                shapes["fc.weight"] = (h, config.feature_size)
            if config.fc_norm:
                shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.aux_layers))}
            shapes["hidden_norm.weight"] = (h,)
            shapes |= layer_tensors(shape, "layer", attention_inputs=2 * h)
            shapes["norm.weight"] = (h,)
    if config.own_lm_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, h)
    return shapes


def _check_keys(cls: type[HeadConfig] | type[TargetStamp], values: Mapping[str, Any], where: str) -> None:
    known = {f.name: f for f in fields(cls)}
    for name in values:
        if name not in known:
            raise CheckpointError(f"{where}: unknown key {name!r}; known are {', '.join(known)}")
    for name, f in known.items():
        if name not in values:
            if name == "training":  # says nothing of what the head computes
                continue
            raise CheckpointError(f"{where}: key {name!r} is missing; a {FORMAT} says all that it computes")
        allowed = _JSON_TYPES.get(str(f.type))
        if allowed is not None and not _is_one_of(values[name], allowed):
            raise CheckpointError(f"{where}: {name}={values[name]!r}: must be {f.type}")
    for layer in values.get("aux_layers", ()):
        if not _is_one_of(layer, (int,)):
            raise CheckpointError(f"{where}: aux_layers={values['aux_layers']!r}: must be a list of layer ids")


_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
    "tuple[int, ...]": (list,),
}
"""What JSON gives for a field of that annotation; the others are checked where they are used."""


def _is_one_of(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _object(values: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = values[name]
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {name}={value!r}: must be an object")
    return value
