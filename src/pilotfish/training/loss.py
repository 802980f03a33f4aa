"""What a head is taught: the target's distribution over the draft vocabulary, and its hidden state.

R rows, P taught positions, H hidden size, D draft vocabulary. A row's loss is ``logits_weight`` times the divergence
from the target's softmax over the D tokens, plus ``hidden_weight`` times the smooth-L1 distance of its state from the
target's (EAGLE, arXiv:2401.15077). Nothing of the size [R, D] is kept in float32, and with the target's own frozen
output weights nothing of that size at all: the gradient of the cross-entropy by a row's state is
``softmax(z) W - t W``, and ``t W`` [P, H] is the same for all steps that teach a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Distillation", "LossKind", "StepLoss", "Teacher"]

LossKind = Literal["kl", "lk"]

_CHUNK_ROWS = 256
"""Rows whose logits are held at once: 4 MiB of bfloat16 for 8,192 tokens, which stays in the cache."""
_LK_DECAY = 3.0
"""eta of lambda = exp(-eta * alpha), LK losses (arXiv:2602.23881)."""


def _chunks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, _CHUNK_ROWS):
        yield slice(start, min(start + _CHUNK_ROWS, num_rows))


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target at P positions, computed once for all steps.

    Attributes:
        hidden: [P, H], its state.
        labels: int64 [P], its most likely token among the D, as a draft id.
        entropy: float32 [P], of its distribution over the D.
        mean_weights: [P, H], the expected row of the output weights under its distribution.
        probs: [P, D], or None where ``mean_weights`` is enough.
    """

    hidden: Tensor
    labels: Tensor
    entropy: Tensor
    mean_weights: Tensor
    probs: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, hidden: Tensor, lm_head: Tensor, *, keep_probs: bool) -> Teacher:
        """Run the target's output layer.

        Args:
            hidden: [P, H], the target's post-final-norm states, in the trainer's dtype.
            lm_head: [D, H], its output rows of the draft vocabulary, in the same dtype.
            keep_probs: for losses that need the distribution itself.
        """
        num_rows, vocab = hidden.shape[0], lm_head.shape[0]
        labels = torch.empty(num_rows, dtype=torch.int64)
        entropy = torch.empty(num_rows)
        mean_weights = torch.empty_like(hidden)
        probs = hidden.new_empty(num_rows, vocab) if keep_probs else None
        # Once for all steps, so in full: at logits of 40, bfloat16 has steps of 1 / 4.
        transposed = lm_head.float().T
        for chunk in _chunks(num_rows):
            with _exact_operands(hidden.dtype):
                logits = hidden[chunk].float() @ transposed
            top, labels[chunk] = logits.max(-1)
            p32 = torch.softmax(logits, -1)
            log_sum = top - p32.amax(-1).log()
            p = p32.to(hidden.dtype)
            mean = p @ lm_head
            entropy[chunk] = log_sum - _row_dot(hidden[chunk], mean)
            mean_weights[chunk] = mean
            if probs is not None:
                probs[chunk] = p
        return cls(hidden, labels, entropy, mean_weights, probs)


@dataclass(frozen=True, slots=True)
class StepLoss:
    """One step's loss, and sums for the log.

    Attributes:
        loss: scalar, differentiable.
        divergence: float32 scalar, weighted sum of the rows' KL(target, head).
        distance: float32 scalar, weighted sum of the rows' smooth-L1 distances.
        num_correct: rows whose most likely token is the target's, among the D.
        num_rows: R.
    """

    loss: Tensor
    divergence: float
    distance: float
    num_correct: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Distillation:
    """The loss of a step.

    Attributes:
        kind: ``kl``, or ``lk``: lambda KL + (1 - lambda) TV with lambda = exp(-3 alpha), alpha = 1 - TV the row's rate
            of acceptance, held constant (arXiv:2602.23881).
        logits_weight: of the divergence.
        hidden_weight: of the smooth-L1 distance, which is a mean over H.
    """

    kind: LossKind = "kl"
    logits_weight: float = 1.0
    hidden_weight: float = 0.0

    def __call__(self, out: Tensor, lm_head: Tensor, teacher: Teacher, index: Tensor, weights: Tensor) -> StepLoss:
        """Compute it.

        Args:
            out: [R, H], what the head's logits are made of.
            lm_head: [D, H], in the dtype of ``out``. If it requires a gradient, or the loss is ``lk``, the teacher must
                have its ``probs``; if not, it must be the weights that the teacher was made with.
            teacher: at the taught positions.
            index: int64 [R], the position that teaches each row.
            weights: float32 [R], of each row in the sum.
        """
        loss, stats = _Distil.apply(out, lm_head, teacher, index, weights, self)  # type: ignore[no-untyped-call]
        divergence, distance, correct = stats.tolist()
        return StepLoss(loss, divergence, distance, int(correct), out.shape[0])


class _Distil(torch.autograd.Function):
    """Computes the gradients beside the loss, chunk after chunk, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lm_head: Tensor, teacher: Teacher, index: Tensor, weights: Tensor, loss: Distillation
    ) -> tuple[Tensor, Tensor]:
        trained_head = ctx.needs_input_grad[1]
        full = trained_head or loss.kind == "lk"
        if full and teacher.probs is None:
            raise ValueError("this loss needs the teacher's distribution: make it with keep_probs=True")
        grad_out = torch.empty_like(out)
        grad_head = torch.zeros_like(lm_head, dtype=torch.float32) if trained_head else None
        total = torch.zeros(())
        stats = torch.zeros(3, dtype=torch.float64)
        for chunk in _chunks(out.shape[0]):
            rows, taught, weight = out[chunk], index[chunk], weights[chunk]
            label = teacher.labels[taught].unsqueeze(-1)
            logits = rows @ lm_head.T
            top = logits.amax(-1)
            at_label = logits.gather(-1, label).squeeze(-1)
            p = torch.softmax(logits, -1)
            # p may vanish in its dtype where the label is hopeless; at the top it never does.
            log_sum = top.float() - p.amax(-1).float().log()
            if full:
                assert teacher.probs is not None
                t = teacher.probs[taught]
                kl = log_sum - (t * logits).sum(-1, dtype=torch.float32) - teacher.entropy[taught]
                value, gradient = (kl, p - t) if loss.kind == "kl" else _lk(p, t, kl)
                grad = gradient @ lm_head
                if grad_head is not None:
                    scaled = gradient * (weight * loss.logits_weight).unsqueeze(-1).to(gradient.dtype)
                    grad_head += (scaled.T @ rows).float()
            else:
                mean = teacher.mean_weights[taught]
                kl = log_sum - _row_dot(rows, mean) - teacher.entropy[taught]
                value = kl
                grad = p @ lm_head - mean
            distance, slope = _smooth_l1(rows, teacher.hidden[taught])
            scale = weight.unsqueeze(-1)
            grad_out[chunk] = (grad.float() * loss.logits_weight).add_(slope, alpha=loss.hidden_weight).mul_(scale)
            total += (weight * (loss.logits_weight * value + loss.hidden_weight * distance)).sum()
            stats += torch.stack([(weight * kl).sum(), (weight * distance).sum(), (at_label >= top).sum()])
        ctx.save_for_backward(grad_out, grad_head)
        ctx.head_dtype = lm_head.dtype
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_head = ctx.saved_tensors
        by_head = None if grad_head is None else (grad_head * grads[0]).to(ctx.head_dtype)
        return grad_out * grads[0].to(grad_out.dtype), by_head, None, None, None, None


def _lk(p: Tensor, t: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Rows' lambda KL + (1 - lambda) TV [C], and its gradient by the logits [C, D]."""
    alpha = torch.minimum(p, t).sum(-1, dtype=torch.float32)
    mix = torch.exp(-_LK_DECAY * alpha)
    # TV = 1 - sum min(p, t), whose derivative by logit i is -p_i ([p_i < t_i] - sum_j p_j [p_j < t_j]).
    short = (p < t).to(p.dtype)
    share = (p * short).sum(-1, keepdim=True, dtype=torch.float32).to(p.dtype)
    by_mix = mix.unsqueeze(-1).to(p.dtype)
    gradient = (p - t) * by_mix - (short - share) * p * (1 - by_mix)
    return mix * kl + (1 - mix) * (1 - alpha), gradient


def _smooth_l1(rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over H of the smooth-L1 distance (beta 1) [C], and its gradient [C, H], in float32."""
    difference = rows.float() - hidden.float()
    slope = difference.clamp(-1.0, 1.0)
    # Within the beta d^2 / 2, beyond |d| - 1 / 2: both are slope * (d - slope / 2).
    distance = (slope * (difference - slope / 2)).mean(-1)
    return distance, slope / rows.shape[-1]


@contextmanager
def _exact_operands(dtype: torch.dtype) -> Iterator[None]:
    """Products of float32 tensors that hold values of ``dtype``: if that is bfloat16, its units serve them exactly."""
    before = torch.get_float32_matmul_precision()
    if dtype == torch.bfloat16:
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of rows, float32."""
    return (a.float() * b.float()).sum(-1)
