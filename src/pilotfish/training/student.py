"""What is trained: the loop knows a student's parameters, its loss and how it is counted and saved, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pilotfish.models.heads import build_head, save_head
from pilotfish.training.chain import HeadTrainer
from pilotfish.training.data import Batch
from pilotfish.training.evaluate import Accuracy
from pilotfish.training.loss import StepLoss
from pilotfish.training.store import CaptureReader
from pilotfish.training.validate import engine_ops, head_accuracy

__all__ = ["HeadStudent", "Student"]


class Student(Protocol):
    """A small model that learns from captured states of its target.

    Attributes:
        parameters: float32 leaves that require gradients, by name.
        dtype: of the computation.
        steps: drafts in a row that are trained, and that batches are made for.
        first_row: see :func:`pilotfish.training.data.make_batch`.
        use_aux: reads the states of the capture's ``aux_layers``.
    """

    parameters: dict[str, Tensor]
    dtype: torch.dtype
    steps: int
    first_row: bool
    use_aux: bool

    def teach(self, batch: Batch) -> tuple[Tensor, list[StepLoss]]:
        """The batch's loss, and its steps'."""
        ...

    def evaluate(self, reader: CaptureReader, indices: Iterable[int], num_steps: int) -> Accuracy:
        """How good it is now, as it would be saved, on some captured samples; computed by the engine's code."""
        ...

    def save(self, out: Path, training: Mapping[str, Any]) -> None:
        """Write what the engine loads, with a summary of the training."""
        ...


@dataclass(slots=True)
class HeadStudent:
    """A draft head; ``trainer`` is without its parameters."""

    trainer: HeadTrainer
    parameters: dict[str, Tensor]
    dtype: torch.dtype
    steps: int
    first_row: bool
    use_aux: bool

    def teach(self, batch: Batch) -> tuple[Tensor, list[StepLoss]]:
        return self.trainer.teach(self.parameters, batch)

    def evaluate(self, reader: CaptureReader, indices: Iterable[int], num_steps: int) -> Accuracy:
        trainer, ops = self.trainer, engine_ops(self.dtype)
        head = build_head(
            trainer.config,
            {name: tensor.detach().to(torch.bfloat16) for name, tensor in self.parameters.items()},  # as saved
            ops,
            embedding=ops.pack_linear(trainer.embedding.data),
            lm_head=None if trainer.config.own_lm_head else ops.pack_linear(trainer.lm_head.data),
            token_ids=trainer.token_ids,
            max_model_len=trainer.max_model_len,
        )
        return head_accuracy(head, ops, reader, indices, num_steps)

    def save(self, out: Path, training: Mapping[str, Any]) -> None:
        config = replace(self.trainer.config, training=training)
        save_head(out, config, self.parameters, self.trainer.token_ids)
