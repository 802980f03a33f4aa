"""Grammars from requests: compiled once, kept for the next request that asks for the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pilotfish.errors import RequestError
from pilotfish.grammar.matcher import GrammarMatcher, GrammarTime
from pilotfish.grammar.source import grammar_text
from pilotfish.grammar.vocabulary import TokenizerSource, build_vocabulary
from pilotfish.types import StructuredOutputs

__all__ = ["MAX_SOURCE_BYTES", "Grammar", "GrammarCompiler"]

MAX_SOURCE_BYTES = 64 << 10
"""Longest schema or grammar. What compiling costs, in time and in depth of recursion, grows with it."""

_MAX_CACHED = 64
"""Grammars that are kept."""

_STACK_BYTES = 128 << 20
"""The library's compiler recurses as deep as rules refer to each other. The longest source that is let in goes some
10,000 deep, which a stack of 8 MiB does not hold; memory is taken as it is used."""

_TRIAL_STEPS = 4
"""Tokens that a new grammar is tried with: into the first name of an object, where all its properties are open."""

_MAX_REASON = 300
"""Characters of the library's message, which quotes the grammar."""

_PANICS = ("panic:", "PanicException:")
"""What messages begin with where the library failed one of its own assertions, which bound the size of a grammar."""

_FIELD = "structured_outputs"


def _limits() -> LLParserLimits:
    """The library's defaults but for memory and time.

    A state of the lexer takes 1 to 2 kB, and there may be as many in each completion. An item of the parser takes 10 to
    20 microseconds where there are many, and a mask is not interrupted before it has so many.
    """
    return LLParserLimits(max_lexer_states=50_000, step_max_items=10_000, verbose_errors=False)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, not to be advanced itself.

    Attributes:
        start: the library's matcher before the first token.
        vocab_size: width V of the masks.
        eos_token_ids: what may follow a complete output.
    """

    start: LLMatcher
    vocab_size: int
    eos_token_ids: frozenset[int]

    def matchers(
        self, count: int, stop_token_ids: Collection[int] = (), *, ignore_eos: bool = False
    ) -> list[GrammarMatcher]:
        """The grammar for each of a request's completions, which share its time: see :class:`GrammarMatcher`."""
        stop, cpu_time = frozenset(stop_token_ids), GrammarTime()
        return [
            GrammarMatcher(self.start, self.vocab_size, self.eos_token_ids, stop, ignore_eos, cpu_time)
            for _ in range(count)
        ]

    def matcher(self, stop_token_ids: Collection[int] = (), *, ignore_eos: bool = False) -> GrammarMatcher:
        """The grammar for one completion."""
        return self.matchers(1, stop_token_ids, ignore_eos=ignore_eos)[0]


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe from several threads.

    Args:
        tokenizer: of the target; read when the first grammar is compiled.
        vocab_size: width V of the logits.
        eos_token_ids: the model's.
        max_cached: grammars that are kept, the least recently used one going first.
    """

    def __init__(
        self,
        tokenizer: TokenizerSource,
        vocab_size: int,
        eos_token_ids: Collection[int],
        max_cached: int = _MAX_CACHED,
    ) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        # An EOS id beyond the logits cannot be drawn; some checkpoints name such ids.
        self._eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._max_cached = max_cached
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._cache: OrderedDict[str, Grammar] = OrderedDict()  # by the library's form of the source
        self._cache_lock = threading.Lock()
        self._stack_lock = threading.Lock()

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The grammar of what a request asks, from the cache if it is there.

        Raises:
            RequestError: it is invalid, uses what is not supported, or is too large.
        """
        try:
            text = grammar_text(structured)
            num_bytes = len(text.encode())
        except (ValueError, TypeError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
            raise _refused(structured, str(error)) from error
        if num_bytes > MAX_SOURCE_BYTES:
            raise RequestError(
                f"{_FIELD}.{structured.kind} has {num_bytes} bytes: at most {MAX_SOURCE_BYTES} are allowed. Use a "
                "smaller one.",
                _FIELD,
            )
        with self._cache_lock:
            grammar = self._cache.get(text)
            if grammar is not None:
                self._cache.move_to_end(text)
                return grammar
        grammar = self._compile(structured, text)
        with self._cache_lock:
            self._cache[text] = grammar
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        return grammar

    @property
    def num_cached(self) -> int:
        """Grammars that are kept now."""
        return len(self._cache)

    def _compile(self, structured: StructuredOutputs, text: str) -> Grammar:
        if not self._eos_token_ids:
            raise RequestError(f"{_FIELD}: this model names no EOS token, which has to end such an output", _FIELD)
        vocabulary = self._read_vocabulary()
        made: list[tuple[LLMatcher | None, str]] = []

        def make() -> None:
            try:
                made.append(_start(vocabulary, text))
            except BaseException as error:  # a panic of the Rust library is no Exception
                made.append((None, f"{type(error).__name__}: {error}"))

        with self._stack_lock:  # the size is the process's, for threads that start from now on
            before = threading.stack_size(_STACK_BYTES)
            thread = threading.Thread(target=make, name="pilotfish-grammar")
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join()
        start, problem = made[0]
        if start is None or problem:
            raise _refused(structured, problem)
        return Grammar(start, self._vocab_size, self._eos_token_ids)

    def _read_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = build_vocabulary(self._source, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


def _start(vocabulary: LLTokenizer, text: str) -> tuple[LLMatcher, str]:
    """The matcher before the first token, and what is wrong with the grammar ("" if nothing is).

    The first steps are tried out: some grammars are found too large, or to match nothing, only there.
    """
    start = LLMatcher(vocabulary, text, log_level=0, limits=_limits())
    if start.is_error():
        return start, start.get_error()
    start.compute_bitmask()  # copies begin with what it has worked out
    trial, chose = start.deep_copy(), False
    for _ in range(_TRIAL_STEPS):
        bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if trial.is_stopped() or not len(allowed):
            break
        chose = chose or len(allowed) > 1
        if not trial.consume_token(int(allowed[0])):
            break
    error = trial.get_error()
    dead_end = error.startswith("NoExtension") or (not error and not trial.is_accepting() and not bits.any())
    if dead_end:
        # Where there was a choice, another one may go on.
        return start, "" if chose else "no output of this model's tokens matches it"
    return start, error


def _refused(structured: StructuredOutputs, reason: str) -> RequestError:
    if reason.startswith(_PANICS):  # a backtrace is nothing for who sent the request
        reason = "it is too large or too complex for the grammar library. Use a smaller or simpler one."
    short = " ".join(reason.replace("<non-verbose/>", "").split())
    short = short if len(short) <= _MAX_REASON else f"{short[:_MAX_REASON]}..."
    return RequestError(f"{_FIELD}.{structured.kind} cannot be used: {short}", _FIELD)
