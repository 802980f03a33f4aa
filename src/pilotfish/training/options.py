"""The settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pilotfish.errors import ConfigError
from pilotfish.training.chain import LossMean
from pilotfish.training.loss import LossKind
from pilotfish.training.parameters import LayerInit

__all__ = ["DEFAULT_DRAFT_VOCAB", "TrainDType", "TrainKind", "TrainOptions"]

TrainDType = Literal["bfloat16", "float32"]
TrainKind = Literal["mtp", "eagle", "eagle3", "draft"]

DEFAULT_DRAFT_VOCAB = 8192

_CHOICES = {"kind": TrainKind, "loss": LossKind, "mean": LossMean, "init": LayerInit, "dtype": TrainDType}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Everything that decides what a run computes; a run is resumed with the same.

    Attributes:
        kind: of head; or ``draft``: a draft LLM of the target's first layers.
        layers: of the draft LLM; for no other kind.
        draft_vocab: D, tokens that the head can draft; 0: all. A draft LLM drafts all, and this is what its loss
            compares. None: 8,192 for heads (or the whole vocabulary if it is smaller), 0 for a draft LLM.
        modules: MTP modules in a chain: module m drafts the m-th token ahead, the last one all behind it.
        steps_ahead: drafts in a row that a head is trained for.
        epochs: passes over the capture.
        max_steps: stop there, if that is earlier; the learning rate falls accordingly.
        learning_rate: at its peak.
        warmup: share of the steps over which it rises.
        weight_decay: AdamW's, on matrices.
        clip: largest norm of the gradient.
        batch_tokens: tokens of a batch (on each process), prompts included.
        loss: on logits: ``kl`` or ``lk``.
        logits_weight: of the loss on logits.
        hidden_weight: of the smooth-L1 loss on hidden states.
        step_decay: step k of the chain has the weight ``step_decay ** k``.
        mean: over which rows' losses are averaged: of all tokens alike, or of each sample's first.
        init: of the decoder layer: the target's last one, or random.
        train_lm_head: the head gets an output layer of its own, which starts as the target's.
        validation: share of the samples that is held out.
        dtype: of the computation; parameters are float32.
        seed: of the order of samples and of random weights.
    """

    kind: TrainKind = "mtp"
    layers: int | None = None
    draft_vocab: int | None = None
    modules: int = 1
    steps_ahead: int = 3
    epochs: int = 2
    max_steps: int | None = None
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    batch_tokens: int = 4096
    loss: LossKind = "kl"
    logits_weight: float = 1.0
    hidden_weight: float = 0.0
    step_decay: float = 0.8
    mean: LossMean = "token"
    init: LayerInit = "random"
    train_lm_head: bool = False
    validation: float = 0.02
    dtype: TrainDType = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kinds in _CHOICES.items():
            if getattr(self, name) not in get_args(kinds):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(get_args(kinds))}")
        for name in ("modules", "steps_ahead", "epochs", "batch_tokens", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        for name in ("learning_rate", "clip", "step_decay"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("weight_decay", "logits_weight", "hidden_weight", "draft_vocab"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be a number of at least 0")
        if (self.kind == "draft") != (self.layers is not None):
            raise ConfigError(
                f"kind={self.kind!r} and layers={self.layers}: a draft LLM needs its number of layers, and no other "
                "kind has one"
            )
        if self.modules > 1 and self.kind != "mtp":
            raise ConfigError(f"modules={self.modules} and kind={self.kind!r}: only heads of kind mtp are chains")
        if self.modules > self.steps_ahead:
            raise ConfigError(
                f"modules={self.modules} and steps_ahead={self.steps_ahead}: module m learns from the m-th draft, so "
                f"steps_ahead must be at least {self.modules}"
            )
        if self.logits_weight == 0 and self.hidden_weight == 0:
            raise ConfigError("logits_weight=0 and hidden_weight=0: there is nothing to learn")
        for name in ("warmup", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be a share of at least 0 and below 1")

    def vocabulary_size(self, vocab_size: int) -> int:
        """``draft_vocab`` for a target with ``vocab_size`` tokens; 0: the whole vocabulary."""
        if self.draft_vocab is not None:
            return self.draft_vocab
        return 0 if self.kind == "draft" else min(DEFAULT_DRAFT_VOCAB, vocab_size)
