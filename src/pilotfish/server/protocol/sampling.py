"""A request's fields as the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotfish.errors import RequestError
from pilotfish.server.errors import bad_request, from_request_error
from pilotfish.server.protocol.body import short
from pilotfish.server.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest
from pilotfish.server.protocol.structured import structured_outputs
from pilotfish.types import SamplingParams

__all__ = ["DEFAULT_COMPLETION_TOKENS", "parameter_names", "sampling_params"]

DEFAULT_COMPLETION_TOKENS = 16
"""What ``max_tokens`` of a completion is where it is not given, as with OpenAI."""

MAX_STOPS = 64
MAX_STOP_LENGTH = 4_096
"""Every token of the output is compared with every stop string, in the thread that serves all requests."""

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "seed",
)  # fmt: skip


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """The parameters; ``max_tokens`` is None where the request leaves it open.

    Raises:
        ApiError: 400 with ``param``: a value that is not allowed, or two that contradict each other.
    """
    values: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    values = {name: value for name, value in values.items() if value is not None}
    _check_stop(request.stop)
    if request.logit_bias is not None:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    if request.speculation is not None:
        values["speculate"] = request.speculation.enabled
        values["num_drafts"] = request.speculation.num_drafts
    structured = structured_outputs(request)
    if structured is not None:
        values["structured_outputs"] = structured.value
    values["max_tokens"] = _max_tokens(request)
    values["logprobs"] = _logprobs(request)
    if isinstance(request, CompletionRequest):
        _check_best_of(request)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise from_request_error(error, parameter_names(request)) from None


def parameter_names(request: GenerationRequest) -> Mapping[str, str]:
    """Fields of the request by the engine's names for them, where these differ."""
    names: dict[str, str] = {}
    if isinstance(request, ChatRequest):
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    structured = structured_outputs(request)
    return names if structured is None else {**names, **structured.names}


def _max_tokens(request: GenerationRequest) -> int | None:
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise bad_request(
            f"max_completion_tokens={short(request.max_completion_tokens)} and max_tokens={short(request.max_tokens)}: "
            "both mean the same. Send one of them.",
            "max_completion_tokens",
        )
    return request.max_completion_tokens


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request(f"top_logprobs={short(request.top_logprobs)}: needs logprobs to be true.", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request(
            f"best_of={short(request.best_of)}: is supported only where it equals n={short(request.n or 1)}. Leave it "
            "out.",
            "best_of",
        )


def _check_stop(stop: object) -> None:
    if stop is None:
        return
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop has {len(stops)} strings: at most {MAX_STOPS} are allowed.", "stop")
    for text in stops:
        if not isinstance(text, str):
            raise bad_request(f"stop={short(text)}: must be a string, or a list of strings.", "stop")
        if len(text) > MAX_STOP_LENGTH:
            raise bad_request(
                f"stop has a string of {len(text)} characters: at most {MAX_STOP_LENGTH} are allowed.", "stop"
            )


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    keys: dict[int, str] = {}
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(
                f'logit_bias has the key {short(key)}: keys must be token ids, such as "42".', "logit_bias"
            )
        first = keys.setdefault(int(key), key)
        if first != key:
            raise bad_request(
                f"logit_bias has the keys {short(first)} and {short(key)}: both are the token {int(key)}. Send one of "
                "them.",
                "logit_bias",
            )
    return {token_id: bias[key] for token_id, key in keys.items()}
