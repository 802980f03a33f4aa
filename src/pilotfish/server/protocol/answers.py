"""Engine output as OpenAI's response objects: whole, and as the chunks of a stream.

A stream has a chunk for each step of each choice. Its constant parts are encoded once; a chunk costs one small
``json.dumps``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pilotfish.server.protocol.logprobs import chat_logprobs, completion_logprobs
from pilotfish.server.protocol.token_bytes import TokenBytes
from pilotfish.server.stream import Delta
from pilotfish.server.totals import add_speculation
from pilotfish.types import RequestOutput, RequestStats, SpeculationStats

__all__ = ["Answer", "Choice", "ChunkWriter", "speculation_stats", "usage"]

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How the answers of one client call are written.

    Attributes:
        kind: chat or completion.
        answer_id: of the response.
        model: the name it carries.
        created: Unix time.
        fingerprint: what could change outputs: model, settings, version.
        n: choices a prompt.
        logprobs: alternatives that were asked for; None: no log-probabilities.
        token_bytes: of the model.
        include_usage: a last chunk with usage, and ``"usage": null`` in the others.
        continuous_usage: usage so far in every chunk.
        include_stats: statistics of speculation, and the tokens of each chunk.
    """

    kind: Literal["chat", "completion"]
    answer_id: str
    model: str
    created: int
    fingerprint: str
    n: int = 1
    logprobs: int | None = None
    token_bytes: TokenBytes
    include_usage: bool = False
    continuous_usage: bool = False
    include_stats: bool = False

    # Whole

    def whole(self, choices: Sequence[Choice], outputs: Sequence[RequestOutput]) -> bytes:
        """The response of a call that does not stream."""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        body = self._head(name) | {"choices": [self._choice(choice) for choice in choices], "usage": usage(outputs)}
        if self.include_stats:
            body["pilotfish"] = {"stats": speculation_stats(outputs)}
        return _dumps(body).encode("ascii")

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        is_chat = self.kind == "chat"
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
        return {
            "index": choice.index,
            **content,
            "logprobs": None if self.logprobs is None else _joined(choice.logprobs, self.kind),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        """Log-probabilities of a delta in the shape of the answer; None where nobody asked."""
        if self.logprobs is None or delta.logprobs is None:
            return None
        if self.kind == "chat":
            return chat_logprobs(delta, self.logprobs, self.token_bytes)
        return completion_logprobs(delta, self.token_bytes)

    # Streamed

    def head(self) -> str:
        """What every chunk begins with, up to its choices."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return f"data: {_dumps(self._head(name))[:-1]}, "

    def first(self, index: int) -> str:
        """The choice of the chunk that opens a chat's choice."""
        return f'{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, ' + _OPEN

    def step(self, index: int, delta: Delta) -> str:
        """The choice of a chunk with text."""
        text = _dumps(delta.text)
        content = f'"delta": {{"content": {text}}}' if self.kind == "chat" else f'"text": {text}'
        logprobs = "null" if delta.logprobs is None else _dumps(self.logprobs_of(delta))
        return f'{{"index": {index}, {content}, "logprobs": {logprobs}, "finish_reason": null}}'

    def last(self, index: int, delta: Delta) -> str:
        """The choice of the chunk that ends a choice."""
        content = '"delta": {}' if self.kind == "chat" else '"text": ""'
        return (
            f'{{"index": {index}, {content}, "logprobs": null, "finish_reason": {_dumps(delta.finish_reason)}, '
            f'"stop_reason": {_dumps(delta.stop_reason)}}}'
        )

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


_OPEN = '"logprobs": null, "finish_reason": null}'


@dataclass(slots=True)
class Choice:
    """One choice of a response that does not stream, while its deltas come."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta, logprobs: dict[str, Any] | None) -> None:
        """Take what is new."""
        self.texts.append(delta.text)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class ChunkWriter:
    """Writes the server-sent events of one answer, in order."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._head = answer.head()
        self._opened: set[int] = set()

    def write(self, index: int, delta: Delta, outputs: Sequence[RequestOutput]) -> list[str]:
        """The chunks of a delta: the choice's first one, its text, its end."""
        answer, parts = self._answer, []
        if index not in self._opened:
            self._opened.add(index)
            if answer.kind == "chat":
                parts.append(self._chunk(answer.first(index), outputs))
        tokens = answer.include_stats and bool(delta.token_ids)
        if delta.text or tokens or (delta.token_ids and answer.logprobs is not None):
            parts.append(self._chunk(answer.step(index, delta), outputs, _tokens(delta) if tokens else None))
        if delta.finish_reason is not None:
            parts.append(self._chunk(answer.last(index, delta), outputs))
        return parts

    def end(self, parts: list[str], outputs: Sequence[RequestOutput]) -> bytes:
        """The stream's last bytes: ``parts``, the last chunk with what comes once, and the end's mark.

        Args:
            parts: chunks that :meth:`write` made and that are not sent yet, at least one.
            outputs: of all requests.
        """
        answer = self._answer
        stats = {"stats": speculation_stats(outputs)} if answer.include_stats else None
        if answer.include_usage:
            more = f'"choices": [], "usage": {_dumps(usage(outputs))}' + _extra(stats)
            parts = [*parts, f"{self._head}{more}}}\n\n"]
        elif stats is not None:
            parts = [*parts[:-1], parts[-1].removesuffix("}\n\n") + _extra(stats) + "}\n\n"]
        return "".join(parts).encode("ascii") + _DONE

    def _chunk(self, choice: str, outputs: Sequence[RequestOutput], extra: dict[str, Any] | None = None) -> str:
        more = ""
        if self._answer.continuous_usage:
            more = f', "usage": {_dumps(usage(outputs))}'
        elif self._answer.include_usage:
            more = ', "usage": null'
        return f'{self._head}"choices": [{choice}]{more}{_extra(extra)}}}\n\n'


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of all requests of a call together; a prompt counts once, however many completions it has."""
    prompt = completion = cached = accepted = drafted = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        completion += sum(len(c.token_ids) for c in output.outputs)
        cached += output.stats.num_cached_tokens
        accepted += output.stats.speculation.num_accepted
        drafted += output.stats.speculation.num_drafted
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def speculation_stats(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """``pilotfish.stats``: what became of drafts, and the timings of the call's first request."""
    total, first = SpeculationStats(), outputs[0].stats
    for output in outputs:
        total = add_speculation(total, output.stats.speculation)
    return total.as_dict() | _timings(first) | {
        "num_cached_tokens": sum(output.stats.num_cached_tokens for output in outputs),
        "num_preemptions": sum(output.stats.num_preemptions for output in outputs),
        "engine_steps": sum(output.stats.num_steps for output in outputs),
    }  # fmt: skip


def _timings(stats: RequestStats) -> dict[str, float | None]:
    return {
        "ttft_ms": stats.ttft_ms,
        "itl_ms_p50": stats.itl_ms_p50,
        "tokens_per_second": stats.tokens_per_second,
    }


def _tokens(delta: Delta) -> dict[str, Any]:
    return {
        "tokens": [
            {"id": token, "text": text, "is_draft": is_draft}
            for token, text, is_draft in zip(delta.token_ids, delta.pieces, delta.is_draft, strict=True)
        ]
    }


def _extra(value: dict[str, Any] | None) -> str:
    return "" if value is None else f', "pilotfish": {_dumps(value)}'


def _joined(parts: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Log-probabilities of one choice from those of its deltas."""
    if kind == "chat":
        return {"content": [token for part in parts for token in part["content"]], "refusal": None}
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts for value in part[name]] for name in names}


def _dumps(value: object) -> str:
    """ASCII: some readers of event streams take U+2028 for the end of a line."""
    return json.dumps(value)
