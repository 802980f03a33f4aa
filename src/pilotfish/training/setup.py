"""What a run needs before its first step: the head's contract, its vocabulary and its first weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.errors import ConfigError
from pilotfish.models import ModelConfig
from pilotfish.models.checkpoint import Checkpoint
from pilotfish.models.heads import HeadConfig, TargetStamp
from pilotfish.models.heads.checkpoint import pack_lm_head, target_stamp
from pilotfish.training.chain import HeadTrainer
from pilotfish.training.draft import draft_student
from pilotfish.training.loss import Distillation
from pilotfish.training.ops import TrainOps
from pilotfish.training.options import TrainOptions
from pilotfish.training.parameters import initial_parameters
from pilotfish.training.store import CaptureReader
from pilotfish.training.student import HeadStudent, Student
from pilotfish.training.vocab import draft_vocabulary

__all__ = ["check_capture", "prepare", "usable_samples"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def prepare(checkpoint: Checkpoint, reader: CaptureReader, options: TrainOptions) -> Student:
    """The student, with its first weights.

    Raises:
        ConfigError: options that do not fit the target, or a capture of another.
    """
    stamp = target_stamp(checkpoint)
    check_capture(reader, stamp)
    target = checkpoint.config
    forced = {*target.eos_token_ids, *checkpoint.load_tokenizer().special_token_ids}
    size = options.vocabulary_size(target.vocab_size)
    token_ids = draft_vocabulary(reader, size, target.vocab_size, forced)
    ops = TrainOps(_DTYPES[options.dtype])
    distillation = Distillation(options.loss, options.logits_weight, options.hidden_weight)
    max_model_len = int(reader.lengths.max())
    if options.layers is not None:
        return draft_student(checkpoint, options.layers, token_ids, ops, distillation, options.mean, max_model_len)
    config = _head_config(target, stamp, reader, options, token_ids)
    weights = checkpoint.tensors()
    lm_head = pack_lm_head(weights, target, ops, token_ids)
    first = initial_parameters(config, weights, layer_init=options.init, lm_head=lm_head.data, seed=options.seed)
    trainer = HeadTrainer(
        config=config,
        ops=ops,
        embedding=ops.pack_linear(weights["model.embed_tokens.weight"]),
        lm_head=lm_head,
        token_ids=token_ids,
        distillation=distillation,
        step_decay=options.step_decay,
        mean=options.mean,
        max_model_len=max_model_len,
    )
    return HeadStudent(
        trainer=trainer,
        parameters={name: tensor.requires_grad_() for name, tensor in first.items()},
        dtype=ops.dtype,
        steps=options.steps_ahead,
        first_row=config.first_row,
        use_aux=bool(config.aux_layers),
    )


def _head_config(
    target: ModelConfig, stamp: TargetStamp, reader: CaptureReader, options: TrainOptions, token_ids: Tensor | None
) -> HeadConfig:
    assert options.kind != "draft"
    aux_layers = reader.aux_layers if options.kind == "eagle3" else ()
    return HeadConfig(
        kind=options.kind,
        shape=replace(target, num_layers=options.modules),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size if token_ids is None else token_ids.shape[0],
        aux_layers=aux_layers,
        # EAGLE-3 recycles what its residual stream holds. A head that reads the target's normed state, and not an fc's
        # output, must recycle what looks like one.
        recycles="pre_norm" if aux_layers else "post_norm",
        own_lm_head=options.train_lm_head,
        target=stamp,
    )


def check_capture(reader: CaptureReader, stamp: TargetStamp) -> None:
    """See that the capture is of this target, as far as it says.

    Raises:
        ConfigError: it is of another, or empty.
    """
    captured: Mapping[str, Any] = reader.manifests[0].target
    for name in ("hidden_size", "num_layers", "vocab_size", "embedding_sha256", "chat_template_sha256"):
        value, expected = captured.get(name), getattr(stamp, name)
        if value is not None and value != expected:
            raise ConfigError(
                f"data: was captured from a target ({captured.get('name')}) with {name}={value}, and this one "
                f"({stamp.name}) has {name}={expected}: a head learns from the states of its own target"
            )


def usable_samples(reader: CaptureReader) -> NDArray[np.int64]:
    """Indices of samples that teach anything: a token to be learnt that has a row before it, whatever the head.

    Raises:
        ConfigError: there is none.
    """
    usable = [i for i in range(len(reader)) if reader.loss_mask(i)[2:].any()]
    if not usable:
        raise ConfigError(f"data: none of the {len(reader)} captured samples has a token to be learnt")
    return np.array(usable, np.int64)
