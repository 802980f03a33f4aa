"""From a request's bytes to requests of the engine: all that can be done before the engine's thread sees them.

It runs in a thread of its own, for a prompt or a grammar may take long, and nothing else should wait for that.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pilotfish.engine import checked_prompt
from pilotfish.errors import RequestError
from pilotfish.server.errors import ApiError, from_request_error
from pilotfish.server.host import EngineHost
from pilotfish.server.protocol.answers import Answer
from pilotfish.server.protocol.body import parse_json, short, validated
from pilotfish.server.protocol.prompts import chat_tokens, completion_prompts
from pilotfish.server.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from pilotfish.server.protocol.sampling import DEFAULT_COMPLETION_TOKENS, parameter_names, sampling_params
from pilotfish.server.protocol.token_bytes import TokenBytes
from pilotfish.server.settings import ServerSettings
from pilotfish.server.stream import Job
from pilotfish.types import SamplingParams

__all__ = ["Prepared", "Preparer"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A client call that is ready for the engine.

    Attributes:
        jobs: one for each prompt.
        answer: how its answer is written.
        stream: as server-sent events.
    """

    jobs: list[Job]
    answer: Answer
    stream: bool


class Preparer:
    """Prepares the calls of one server.

    Args:
        host: of the engine.
        settings: of the server.
        fingerprint: that answers carry.
    """

    def __init__(self, host: EngineHost, settings: ServerSettings, fingerprint: str) -> None:
        self._host = host
        self._settings = settings
        self._fingerprint = fingerprint
        self._tokenizer = host.tokenizer.for_context(host.max_model_len)
        self._token_bytes = TokenBytes(host.tokenizer)
        # Its first call decides how all others work, which threads must not do at the same time.
        host.tokenizer.encode("a")

    def chat(self, raw: bytes) -> Prepared:
        """``POST /v1/chat/completions``.

        Raises:
            ApiError: 400 or 404.
        """
        request = validated(ChatRequest, parse_json(raw))
        self.check_model(request.model)
        params = sampling_params(request)
        return self._prepared(request, [(chat_tokens(self._tokenizer, request.messages), params)], "chat")

    def completion(self, raw: bytes) -> Prepared:
        """``POST /v1/completions``.

        Raises:
            ApiError: 400 or 404.
        """
        request = validated(CompletionRequest, parse_json(raw))
        self.check_model(request.model)
        if request.max_tokens is None:
            request.max_tokens = max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
            is_default = True
        else:
            is_default = False
        params = sampling_params(request)
        prompts = completion_prompts(self._tokenizer, request.prompt, self._host.vocab_size)
        asked = [(prompt, self._cut_to_room(params, prompt) if is_default else params) for prompt in prompts]
        return self._prepared(request, asked, "completion")

    def check_model(self, model: str | None) -> None:
        """Whether a request's ``model`` is served here; None is.

        Raises:
            ApiError: 404.
        """
        names = self._settings.model_names
        if model is not None and model not in names:
            raise ApiError(
                404,
                f"The model {short(model)} does not exist here. This server has {', '.join(names)}.",
                param="model",
                code="model_not_found",
            )

    def _cut_to_room(self, params: SamplingParams, prompt: list[int]) -> SamplingParams:
        """A prompt that ends close to the context's end gets what room there is, whatever others it comes with."""
        room = self._host.max_model_len - len(prompt)
        return replace(params, max_tokens=max(min(params.max_tokens or 1, room), params.min_tokens, 1))

    def _prepared(
        self,
        request: GenerationRequest,
        asked: list[tuple[list[int], SamplingParams]],
        kind: Literal["chat", "completion"],
    ) -> Prepared:
        """The call for prompts and the parameters of each, which differ in ``max_tokens`` alone."""
        names = parameter_names(request)
        self._check(asked, names)
        params = asked[0][1]
        options = (request.stream_options or StreamOptions()) if request.stream else StreamOptions()
        answer = Answer(
            kind=kind,
            answer_id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            model=request.model or self._settings.model_name,
            created=int(time.time()),
            fingerprint=self._fingerprint,
            n=params.n,
            logprobs=params.logprobs,
            token_bytes=self._token_bytes,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
            include_stats=request.include_speculation_stats,
        )
        jobs = [
            Job(
                request_id=f"{answer.answer_id}-{place}",
                prompt_token_ids=prompt,
                params=prompt_params,
                token_bytes=self._token_bytes,
                streams=request.stream,
                keep_steps=request.include_speculation_stats,
                param_names=names,
            )
            for place, (prompt, prompt_params) in enumerate(asked)
        ]
        return Prepared(jobs, answer, request.stream)

    def _check(self, asked: list[tuple[list[int], SamplingParams]], names: Mapping[str, str]) -> None:
        """Refuse what the engine would refuse, and compile the grammar, so that its thread finds it done."""
        host = self._host
        try:
            for prompt, params in asked:
                checked_prompt(prompt, params, max_model_len=host.max_model_len, vocab_size=host.vocab_size)
            structured = asked[0][1].structured_outputs
            if structured is not None:
                host.ready_engine().compile_structured_outputs(structured)
        except RequestError as error:
            raise from_request_error(error, names) from None
