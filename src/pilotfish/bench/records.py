"""What is measured, in a form that goes to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pilotfish.types import RequestOutput

__all__ = ["Group", "Measured", "Run"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One request.

    Attributes:
        question_id: of its question.
        num_prompt_tokens: tokens of the prompt.
        num_tokens: tokens of the output.
        num_steps: engine steps that gave it at least one token.
        ttft_ms: from the batch's start to its first token, in milliseconds.
        arrivals_ms: times between successive arrivals of tokens, in milliseconds: tokens of one step arrive together.
        num_draft_steps: steps that verified a draft.
        num_draft_tokens: tokens that those steps emitted, the target's own included.
        num_drafted: drafts proposed.
        num_accepted: drafts accepted and emitted.
        drafted_at: how often there was a draft at each position.
        accepted_at: how often it was accepted and emitted.
        identical: whether its tokens are those of ``none`` in the same group; None if ``none`` was not run.
        exact: False where verification was lossy.
    """

    question_id: str | int
    num_prompt_tokens: int
    num_tokens: int
    num_steps: int
    ttft_ms: float
    arrivals_ms: list[float]
    num_draft_steps: int
    num_draft_tokens: int
    num_drafted: int
    num_accepted: int
    drafted_at: list[int]
    accepted_at: list[int]
    identical: bool | None
    exact: bool = True

    @classmethod
    def of(cls, question_id: str | int, output: RequestOutput, identical: bool | None) -> Measured:
        """From a request's output, which has one completion."""
        stats, speculation = output.stats, output.stats.speculation
        return cls(
            question_id=question_id,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_tokens=len(output.outputs[0].token_ids),
            num_steps=stats.num_steps,
            ttft_ms=round(stats.ttft_ms or 0.0, 3),
            arrivals_ms=[round(gap, 3) for gap in stats.arrivals_ms],
            num_draft_steps=speculation.num_steps,
            num_draft_tokens=speculation.num_emitted,
            num_drafted=speculation.num_drafted,
            num_accepted=speculation.num_accepted,
            drafted_at=list(speculation.drafted_at),
            accepted_at=list(speculation.accepted_at),
            identical=identical,
            exact=speculation.exact,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One scheme over one group: wall time in seconds from the first request's arrival to the last token."""

    scheme: str
    seconds: float
    requests: list[Measured]


@dataclass(frozen=True, slots=True)
class Group:
    """One batch of prompts of one category, through every scheme in turn."""

    batch: int
    category: str
    index: int
    runs: list[Run] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, str, int]:
        """What tells it from other groups of the same settings."""
        return self.batch, self.category, self.index

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Group:
        """From what :meth:`as_dict` gave.

        Raises:
            KeyError, TypeError: it is something else.
        """
        runs = [
            Run(run["scheme"], run["seconds"], [Measured(**request) for request in run["requests"]])
            for run in values["runs"]
        ]
        return cls(values["batch"], values["category"], values["index"], runs)
