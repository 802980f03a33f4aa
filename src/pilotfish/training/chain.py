"""One training step: the head over a batch's texts, then its chains of drafts, each step with its loss.

The head is the one that the engine runs (:func:`pilotfish.models.heads.build_head`), on differentiable ops and
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pilotfish.models import kv_shape
from pilotfish.models.heads import DraftHead, HeadConfig, build_head
from pilotfish.ops import Linear
from pilotfish.training.attention import ChainAttention
from pilotfish.training.data import Batch, Step
from pilotfish.training.loss import Distillation, StepLoss, Teacher
from pilotfish.training.ops import TrainOps

__all__ = ["HeadTrainer", "LossMean", "chain_outputs", "row_weights"]

LossMean = Literal["token", "sample"]


def chain_outputs(head: DraftHead, batch: Batch) -> list[Tensor]:
    """What the head's logits are made of, in each step: [R, H] for each of the batch's steps.

    The tokens that a chain embeds are the real ones: drafts that are wrong are never drafted upon. So module m's draft
    from row j is its row j + m of the text, which reads module m - 1's row before it, down to the target's state. Only
    behind the last module do chains read what they recycle themselves.
    """
    attention = ChainAttention(kv_shape(head.config.shape, page_size=1, dtype=batch.features.dtype))
    plan = attention.plan(batch.text)
    states = _first_row_zeros(head, batch)
    rows, outputs = batch.rows, []
    num_modules = min(head.config.num_modules, len(batch.steps))
    for module in range(num_modules):
        if module:
            states = _moved_on(states, batch)
            # A chain that runs over the end of its sample does not count there, as in ``Batch.chain_inputs``.
            rows = (batch.rows + module).clamp(max=batch.text.num_tokens - 1)
        out, states = head.forward(batch.text, states, plan, module)
        outputs.append(out.index_select(0, rows))
    states = states.index_select(0, rows)
    chains = plan.chains(rows)
    for k in range(num_modules, len(batch.steps)):
        token_ids, positions = batch.chain_inputs(k)
        step_batch = replace(batch.text, token_ids=token_ids, positions=positions)
        out, states = head.forward(step_batch, states, chains.step(positions), num_modules - 1)
        outputs.append(out)
    return outputs


def _first_row_zeros(head: DraftHead, batch: Batch) -> Tensor:
    """The fused features. Row 0 reads zeros, not what a fuse with norms or biases makes of zeros."""
    states = head.fuse(batch.features)
    if states is batch.features or not head.config.first_row:
        return states
    return states * (batch.text.positions != 0).unsqueeze(1).to(states.dtype)


def _moved_on(states: Tensor, batch: Batch) -> Tensor:
    """A module's states [T, H] as the next module reads them: those of the row before, zeros in a sample's first."""
    keep = torch.ones(states.shape[0], 1, dtype=states.dtype)
    keep[batch.text.query_start[:-1].long()] = 0
    return states.roll(1, 0) * keep


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainer:
    """All that a step needs besides the parameters.

    Attributes:
        config: of the head.
        ops: differentiable.
        embedding: the target's, packed by ``ops``; frozen.
        lm_head: [D, H], its output rows of the draft vocabulary, in the ops' dtype; frozen.
        token_ids: int64 [D], or None.
        distillation: the loss of a step.
        step_decay: a step's weight is ``step_decay ** k``.
        mean: over what the rows' losses are averaged: all of a step's rows alike, or each sample's first.
        max_model_len: of the longest sample.
    """

    config: HeadConfig
    ops: TrainOps
    embedding: Linear
    lm_head: Linear
    token_ids: Tensor | None
    distillation: Distillation
    step_decay: float = 0.8
    mean: LossMean = "token"
    max_model_len: int | None = None

    def head(self, parameters: Mapping[str, Tensor]) -> DraftHead:
        """The head over ``parameters`` (float32 masters of ``head_tensors``), anew for each step."""
        return build_head(
            self.config,
            parameters,
            self.ops,
            embedding=self.embedding,
            lm_head=self.lm_head,
            token_ids=self.token_ids,
            max_model_len=self.max_model_len,
        )

    def teach(self, parameters: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, list[StepLoss]]:
        """The batch's loss, and its steps'."""
        own_head = parameters.get("lm_head.weight")
        keep_probs = self.distillation.kind == "lk" or own_head is not None
        teacher = Teacher.of(batch.taught, self.lm_head.data, keep_probs=keep_probs)
        head = self.head(parameters)
        weights = self.lm_head.data if own_head is None else own_head.to(self.ops.dtype)
        total = torch.zeros(())
        losses = []
        for k, (out, step) in enumerate(zip(chain_outputs(head, batch), batch.steps, strict=True)):
            if step.chains.shape[0] < out.shape[0]:
                out = out.index_select(0, step.chains)
            loss = self.distillation(
                out, weights, teacher, step.teachers, row_weights(step, batch.num_samples, self.mean)
            )
            total = total + self.step_decay**k * loss.loss
            losses.append(loss)
        return total, losses


def row_weights(step: Step, num_samples: int, mean: LossMean) -> Tensor:
    """float32 [R_k], the share of each row of a step in its mean; sum 1 (if any row counts)."""
    num_rows = step.samples.shape[0]
    if mean == "token" or num_rows == 0:
        return torch.full((num_rows,), 1.0 / max(num_rows, 1))
    counts = torch.bincount(step.samples, minlength=num_samples)
    return 1.0 / (counts[step.samples] * (counts > 0).sum())
