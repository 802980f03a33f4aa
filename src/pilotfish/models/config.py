"""What a model is made of: the numbers of a Hugging Face ``config.json``, checked and frozen.

This module knows the keys of ``config.json`` as transformers 4 and 5 write them. It reads no files and imports no
torch. Whatever changes the computation and is not known here is refused: a model that silently ignores a field of its
config gives plausible, wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from pilotfish.errors import CheckpointError, UnsupportedModelError

__all__ = ["Architecture", "LinearRopeScaling", "Llama3RopeScaling", "ModelConfig", "RopeScaling", "read_token_ids"]

Architecture = Literal["llama", "qwen2", "qwen3"]

_CAUSAL_LM_CLASSES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "qwen2",  # with MTP layers behind it
}

_DEFAULT_MAX_POSITIONS: Mapping[Architecture, int] = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
"""What transformers assumes where ``max_position_embeddings`` is absent."""

_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_RMS_NORM_EPS = 1e-6
_QWEN3_DEFAULT_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Position interpolation: every rotary frequency is divided by ``factor`` (Chen et al., arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling: low frequencies are divided by ``factor``, high ones kept, those between interpolated.

    Attributes:
        factor: divisor of the low frequencies.
        low_freq_factor: wavelengths above ``original_max_position_embeddings / low_freq_factor`` are low frequencies.
        high_freq_factor: wavelengths below ``original_max_position_embeddings / high_freq_factor`` are high ones.
        original_max_position_embeddings: context length of the pretraining, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearRopeScaling | Llama3RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    Attributes:
        architecture: which model file runs it.
        vocab_size: rows of the embedding; at least the tokenizer's size.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: decoder layers.
        num_q_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_q_heads``.
        head_dim: width of a head. ``num_q_heads * head_dim`` need not be ``hidden_size``.
        rms_norm_eps: added to the mean square in every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None for plain rotary embeddings.
        max_position_embeddings: context length, in tokens.
        tie_word_embeddings: the output head is the embedding; there is no ``lm_head.weight``.
        attention_bias: q, k and v projections have a bias (Qwen2).
        eos_token_ids: tokens that end a completion, in the checkpoint's order; may be empty.
        bos_token_id: the token a sequence begins with, or None.
        num_mtp_layers: multi-token prediction modules that the checkpoint has behind its layers. No part of the model:
            :func:`pilotfish.models.heads.load_head` loads them.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_mtp_layers: int = 0

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], where: str, generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the parsed ``config.json`` of a checkpoint.

        Args:
            config: the file's JSON object, as transformers 4.x or 5.x writes it.
            where: the file's name, for messages.
            generation_config: the JSON object of ``generation_config.json``; its EOS and BOS ids win over the config's.

        Raises:
            UnsupportedModelError: an architecture or a field's value that Pilotfish does not compute.
            CheckpointError: a field that is missing or is not a number of the right kind.
        """
        architecture = _architecture(config, where)
        _refuse_unknown_computation(config, architecture, where)
        hidden_size = _positive_int(config, "hidden_size", where)
        num_q_heads = _positive_int(config, "num_attention_heads", where)
        num_kv_heads = _positive_int(config, "num_key_value_heads", where, default=num_q_heads)
        if num_q_heads % num_kv_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads={num_q_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
            )
        rope_theta, rope_scaling = _rope(config, where)
        return cls(
            architecture=architecture,
            vocab_size=_positive_int(config, "vocab_size", where),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size", where),
            num_layers=_positive_int(config, "num_hidden_layers", where),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, architecture, hidden_size, num_q_heads, where),
            rms_norm_eps=_positive_float(config, "rms_norm_eps", where, default=_DEFAULT_RMS_NORM_EPS),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_positive_int(
                config, "max_position_embeddings", where, default=_DEFAULT_MAX_POSITIONS[architecture]
            ),
            tie_word_embeddings=_flag(config, "tie_word_embeddings", where),
            attention_bias=architecture == "qwen2",
            eos_token_ids=_first_token_ids("eos_token_id", generation_config, config, where),
            bos_token_id=next(iter(_first_token_ids("bos_token_id", generation_config, config, where)), None),
            num_mtp_layers=_num_mtp_layers(config, where),
        )

    def to_hf(self) -> dict[str, Any]:
        """The same numbers as a Hugging Face ``config.json`` has them, without MTP layers; :meth:`from_hf` reads it."""
        names = {architecture: name for name, architecture in _CAUSAL_LM_CLASSES.items()}
        match self.rope_scaling:
            case None:
                scaling = None
            case LinearRopeScaling(factor=factor):
                scaling = {"rope_type": "linear", "factor": factor}
            case Llama3RopeScaling() as llama3:
                scaling = {"rope_type": "llama3", **asdict(llama3)}
        return {
            "architectures": [names[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": list(self.eos_token_ids) or None,
            "bos_token_id": self.bos_token_id,
        }


def read_token_ids(value: object, field: str, where: str) -> tuple[int, ...]:
    """Token ids written as nothing, one id or a list of ids.

    Raises:
        CheckpointError: ``value`` is none of these.
    """
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for token_id in values:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise CheckpointError(f"{where}: {field}={value!r}: must be a token id (an integer >= 0) or a list of them")
    return tuple(dict.fromkeys(values))


def _first_token_ids(
    field: str, generation_config: Mapping[str, Any] | None, config: Mapping[str, Any], where: str
) -> tuple[int, ...]:
    for source in (generation_config or {}, config):
        ids = read_token_ids(source.get(field), field, where)
        if ids:
            return ids
    return ()


def _architecture(config: Mapping[str, Any], where: str) -> Architecture:
    supported = ", ".join(_CAUSAL_LM_CLASSES)
    classes = config.get("architectures")
    if classes:
        names = classes if isinstance(classes, list) else [classes]
        for name in names:
            if name in _CAUSAL_LM_CLASSES:
                return _CAUSAL_LM_CLASSES[name]
        raise UnsupportedModelError(
            f"{where}: architecture {', '.join(map(str, names))} is not supported; supported are {supported}"
        )
    model_type = config.get("model_type")
    for known in get_args(Architecture):
        if model_type == known:
            return known  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{where}: model_type={model_type!r} and no 'architectures' is not a supported model; supported are {supported}"
    )


def _refuse_unknown_computation(config: Mapping[str, Any], architecture: Architecture, where: str) -> None:
    """Refuse every known field that would change the forward pass in a way that the model files do not compute."""

    def refuse(field: str, allowed: str) -> None:
        raise UnsupportedModelError(
            f"{where}: {field}={config[field]!r} is not supported for {architecture}: {allowed}"
        )

    if config.get("quantization_config"):
        refuse("quantization_config", "use the unquantised checkpoint or a GGUF file of the model")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "only 'silu' is")
    if config.get("mlp_bias"):
        refuse("mlp_bias", "only MLPs without a bias are")
    if architecture != "qwen2" and config.get("attention_bias"):
        # In llama and qwen3 the flag gives a bias to the output projection too.
        refuse("attention_bias", "only attention without biases is")
    # Qwen keeps sliding_window beside use_sliding_window=false; there the flag or the layer types decide.
    if config.get("use_sliding_window"):
        refuse("use_sliding_window", "only full attention is; set it to false to attend to the whole context")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        refuse("layer_types", "every layer must be 'full_attention'")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", "only 1.0 (the whole head is rotated) is")


def _num_mtp_layers(config: Mapping[str, Any], where: str) -> int:
    for field in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config.get(field):
            return _positive_int(config, field, where)
    return 0


def _head_dim(
    config: Mapping[str, Any], architecture: Architecture, hidden_size: int, num_q_heads: int, where: str
) -> int:
    # transformers gives Qwen2 no head_dim of its own: a value in the file is honoured by getattr(config, "head_dim").
    if config.get("head_dim") is not None:
        head_dim = _positive_int(config, "head_dim", where)
    elif architecture == "qwen3":
        head_dim = _QWEN3_DEFAULT_HEAD_DIM
    elif hidden_size % num_q_heads == 0:
        head_dim = hidden_size // num_q_heads
    else:
        raise CheckpointError(
            f"{where}: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_q_heads} "
            "and there is no head_dim"
        )
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim={head_dim}: must be even, rotary embeddings rotate pairs")
    return head_dim


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embeddings.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``; transformers 5 writes both into ``rope_parameters``.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    params = config.get(field) or {}
    if not isinstance(params, Mapping):
        raise CheckpointError(f"{where}: {field}={params!r}: must be an object")
    theta_source = params if params.get("rope_theta") is not None else config
    theta = _positive_float(theta_source, "rope_theta", where, default=_DEFAULT_ROPE_THETA)
    # Llama 3.1's first files say "type", later ones "rope_type", some both.
    kind = params.get("rope_type", params.get("type", "default"))
    if params.get("partial_rotary_factor", 1.0) != 1.0 or any(isinstance(value, Mapping) for value in params.values()):
        raise UnsupportedModelError(
            f"{where}: {field}={dict(params)!r} is not supported: one set of rotary parameters for all layers, "
            "with partial_rotary_factor 1.0, is"
        )
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRopeScaling(factor=_positive_float(params, "factor", where))
    if kind == "llama3":
        return theta, Llama3RopeScaling(
            factor=_positive_float(params, "factor", where),
            low_freq_factor=_positive_float(params, "low_freq_factor", where),
            high_freq_factor=_positive_float(params, "high_freq_factor", where),
            original_max_position_embeddings=_positive_int(params, "original_max_position_embeddings", where),
        )
    raise UnsupportedModelError(
        f"{where}: {field} of type {kind!r} is not supported; supported are 'default', 'linear' and 'llama3'"
    )


def _positive_int(source: Mapping[str, Any], field: str, where: str, default: int | None = None) -> int:
    value = source.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where}: {field}={value!r}: must be an integer of at least 1")
    return value


def _positive_float(source: Mapping[str, Any], field: str, where: str, default: float | None = None) -> float:
    value = source.get(field)
    value = default if value is None else value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return float(value)
    raise CheckpointError(f"{where}: {field}={value!r}: must be a finite number above 0")


def _flag(source: Mapping[str, Any], field: str, where: str) -> bool:
    value = source.get(field)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: {field}={value!r}: must be true or false")
    return bool(value)
