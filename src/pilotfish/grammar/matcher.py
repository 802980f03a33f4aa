"""Where one completion is in its grammar, with and without the drafts that are not yet accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

__all__ = ["GrammarMatcher", "GrammarTime"]

Mask = NDArray[np.bool_]

_MAX_REASON = 300

_TIME_AT_ONCE = 1.0
_TIME_PER_TOKEN = 0.01
"""CPU seconds. A mask takes a ten-thousandth to a thousandth."""

_TOO_SLOW = (
    "it took more than {:g} s, and {:g} ms for each token, to say which tokens may come next; where a text can be read "
    "in many ways, each of them costs time"
)


class GrammarTime:
    """What the matchers of one request may take of the host: a second of CPU time, and ten milliseconds a token.

    All requests wait for the masks of one, and a small grammar can be so ambiguous that each takes as long as a hundred
    steps. Use it as a context around the library's work.

    Args:
        clock: CPU seconds of the calling thread.
    """

    __slots__ = ("_began", "_clock", "_left")

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._left = _TIME_AT_ONCE
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._left -= self._clock() - self._began

    def earn(self) -> None:
        """A token was committed."""
        self._left = min(self._left + _TIME_PER_TOKEN, _TIME_AT_ONCE)

    @property
    def is_used_up(self) -> bool:
        return self._left < 0.0


class GrammarMatcher:
    """The grammar's state after the committed tokens of one completion.

    Masks of drafted positions are computed by running the parser on over the drafts. It stays there, so that the
    position after one more draft costs one more token, and that verification finds the masks that drafting made. A
    commit of something else takes it back.

    Only EOS ends the output, or one of the request's stop tokens, and only where the grammar is complete. Both are
    ends here, unlike any other token: nothing but EOS is allowed after one.

    Args:
        start: the library's matcher before the first token; it is copied.
        vocab_size: width V of the masks.
        eos_token_ids: at least one, all below V.
        stop_token_ids: end the output as EOS does, where the grammar is complete and does not itself go on with them.
        ignore_eos: EOS ends the output only where the grammar allows no other token.
        cpu_time: shared with the request's other matchers.

    Attributes:
        error: why a token was chosen that the grammar does not allow: it could not be followed to there, for a limit of
            the parser's, for the time that it took, or for a dead end. EOS is allowed there for want of anything else.
            None: all is well.
    """

    __slots__ = (
        "_broken",
        "_committed",
        "_consumed",
        "_ended",
        "_ends",
        "_eos",
        "_eos_list",
        "_ignore_eos",
        "_masks",
        "_matcher",
        "_path",
        "_start",
        "_stop",
        "_time",
        "_vocab_size",
        "error",
    )

    def __init__(
        self,
        start: LLMatcher,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int],
        ignore_eos: bool,
        cpu_time: GrammarTime,
    ) -> None:
        self.error: str | None = None
        self._start = start
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._eos_list = sorted(eos_token_ids)
        self._stop = stop_token_ids - eos_token_ids
        self._ignore_eos = ignore_eos
        self._time = cpu_time
        self._matcher = start.deep_copy()
        self._committed: list[int] = []
        self._ended = False
        self._path: list[int] = []  # drafts
        self._consumed = 0  # drafts that the library's matcher has seen: all before an end or a forbidden one
        self._masks: list[Mask] = []  # after so many drafts
        self._ends: list[frozenset[int]] = []  # tokens that end the output there
        self._broken: tuple[int, str] | None = None  # after how many drafts it cannot be followed further, and why

    @property
    def ended(self) -> bool:
        """Whether an EOS or stop token was committed that ends the output, or there was an error."""
        return self._ended

    def allowed(self, drafts: Sequence[int] = ()) -> Mask:
        """The tokens that may come after ``drafts``, bool [V], at least one. Do not write to it.

        After a draft that the grammar forbids, as after one that ends the output, it is EOS.
        """
        self._follow(drafts)
        return self._mask(len(drafts))

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of the drafts the grammar allows, one after the other; one that ends the output is the last."""
        for position, token in enumerate(drafts):
            if not self.allowed(drafts[:position])[token]:
                return position
            if token in self._ends[position]:
                return position + 1
        return len(drafts)

    def commit(self, token: int) -> None:
        """Take one token of the output. Drafts that begin with it stay as far as they go on behind it."""
        if not self._path or self._path[0] != token:
            self._back_to(0)
            self._advance(token)
        allowed, ends = bool(self._masks[0][token]), token in self._ends[0]
        if self._broken is not None:
            position, reason = self._broken
            self.error = reason if position == 0 else self.error
            self._broken = (max(position - 1, 0), reason)
        elif not allowed:
            self.error = f"the token {token} was chosen, which the grammar forbids"
        self._ended = self._ended or ends or self.error is not None
        self._consumed = max(self._consumed - 1, 0)
        self._committed.append(token)
        self._time.earn()
        del self._path[0], self._masks[0], self._ends[0]

    def _follow(self, drafts: Sequence[int]) -> None:
        common = 0
        while common < min(len(drafts), len(self._path)) and drafts[common] == self._path[common]:
            common += 1
        if common < len(drafts):
            self._back_to(common)
            for token in drafts[common:]:
                self._advance(token)

    def _back_to(self, num_drafts: int) -> None:
        """Forget the drafts from there on."""
        del self._path[num_drafts:], self._masks[num_drafts + 1 :], self._ends[num_drafts + 1 :]
        if self._broken is not None and self._broken[0] > num_drafts:
            # The library's matcher never leaves an error; but plain decoding would not have met this one.
            self._broken = None
            self._matcher = self._start.deep_copy()
            with self._time:
                self._matcher.consume_tokens([*self._committed, *self._path])
        elif self._consumed > num_drafts:
            self._matcher.rollback(self._consumed - num_drafts)
        self._consumed = min(self._consumed, num_drafts)

    def _advance(self, token: int) -> None:
        position = len(self._path)
        goes_on = bool(self._mask(position)[token]) and token not in self._ends[position]
        if goes_on and self._at_matcher(position):
            with self._time:
                is_taken = self._matcher.consume_token(token)
            if is_taken:
                self._consumed += 1
            else:
                self._break(position + 1, self._matcher.get_error())
        self._path.append(token)

    def _at_matcher(self, position: int) -> bool:
        """Whether the library's matcher is there: no draft before it was an end or forbidden."""
        return position == self._consumed and not self._ended and self._broken is None

    def _mask(self, position: int) -> Mask:
        if position == len(self._masks):
            mask, ends = self._compute() if self._at_matcher(position) else self._only_eos()
            self._masks.append(mask)
            self._ends.append(ends)
        return self._masks[position]

    def _compute(self) -> tuple[Mask, frozenset[int]]:
        if self._time.is_used_up:
            self._break(self._consumed, _TOO_SLOW.format(_TIME_AT_ONCE, 1000 * _TIME_PER_TOKEN))
            return self._only_eos()
        with self._time:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        mask[self._eos_list] = False
        ends: frozenset[int] = frozenset()
        if self._matcher.is_accepting():
            ends = self._eos.union(token for token in self._stop if not mask[token])
            if self._ignore_eos and mask.any():
                ends -= self._eos
            mask[list(ends)] = True
        if self._matcher.is_error() or not mask.any():
            self._break(self._consumed, self._matcher.get_error())
            return self._only_eos()
        return mask, ends

    def _only_eos(self) -> tuple[Mask, frozenset[int]]:
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[self._eos_list] = True
        return mask, self._eos

    def _break(self, position: int, error: str) -> None:
        reason = " ".join(error.replace("<non-verbose/>", "").split())
        self._broken = (position, reason[:_MAX_REASON] or "no token of this model goes on from here")
