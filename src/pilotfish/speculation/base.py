"""The seam between the engine and a speculation scheme.

Every step is: propose, forward, accept, commit. A scheme says only what it proposes; plain decoding is the scheme that
proposes nothing. Drafts live in the proposal until commit, so a rejected draft leaves nothing to restore: its KV entry
is overwritten by the next step.

A scheme is a module of this package, named as ``Speculation.scheme`` of its settings, with one function
``load(settings, context)`` that gives a :class:`Scheme`, or a :class:`HeadScheme` where a head drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pilotfish.models import Model
from pilotfish.models.heads import DraftHead
from pilotfish.runner import HeadRunner, Runner
from pilotfish.sampling import SamplerState
from pilotfish.text import Tokenizer

__all__ = [
    "CommittedRow",
    "DraftRow",
    "HeadScheme",
    "NoProposer",
    "Proposal",
    "Proposer",
    "Scheme",
    "SpeculationContext",
]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a scheme sees of a scheduled sequence.

    Attributes:
        index: its place in the page table.
        token_ids: prompt and output so far; not to be written to.
        pages: its KV pages, shared by target and draft.
        sampler: how its tokens are chosen.
        max_drafts: most drafts that there is room for; 0 while its prompt is not yet computed.
    """

    index: int
    token_ids: Sequence[int]
    pages: list[int]
    sampler: SamplerState
    max_drafts: int


@dataclass(frozen=True, slots=True)
class CommittedRow:
    """What a step made of a sequence.

    Attributes:
        index: its place in the page table (maybe given up by now: the sequence may have finished).
        token_ids: prompt and output, accepted drafts and bonus token included.
        pages: the pages it had in this step.
        start: tokens that were in the target's KV before the step.
        offset: where its first token is among the step's.
        num_computed: leading tokens that are in the target's KV now.
        num_drafts: drafts that were proposed for it.
        finished: it will not be scheduled again.
    """

    index: int
    token_ids: Sequence[int]
    pages: list[int]
    start: int
    offset: int
    num_computed: int
    num_drafts: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one step.

    Attributes:
        tokens: ``tokens[s]`` are the drafts of the s-th row, maybe none.
        probs: ``probs[s]`` are the distributions that they were drawn from, float32 [K, V]; None: each draft was
            certain. Must be the very distributions, or rejection is not exact.
    """

    tokens: Sequence[Sequence[int]]
    probs: Sequence[Tensor | None]

    @classmethod
    def empty(cls, num_rows: int) -> Proposal:
        return cls([()] * num_rows, [None] * num_rows)

    def within_constraints(self, rows: Sequence[DraftRow]) -> Proposal:
        """Without the drafts that a row's constraint forbids, and all that follow them.

        Schemes that copy tokens, or draft past the end of an output, propose such drafts. The target would reject them.
        """
        if all(row.sampler.constraint is None for row in rows):
            return self
        tokens, probs = list(self.tokens), list(self.probs)
        for s, row in enumerate(rows):
            if row.sampler.constraint is not None and tokens[s]:
                count = row.sampler.constraint.num_allowed(tokens[s])
                q = probs[s]
                tokens[s] = tokens[s][:count]
                probs[s] = q[:count] if q is not None and count else None
        return Proposal(tokens, probs)


class Proposer(Protocol):
    """A speculation scheme at work."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Propose at most ``max_drafts`` tokens for each row."""
        ...

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        """Learn what the step made of the rows that :meth:`propose` saw, in the same order.

        Args:
            rows: the step's sequences.
            features: :attr:`pilotfish.runner.Runner.features` of the step, [T, F]. Those of a row's tokens, drafts
                included, begin at ``row.offset``. Overwritten by the next step.
        """
        ...


class NoProposer:
    """Plain decoding: an empty proposal through the same loop."""

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        return Proposal.empty(len(rows))

    def observe(self, rows: Sequence[CommittedRow], features: Tensor) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SpeculationContext:
    """What a scheme may build on.

    Attributes:
        target: the target.
        tokenizer: the target's.
        load_model: another checkpoint by name, packed for the same ops: its model and tokenizer, and the int64 [D] ids
            that its logits are of where it has a draft vocabulary.
        find_head: the folder of the head that is the target's own, or None.
        load_head: a head by folder or Hugging Face id, for the target and its ops; True allows a mismatch.
    """

    target: Model
    tokenizer: Tokenizer
    load_model: Callable[[str], tuple[Model, Tokenizer, Tensor | None]]
    find_head: Callable[[], str | None]
    load_head: Callable[[str, bool], DraftHead]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme that is loaded but has no KV pool yet.

    Attributes:
        model: a draft model that needs a pool and a runner of its own, or None.
        start: makes the proposer, given that runner (None if there is no model).
        aux_layers: the target's features are the states that enter these layers; none: its last ones.
    """

    model: Model | None
    start: Callable[[Runner | None], Proposer]
    aux_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeadScheme:
    """A scheme whose drafts are a head's, which has no KV pool yet.

    Attributes:
        head: it needs a pool with a layer for each of its modules, and a runner.
        start: makes the proposer, given that runner.
    """

    head: DraftHead
    start: Callable[[HeadRunner], Proposer]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """As of :class:`Scheme`."""
        return self.head.config.aux_layers
