"""The contract of a draft head: one module for the engine and the trainer alike, over whichever ops they use."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pilotfish.attention import AttentionPlan, ForwardBatch, RopeTable
from pilotfish.models.heads.config import HeadConfig

__all__ = ["DraftHead"]


class DraftHead(Protocol):
    """A small decoder that reads the target's states and drafts its tokens. Holds weights, no state of any request.

    T tokens, H the head's hidden size, F width of the target's features, D draft vocabulary. Row j embeds token j,
    reads the state of position j - 1, is rotated to position j, and its KV goes to slot j: so a page's KV depends on
    nothing behind the page.

    Attributes:
        config: the contract.
        rope: rotary tables, one row for each position that the head can be asked for.
        token_ids: int64 [D], the target's id of each draft id, ascending; None: draft ids are the target's.
    """

    config: HeadConfig
    rope: RopeTable
    token_ids: Tensor | None

    def fuse(self, features: Tensor) -> Tensor:
        """What row j + 1 reads of the target's feature at position j: [T, F] -> [T, H].

        EAGLE-3's ``fc`` over several layers' states; for all others the feature itself.
        """
        ...

    def forward(
        self, batch: ForwardBatch, states: Tensor, attention: AttentionPlan, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run one module over the batch's T tokens, with ``attention`` planned for the same batch.

        Writes keys and values to layer ``module`` of the plan's KV pool.

        Args:
            batch: row j holds token j.
            states: [T, H] in the ops' dtype, in the row of token j the state of position j - 1: the fused feature, or
                what a module recycled there. Zeros in row 0, if there is one (``config.first_row``).
            attention: of a pool with ``config.num_modules`` layers.
            module: which of the chain. Module m > 0 reads what module m - 1 recycled.

        Returns:
            (states [T, H] for :meth:`logits`, states [T, H] to recycle); may be one tensor.
        """
        ...

    def logits(self, out: Tensor, module: int = 0) -> Tensor:
        """Scores over the draft vocabulary for chosen rows of ``forward``'s first result: [R, H] -> float32 [R, D]."""
        ...
