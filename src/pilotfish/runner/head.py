"""The runner of a draft head: scheduled rows and the hidden states they read in, logits and new states out.

A head runs over tokens in the target's pages, in a KV pool of its own that has a layer for each of its modules. Its row
for position j embeds token j and reads the state of position j - 1, so states are an input like tokens are. Which state
that is, the target's or one of the head's own, is its caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.attention import AttentionBackend
from pilotfish.models.heads import DraftHead
from pilotfish.ops import Ops
from pilotfish.runner.batch import BatchBuilder, Segment

__all__ = ["EagerHeadRunner", "HeadRunner", "HeadStep", "bits"]


def bits(x: Tensor) -> NDArray[Any]:
    """The memory of a bfloat16 or float32 tensor as integers, which numpy has: same shape, no copy.

    Rows are small: torch would wake threads of its own to copy them, which compete with the kernels'.
    """
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32).numpy()


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What one pass of one module computed; the module's next pass may overwrite it.

    Attributes:
        logits: float32 [R, D], of the rows that were asked for.
        states: [T, H] in the ops' dtype, of every token: what the row of the next position may read.
    """

    logits: Tensor
    states: Tensor


class HeadRunner(Protocol):
    """Runs one head's forward passes."""

    @property
    def head(self) -> DraftHead:
        """What it runs."""
        ...

    @property
    def ops(self) -> Ops:
        """What the sampler computes with."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a KV page."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages of the KV pool."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """What rows read of the target's features: [N, F] -> [N, H]. The next call may overwrite it."""
        ...

    def forward(self, segments: Sequence[Segment], states: Tensor, module: int = 0) -> HeadStep:
        """Compute the segments' tokens in one module and write its KV.

        Args:
            segments: T tokens.
            states: [T, H] in the ops' dtype; the row of position j has that of position j - 1.
            module: which of the head's chain.
        """
        ...


class EagerHeadRunner:
    """Calls the head op by op."""

    def __init__(self, head: DraftHead, ops: Ops, attention: AttentionBackend, builder: BatchBuilder) -> None:
        self.head = head
        self.ops = ops
        self._attention = attention
        self._builder = builder

    @property
    def page_size(self) -> int:
        return self._builder.page_size

    @property
    def num_pages(self) -> int:
        return self._attention.num_pages

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], states: Tensor, module: int = 0) -> HeadStep:
        size = self._builder.build(segments)
        batch = self._builder.batch(size)
        out, recycled = self.head.forward(batch, states, self._attention.plan(batch), module)
        rows = self._builder.logits_rows(size.num_logits)
        return HeadStep(self.head.logits(self.ops.gather_rows(out, rows), module), recycled)
