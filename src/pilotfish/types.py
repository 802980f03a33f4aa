"""What a user hands in and gets back: sampling parameters and request outputs.

Names and shapes follow vLLM's, so that code written for it reads the same here. Nothing in this module imports torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

from pilotfish.errors import RequestError, shown

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "SpeculationStats",
    "StructuredOutputs",
]

FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 100
"""Most alternatives per position that ``SamplingParams.logprobs`` may ask for."""

MAX_N = 64
"""Most completions that one request may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the output of a request must look like. Exactly one field is set.

    Attributes:
        json: a JSON schema, as an object or as JSON text.
        json_object: any JSON object.
        regex: a regular expression (Rust's syntax, no look-around) that the whole output matches.
        choice: the output is one of these strings.
        grammar: a context-free grammar in llguidance's variant of Lark.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        name = "structured_outputs"
        if not isinstance(self.json_object, bool):
            raise RequestError(f"{name}.json_object={shown(self.json_object)}: must be true or false", name)
        kinds = self._kinds
        if len(kinds) != 1:
            allowed = ", ".join(field.name for field in fields(self))
            raise RequestError(f"{name} has {' and '.join(kinds) or 'nothing'}: set exactly one of {allowed}", name)
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            raise RequestError(f"{name}.json={shown(self.json)}: must be a JSON schema, an object or JSON text", name)
        for kind in ("regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(f"{name}.{kind}={shown(value)}: must be a string that is not empty", name)
        choice: object = self.choice
        if choice is not None:
            is_list = isinstance(choice, Sequence) and not isinstance(choice, (str, bytes)) and len(choice) > 0
            texts = choice if isinstance(choice, Sequence) and is_list else [choice]
            wrong = [text for text in texts if not is_list or not isinstance(text, str) or not text]
            if wrong:
                raise RequestError(f"{name}.choice has {shown(wrong[0])}: must be a list of strings, none empty", name)

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._kinds[0]

    @property
    def _kinds(self) -> list[str]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return [name for name, value in values.items() if value is not None and value is not False]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Logits of a position are processed in this order: the mask of ``structured_outputs``, ``min_tokens`` mask,
    ``logit_bias``, penalties, ``temperature``, ``min_p``, ``top_k``, ``top_p``; then one token is drawn.

    Attributes:
        n: completions per prompt. Each has its own noise, derived from the seed and its index.
        temperature: 0 means greedy. Otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to at least this. 1 keeps all.
        top_k: keep this many most likely tokens. 0 (or -1) keeps all.
        min_p: drop tokens less likely than this fraction of the most likely token's probability. 0 keeps all.
        presence_penalty: subtracted once from the logit of every token already in the output, in [-2, 2].
        frequency_penalty: subtracted for every occurrence in the output, in [-2, 2].
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive, multiplied if negative.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        min_tokens: no EOS and no stop token before this many tokens are out.
        max_tokens: at most this many tokens. None: up to the end of the context.
        stop: strings that end the output; the text ends before the string.
        stop_token_ids: token ids that end the output, as EOS does.
        include_stop_str_in_output: keep the matched stop string at the end of the text.
        ignore_eos: EOS does not end the output (``stop_token_ids`` still do).
        seed: makes the output reproducible, whatever else runs beside it. None: the engine draws one.
        logprobs: return the log-probability of each token and of this many most likely ones. None: none.
        skip_special_tokens: leave special tokens out of the text.
        speculate: let the engine's speculation scheme propose drafts for this request.
        num_drafts: at most so many drafts a step for this request. None: as many as the engine proposes.
        structured_outputs: what the output must look like. EOS ends it where it is complete, and only there:
            ``ignore_eos`` and ``min_tokens`` keep EOS out as long as the grammar allows anything else.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    speculate: bool = True
    num_drafts: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, low=0.0, hint="0 is greedy")
        _check_float("top_p", self.top_p, low=0.0, high=1.0, low_open=True, hint="1 keeps every token")
        _check_int("top_k", self.top_k, -1, None, hint="0 or -1 keeps every token")
        _check_float("min_p", self.min_p, low=0.0, high=1.0, hint="0 keeps every token")
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, low_open=True, hint="1 changes nothing")
        _check_logit_bias(self.logit_bias)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.num_drafts is not None:
            _check_int("num_drafts", self.num_drafts, 0, None, hint="0 proposes none")
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputs):
            raise RequestError(f"structured_outputs={structured!r}: must be StructuredOutputs", "structured_outputs")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}: must be true or false", name)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_int(name: str, value: object, low: int, high: int | None, hint: str = "") -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not ok:
        raise RequestError(f"{name}={shown(value)}: must be {allowed}" + (f" ({hint})" if hint else ""), name)


def _check_float(
    name: str,
    value: object,
    *,
    low: float,
    high: float | None = None,
    low_open: bool = False,
    hint: str = "",
    param: str | None = None,
) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if ok:
        assert isinstance(value, (int, float))
        ok = abs(value) <= sys.float_info.max  # an integer may be greater
        ok = ok and (value > low if low_open else value >= low) and (high is None or value <= high)
    if not ok:
        bound = f"above {low:g}" if low_open else f"at least {low:g}"
        bound += "" if high is None else f" and at most {high:g}"
        message = f"{name}={shown(value)}: must be a finite number {bound}" + (f" ({hint})" if hint else "")
        raise RequestError(message, param or name)


def _check_logit_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias={shown(bias)}: must map token ids to numbers from -100 to 100", "logit_bias")
    for token_id, value in bias.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(
                f"logit_bias has the key {shown(token_id)}: keys must be token ids (integers >= 0)", "logit_bias"
            )
        _check_float(f"logit_bias[{token_id}]", value, low=-100.0, high=100.0, param="logit_bias")


def _check_stop(stop: object) -> None:
    if stop is None:
        return
    if isinstance(stop, (bytes, bytearray)) or not isinstance(stop, (str, Sequence)):
        raise RequestError(f"stop={shown(stop)}: must be a string that is not empty, or a list of such strings", "stop")
    for text in [stop] if isinstance(stop, str) else stop:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop={shown(text)}: every stop must be a string that is not empty", "stop")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(f"stop={shown(text)}: has a lone surrogate, which no output can hold", "stop")


def _check_stop_token_ids(ids: object) -> None:
    if ids is None:
        return
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        raise RequestError(f"stop_token_ids={shown(ids)}: must be a list of token ids", "stop_token_ids")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(
                f"stop_token_ids has the entry {shown(token_id)}: must be an integer >= 0", "stop_token_ids"
            )


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (or logit, by ``logprobs_mode``) at one position.

    ``rank`` counts from 1 (the most likely token); ``decoded_token`` is the token's own text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class SpeculationStats:
    """What became of drafts, for one request or for the engine. Only emitted tokens count: not what a stop cut off.

    Attributes:
        scheme: the scheme's name, ``none`` for plain decoding.
        num_drafts: most drafts a step.
        exact: False where the verification rule is lossy.
        num_steps: steps that verified at least one draft.
        num_drafted: drafts proposed.
        num_accepted: drafts accepted and emitted.
        num_emitted: tokens emitted by those steps, the target's own included.
        drafted_at: how often there was a draft at each position of a proposal.
        accepted_at: how often it was accepted and emitted.
        reached_at: how often there was one, and every draft before it was accepted.
    """

    scheme: str = "none"
    num_drafts: int = 0
    exact: bool = True
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)

    def record(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one step of one sequence: drafts proposed, drafts emitted, tokens emitted."""
        if num_drafted == 0:
            return
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        missing = num_drafted - len(self.drafted_at)
        for counts in (self.drafted_at, self.accepted_at, self.reached_at):
            counts.extend([0] * missing)
        for position in range(num_drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < num_accepted
            self.reached_at[position] += position <= num_accepted

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a step, the target's own included; None before the first step that verified a draft."""
        return self.num_emitted / self.num_steps if self.num_steps else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Joint acceptance: how often the draft at each position was accepted, of the times there was one."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def conditional_acceptance_by_position(self) -> list[float]:
        """As above, of the times that there was one and every draft before it was accepted."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted_at, self.reached_at, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return {
            "scheme": self.scheme,
            "num_drafts": self.num_drafts,
            "exact": self.exact,
            "num_steps": self.num_steps,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "num_emitted": self.num_emitted,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_by_position": self.acceptance_by_position,
            "conditional_acceptance_by_position": self.conditional_acceptance_by_position,
        }


@dataclass(slots=True)
class RequestStats:
    """Timings of one request, in seconds on the monotonic clock unless the name says otherwise.

    Attributes:
        arrival_time: when the engine accepted the request.
        first_scheduled_time: when its first prompt token was scheduled.
        first_token_time: when its first token was chosen.
        last_token_time: when its last token was chosen.
        token_times: when each token of completion 0 was chosen.
        num_cached_tokens: prompt tokens found in the prefix cache (of the last prefill).
        num_steps: engine steps that gave this request at least one token.
        num_preemptions: how often it lost its pages and was computed again.
        speculation: what became of its drafts.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token from arrival, in milliseconds."""
        if self.first_token_time is None:
            return None
        return (self.first_token_time - self.arrival_time) * 1e3

    @property
    def arrivals_ms(self) -> list[float]:
        """Times between successive arrivals of tokens, in milliseconds. Tokens of one step arrive together."""
        times = sorted(set(self.token_times))
        return [(b - a) * 1e3 for a, b in pairwise(times)]

    @property
    def itl_ms_p50(self) -> float | None:
        """Median of :attr:`arrivals_ms`; None below two arrivals."""
        gaps = sorted(self.arrivals_ms)
        return gaps[len(gaps) // 2] if gaps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first over the time since the first; None below two tokens."""
        if len(self.token_times) < 2:
            return None
        elapsed = self.token_times[-1] - self.token_times[0]
        return (len(self.token_times) - 1) / elapsed if elapsed > 0 else None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. ``logprobs[i]`` maps token ids to :class:`Logprob` for ``token_ids[i]``.

    ``is_draft[i]`` says that ``token_ids[i]`` was an accepted draft, ``text_ends[i]`` how long the text was after it.
    ``finish_reason`` is None while the completion runs. ``stop_reason`` is the stop string or stop token id that ended
    it, None for EOS and for ``length``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    is_draft: list[bool] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions; ``error`` is set when the request could not be served, or not to its end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    finished: bool = False
    error: RequestError | None = None
