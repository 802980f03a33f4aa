"""What the sampler remembers of one completion, and the view of it that one row of logits sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import RequestError, shown
from pilotfish.types import SamplingParams

__all__ = ["Constraint", "LogitsRow", "SamplerState", "TokenCounts", "check_vocabulary"]

_GREEDY_BELOW = 1e-10
"""Temperatures below this are greedy: dividing by them would overflow float32, and no noise reaches that far."""

_MIN_INVERSE_TEMPERATURE = 1e-30
"""An inverse temperature of 0 means greedy, so the largest temperatures must not round to it (this is uniform)."""

_Ids = NDArray[np.int64]
_Values = NDArray[np.float32]


class Constraint(Protocol):
    """What a completion's tokens must keep to, such as a grammar, as far as they are committed."""

    @property
    def ended(self) -> bool:
        """Whether it ended with the last token."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot be kept to any longer; None: it can."""
        ...

    def allowed(self, drafts: Sequence[int] = ()) -> NDArray[np.bool_]:
        """The tokens that may come after ``drafts``, bool [V], at least one. Not to be written to."""
        ...

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of the drafts may come one after the other."""
        ...

    def commit(self, token: int) -> None:
        """Take the next token."""
        ...


class TokenCounts:
    """How often each token occurs in a completion's output, kept as the list of tokens seen (not a row of V).

    Tokens of the prompt are on the list with count 0 when ``prompt_token_ids`` are given. Adding a token costs O(1)
    amortised, applying penalties costs O(tokens seen).
    """

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        self._ids: _Ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._counts: _Values = np.zeros(len(self._ids), dtype=np.float32)
        self._slots: dict[int, int] = {token: slot for slot, token in enumerate(self._ids.tolist())}

    def add(self, token_ids: Iterable[int]) -> None:
        """Count tokens of the output."""
        for token in token_ids:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = len(self._slots)
                if slot >= len(self._ids):
                    self._grow()
                self._ids[slot] = token
                self._counts[slot] = 0.0
            self._counts[slot] += 1.0

    def seen(self, drafts: Sequence[int] = ()) -> tuple[_Ids, _Values]:
        """Ids and output counts [N] of all tokens seen, as if ``drafts`` had been added. Do not write to them."""
        n = len(self._slots)
        ids, counts = self._ids[:n], self._counts[:n]
        if not drafts:
            return ids, counts
        counts = counts.copy()
        fresh: dict[int, float] = {}
        for token in drafts:
            slot = self._slots.get(token)
            if slot is None:
                fresh[token] = fresh.get(token, 0.0) + 1.0
            else:
                counts[slot] += 1.0
        if fresh:
            ids = np.concatenate([ids, np.fromiter(fresh, dtype=np.int64)])
            counts = np.concatenate([counts, np.fromiter(fresh.values(), dtype=np.float32)])
        return ids, counts

    def _grow(self) -> None:
        size = max(64, 2 * len(self._ids))
        self._ids = np.resize(self._ids, size) if len(self._ids) else np.zeros(size, dtype=np.int64)
        self._counts = np.resize(self._counts, size) if len(self._counts) else np.zeros(size, dtype=np.float32)


class SamplerState:
    """The sampler's memory of one completion: everything its parameters need, computed once.

    Args:
        params: of the request.
        seed: of the request (the engine draws one where ``params.seed`` is None). Any 64-bit integer, signed or not.
        sample_index: which of the request's ``params.n`` completions this is; each has its own noise.
        prompt_token_ids: the prompt.
        vocab_size: width V of the logits.
        eos_token_ids: tokens that end a text; ``min_tokens`` holds them back, ``ignore_eos`` or not (as in vLLM).
        constraint: forbids tokens before all else.

    Attributes:
        num_prompt: tokens in the prompt.
        num_output: tokens committed so far.
        inverse_temperature: what logits are multiplied by; 0 says greedy.
        truncates: min_p, top_k or top_p may drop tokens (never when greedy: they keep the most likely token).
        takes_argmax: the token is the argmax of the logits as they are, at every position.

    Raises:
        RequestError: a token id of ``logit_bias``, ``stop_token_ids`` or the prompt is not below ``vocab_size``.
    """

    __slots__ = (
        "_edits",
        "banned_ids",
        "bias_ids",
        "bias_values",
        "constraint",
        "counts",
        "inverse_temperature",
        "num_output",
        "num_prompt",
        "params",
        "sample_index",
        "seed",
        "takes_argmax",
        "truncates",
        "vocab_size",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        eos_token_ids: Iterable[int],
        constraint: Constraint | None = None,
    ) -> None:
        stop_ids = tuple(params.stop_token_ids or ())
        bias = dict(params.logit_bias or {})
        check_vocabulary(params, vocab_size)
        _check_ids("prompt_token_ids", prompt_token_ids, vocab_size)

        self.params = params
        self.constraint = constraint
        self.seed = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits, as the signed number that int64 tensors hold
        self.sample_index = sample_index
        self.num_prompt = len(prompt_token_ids)
        self.num_output = 0
        self.vocab_size = vocab_size
        self.inverse_temperature = _inverse_temperature(params.temperature)

        # An EOS id beyond the logits cannot be drawn; some checkpoints name such ids.
        banned = sorted({*stop_ids, *(token for token in eos_token_ids if 0 <= token < vocab_size)})
        self.banned_ids: _Ids = np.asarray(banned if params.min_tokens else [], dtype=np.int64)
        self.bias_ids: _Ids = np.fromiter(bias, dtype=np.int64, count=len(bias))
        self.bias_values: _Values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        repetition = params.repetition_penalty != 1.0
        penalties = repetition or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.counts = TokenCounts(prompt_token_ids if repetition else ()) if penalties else None
        self._edits = bool(bias) or penalties or constraint is not None
        self.truncates = self.inverse_temperature != 0.0 and (
            params.min_p > 0.0 or params.top_p < 1.0 or 0 < params.top_k < vocab_size
        )
        self.takes_argmax = self.greedy and not self._edits and not len(self.banned_ids)

    @property
    def greedy(self) -> bool:
        """Temperature 0: the most likely token, without noise."""
        return self.inverse_temperature == 0.0

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append accepted tokens to the output."""
        self.num_output += len(token_ids)
        if self.counts is not None:
            self.counts.add(token_ids)
        if self.constraint is not None:
            for token in token_ids:
                self.constraint.commit(token)


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """The place of one row of logits: after the prompt, the committed output and ``drafts`` (not yet accepted).

    A row sees drafts exactly as if they had been committed; plain decoding has none.
    """

    state: SamplerState
    drafts: Sequence[int] = ()

    @property
    def position(self) -> int:
        """Sequence position of the token that this row chooses (the prompt's first token is 0)."""
        return self.state.num_prompt + self.state.num_output + len(self.drafts)

    @property
    def holds_stops(self) -> bool:
        """Whether ``min_tokens`` still forbids EOS and stop tokens here."""
        return self.state.num_output + len(self.drafts) < self.state.params.min_tokens

    @property
    def edits(self) -> bool:
        """Whether single logits change here: a constraint, ``min_tokens``, ``logit_bias`` or a penalty."""
        return self.state._edits or (self.holds_stops and len(self.state.banned_ids) > 0)


def _inverse_temperature(temperature: float) -> float:
    if temperature < _GREEDY_BELOW:
        return 0.0
    return max(1.0 / temperature, _MIN_INVERSE_TEMPERATURE)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Whether the model has the token ids that the parameters name.

    Raises:
        RequestError: it does not.
    """
    _check_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has the token id {shown(token)}: this model's ids are 0 to {vocab_size - 1}", name
            )
