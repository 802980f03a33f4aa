"""The engine's settings: frozen, typed, checked where they are written.

A setting that is None is decided by :func:`pilotfish.engine.config.resolve` from the model and the machine; the
resolved settings are logged, each with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pilotfish.errors import ConfigError

__all__ = [
    "Auto",
    "BackendName",
    "DTypeName",
    "DraftModel",
    "Eagle",
    "EngineConfig",
    "HeadSpeculation",
    "IsaName",
    "LogprobsMode",
    "Mtp",
    "Ngram",
    "Speculation",
    "SpeculationChoice",
    "VerifyRule",
]

DTypeName = Literal["bfloat16", "float32"]
BackendName = Literal["auto", "native", "torch"]
IsaName = Literal["auto", "avx2", "avx512", "avx512_bf16", "amx"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

VerifyRule = Literal["coupled", "rejection", "threshold"]
"""How drafts are verified. ``coupled`` and ``rejection`` are exact; ``threshold`` is lossy, for research."""

MAX_NUM_DRAFTS = 64
"""Most drafts that a step may propose for one sequence."""

MAX_NGRAM = 32
"""Longest run of tokens that may be looked up: the index of a sequence grows with the square of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What all speculation schemes have in common. A scheme is a subclass and the module of its name.

    Attributes:
        num_drafts: most tokens proposed a step and sequence.
        verify: ``coupled`` (default): target and draft share each position's noise, a draft is kept where it equals the
            target's token, and output is that of plain decoding with the same seed. ``rejection``: the classical rule,
            which keeps the distribution but not the tokens of a seed. ``threshold``: LOSSY, keeps drafts that have at
            least ``threshold`` probability under the target; output is not the target's.
        threshold: see ``verify``.
        decode_only_batches: propose only in steps in which no prompt is computed.
    """

    scheme: ClassVar[str] = ""
    _least_drafts: ClassVar[int] = 1

    num_drafts: int = 4
    verify: VerifyRule = "coupled"
    threshold: float = 0.3
    decode_only_batches: bool = False

    def __post_init__(self) -> None:
        _check_integer("num_drafts", self.num_drafts, self._least_drafts, MAX_NUM_DRAFTS)
        _check_choice("verify", self.verify, VerifyRule)
        _check_fraction("threshold", self.threshold)
        _check_bool("decode_only_batches", self.decode_only_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel(Speculation):
    """A small LLM drafts: another checkpoint with the target's tokenizer, or the target's own first layers.

    Attributes:
        model: folder, ``.gguf`` file, built-in name or Hugging Face id of the draft.
        layers: instead of ``model``: the target's first so many layers, its final norm and its head.
    """

    scheme: ClassVar[str] = "draft"

    model: str | None = None
    layers: int | None = None

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        if (self.model is None) == (self.layers is None):
            raise ConfigError(
                f"model={self.model!r} and layers={self.layers!r}: a draft is either another model or the target's "
                "first layers. Set exactly one of them."
            )
        if self.model is not None:
            _check_name("model", self.model, "a folder, a .gguf file, a built-in name or a Hugging Face id")
        if self.layers is not None:
            _check_integer("layers", self.layers, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ngram(Speculation):
    """Prompt lookup: what followed the last tokens when they occurred before, in prompt or output.

    Attributes:
        max_ngram: longest run of last tokens that is looked up, at most 32; the longest that is found counts.
        min_ngram: shortest one.
    """

    scheme: ClassVar[str] = "ngram"

    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        _check_integer("min_ngram", self.min_ngram, 1, MAX_NGRAM)
        _check_integer("max_ngram", self.max_ngram, 1, MAX_NGRAM)
        if self.min_ngram > self.max_ngram:
            raise ConfigError(
                f"min_ngram={self.min_ngram}: must be at most max_ngram={self.max_ngram}; raise max_ngram or lower "
                "min_ngram"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpeculation(Speculation):
    """What the schemes of draft heads have in common: a layer that reads the target's hidden states.

    Attributes:
        head: folder or Hugging Face id of the head. None: the model's own, which lies in the model's folder as
            ``head`` or ``mtp``, or is the MTP layers in the model's own files, or ships for this model.
        allow_mismatch: take a head that was trained for a target of this shape but with other weights or another chat
            template. Output does not change; fewer drafts are accepted.
        p_min: drafting stops, before ``num_drafts``, behind the draft at which the head's joint probability of a
            proposal falls below this: what is unlikely to be kept is not worth its time. 0: never.
        lookup: where the last so many tokens occurred before, in prompt or output, what followed them is proposed in
            place of the head's drafts (as :class:`Ngram` does). 0: never.
    """

    head: str | None = None
    allow_mismatch: bool = False
    num_drafts: int = 6
    p_min: float = 0.15
    lookup: int = 2

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        if self.head is not None:
            _check_name("head", self.head, "a folder or a Hugging Face id, or None for the model's own head")
        _check_bool("allow_mismatch", self.allow_mismatch)
        _check_integer("lookup", self.lookup, 0, MAX_NGRAM)
        _check_least_probability("p_min", self.p_min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp(HeadSpeculation):
    """A multi-token-prediction head drafts, in DeepSeek's form: one of its own, or a chain of several."""

    scheme: ClassVar[str] = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle(HeadSpeculation):
    """An EAGLE-1 or EAGLE-3 head drafts a chain."""

    scheme: ClassVar[str] = "eagle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(Speculation):
    """A head by its kind: :class:`Mtp` or :class:`Eagle`; without one :class:`Ngram`.

    The settings of heads are those of :class:`HeadSpeculation`, and an error where no head is found.

    Attributes:
        num_drafts: 0: as many as the scheme that is taken proposes by itself.
        head: must be there and fit. None: the model's own if one ships with the package or lies in the model's folder,
            and fits.
        allow_mismatch: of a head. None: not given, as the next two.
        p_min: of a head.
        lookup: of a head.
    """

    scheme: ClassVar[str] = "auto"
    _least_drafts: ClassVar[int] = 0

    num_drafts: int = 0
    head: str | None = None
    allow_mismatch: bool | None = None
    p_min: float | None = None
    lookup: int | None = None

    def __post_init__(self) -> None:
        Speculation.__post_init__(self)
        HeadSpeculation(**self.head_settings)  # checks them

    @property
    def head_settings(self) -> dict[str, Any]:
        """Those of heads that were given."""
        names = ("head", "allow_mismatch", "p_min", "lookup")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


SpeculationChoice = Speculation | Literal["auto"] | None
"""What a user may ask for: a scheme's settings, plain decoding (None), or ``auto``, short for ``Auto()``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        dtype: of weights, activations and KV cache.
        backend: ``native`` runs the C++ kernels, ``torch`` the reference ops; ``auto`` prefers native.
        isa: instruction set up to which native kernels are chosen; ``auto`` takes the best this CPU has.
        threads: threads of the kernels. None: the CPUs this process may use.
        max_model_len: longest prompt + output, in tokens. None: the model's context length.
        max_num_seqs: most requests that run at once (the number of rows).
        max_num_batched_tokens: most tokens one step computes, drafts aside; longer prefills are cut into chunks of it.
        page_size: tokens in a KV page.
        kv_cache_memory: bytes for KV pages. None: ``kv_cache_fraction`` of the free memory, but no more than
            ``max_num_seqs`` full contexts can use.
        kv_cache_fraction: see ``kv_cache_memory``.
        enable_prefix_caching: keep full pages of finished requests for prompts that begin the same way.
        logprobs_mode: what ``SamplingParams.logprobs`` reports, named as in vLLM: before (``raw``) or after
            (``processed``) penalties, bias, temperature and truncation; log-probabilities or logits.
        speculation: the scheme that proposes drafts, e.g. ``Mtp()``, ``Ngram()`` or ``DraftModel(layers=8)``. None:
            plain decoding. ``auto``, which is ``Auto()``: the model's own head if one ships or lies in its folder, else
            ``Ngram()``.
        seed: of the generator that draws a seed for requests that have none. None: from the system.
    """

    dtype: DTypeName = "bfloat16"
    backend: BackendName = "auto"
    isa: IsaName = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    page_size: int = 16
    kv_cache_memory: int | None = None
    kv_cache_fraction: float = 0.3
    enable_prefix_caching: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    speculation: SpeculationChoice = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTypeName)
        _check_choice("backend", self.backend, BackendName)
        _check_choice("isa", self.isa, IsaName)
        _check_choice("logprobs_mode", self.logprobs_mode, LogprobsMode)
        for name, low in (("threads", 1), ("max_model_len", 2), ("kv_cache_memory", 1), ("seed", -(2**63))):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), low)
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
            _check_integer(name, getattr(self, name), 1)
        if self.speculation == "auto":
            object.__setattr__(self, "speculation", Auto())
        _check_speculation(self.speculation)
        _check_fraction("kv_cache_fraction", self.kv_cache_fraction)
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step must have room for one token of every running request. Raise the first or lower the second."
            )

    @property
    def max_step_drafts(self) -> int:
        """Most drafts that a step verifies, of all rows together."""
        settings = self.scheme_settings
        return self.max_num_seqs * settings.num_drafts if settings is not None else 0

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that the target computes in a step: ``max_num_batched_tokens`` and the drafts of every row."""
        return self.max_num_batched_tokens + self.max_step_drafts

    @property
    def scheme_settings(self) -> Speculation | None:
        """Settings of the scheme at work; None is plain decoding, and also ``auto`` where no model has decided it."""
        chosen = isinstance(self.speculation, Speculation) and not isinstance(self.speculation, Auto)
        return self.speculation if chosen else None  # type: ignore[return-value]  # mypy loses what chosen says


def _check_speculation(value: object) -> None:
    if value is None or (isinstance(value, Speculation) and value.scheme):
        return
    raise ConfigError(f"speculation={value!r}: must be a scheme's settings such as Ngram(), None or 'auto'")


def _check_choice(name: str, value: object, literal: object) -> None:
    allowed = get_args(literal)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(str, allowed))}")


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high):
        return
    allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise ConfigError(f"{name}={value!r}: must be an integer {allowed}")


def _check_fraction(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value <= 1.0:
        raise ConfigError(f"{name}={value!r}: must be a number above 0 and at most 1")


def _check_least_probability(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 <= value < 1.0:
        raise ConfigError(f"{name}={value!r}: must be a number of at least 0 and below 1; 0 leaves nothing out")


def _check_name(name: str, value: object, what: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={value!r}: must be a string that is not empty: {what}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be true or false")
