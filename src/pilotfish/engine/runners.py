"""From loaded weights to runners: eager ones on the reference backend, recorded ones on the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from pilotfish.attention import KVShape
from pilotfish.attention.reference import ReferenceAttention
from pilotfish.config import EngineConfig
from pilotfish.models import Model
from pilotfish.models.heads import DraftHead
from pilotfish.ops import Ops
from pilotfish.runner import BatchBuilder, EagerHeadRunner, EagerRunner, HeadRunner, Runner

__all__ = ["RunnerFactory"]


class _Limits(TypedDict):
    max_tokens: int
    max_seqs: int


@dataclass(frozen=True, slots=True)
class RunnerFactory:
    """Makes the runners of one engine, whose KV pools have the same page numbers.

    Attributes:
        config: resolved settings.
        ops: of all models.
        num_pages: in every KV pool.
    """

    config: EngineConfig
    ops: Ops
    num_pages: int

    def runner(
        self, model: Model, kv: KVShape, max_tokens: int, max_logits: int, aux_layers: tuple[int, ...] = ()
    ) -> Runner:
        """A KV pool and a runner for a model.

        Args:
            model: built with :attr:`ops`.
            kv: shape of its pool.
            max_tokens: most tokens of a pass.
            max_logits: most rows of logits that a pass asks for.
            aux_layers: see :class:`pilotfish.runner.EagerRunner`.
        """
        builder, limits = self._builder(max_tokens)
        if self.config.backend == "torch":
            return EagerRunner(model, self.ops, ReferenceAttention(kv, self.num_pages), builder, aux_layers)
        from pilotfish.attention.native import NativeAttention
        from pilotfish.ops.native import NativeOps
        from pilotfish.runner.recorded import RecordedRunner

        assert isinstance(self.ops, NativeOps) and self.config.max_model_len is not None
        attention = NativeAttention(self.ops, kv, self.num_pages, **limits, max_kv_len=self.config.max_model_len)
        return RecordedRunner(model, self.ops, attention, builder, max_logits, aux_layers)

    def head_runner(self, head: DraftHead, kv: KVShape, max_tokens: int, max_logits: int) -> HeadRunner:
        """A KV pool and a runner for a draft head; arguments as of :meth:`runner`."""
        builder, limits = self._builder(max_tokens)
        first_key = 0 if head.config.first_row else 1
        if self.config.backend == "torch":
            return EagerHeadRunner(head, self.ops, ReferenceAttention(kv, self.num_pages, first_key), builder)
        from pilotfish.attention.native import NativeAttention
        from pilotfish.ops.native import NativeOps
        from pilotfish.runner.recorded_head import RecordedHeadRunner

        assert isinstance(self.ops, NativeOps) and self.config.max_model_len is not None
        attention = NativeAttention(
            self.ops, kv, self.num_pages, **limits, max_kv_len=self.config.max_model_len, first_key=first_key
        )
        return RecordedHeadRunner(head, self.ops, attention, builder, max_logits)

    def _builder(self, max_tokens: int) -> tuple[BatchBuilder, _Limits]:
        assert self.config.max_model_len is not None
        limits: _Limits = {"max_tokens": max_tokens, "max_seqs": self.config.max_num_seqs}
        builder = BatchBuilder(**limits, max_model_len=self.config.max_model_len, page_size=self.config.page_size)
        return builder, limits
