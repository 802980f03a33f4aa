"""What has come of requests under way, between the engine's thread and whoever reads it.

The engine's thread only ever says how far a completion has got (:class:`Mark`); texts and tokens stay in the engine's
output, which grows at its end alone, and are cut out when they are read. A reader that is slow therefore costs two
integers, not a copy of what it has not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pilotfish.server.protocol.token_bytes import REPLACEMENT, TokenBytes
from pilotfish.types import CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams

__all__ = ["Delta", "Job", "Mark", "RequestStream", "StreamGroup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request for the engine.

    Attributes:
        request_id: unique among those under way.
        prompt_token_ids: the prompt.
        params: how its tokens are chosen.
        token_bytes: of the model.
        streams: the reader wants output as it comes, not only at the end.
        keep_steps: the reader wants one delta for each engine step, however late it reads.
        param_names: fields of the client's request by the engine's name, where they differ.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    token_bytes: TokenBytes
    streams: bool = True
    keep_steps: bool = False
    param_names: Mapping[str, str] = field(default_factory=dict)


class Mark(NamedTuple):
    """How far a completion was after a step: which one, its number of tokens, and whether that was all."""

    completion: int
    num_tokens: int
    finished: bool


@dataclass(slots=True)  # frozen would be several times slower to make, and there is one for each chunk
class Delta:
    """What one or more steps added to one completion. Not to be changed.

    Attributes:
        index: of the completion, below ``n``.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        is_draft: of each, whether it was an accepted draft.
        text_ends: of each, how long the completion's text was after it, in characters.
        text_start: how long the completion's text was before the delta.
        logprobs: of each new token, for requests that asked for them.
        finish_reason: in the completion's last delta.
        stop_reason: the stop string or token that ended it.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    is_draft: Sequence[bool]
    text_ends: Sequence[int]
    text_start: int
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def pieces(self) -> list[str]:
        """What each token added to the text: together they are :attr:`text`."""
        starts = [self.text_start, *self.text_ends[:-1]]
        return [
            self.text[a - self.text_start : b - self.text_start] for a, b in zip(starts, self.text_ends, strict=True)
        ]


@dataclass(slots=True)
class _Cursor:
    """What of a completion has been read."""

    num_tokens: int = 0
    num_chars: int = 0


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request as its reader sees it. Only the event loop's thread touches it.

    Attributes:
        job: what was asked.
        submit_time: when, on the host's clock.
        group: the requests it is read together with.
        output: the engine's; None before its first tokens. The engine's thread appends to it.
        error: why the request failed.
        closed: the engine has nothing more to do for it.
    """

    job: Job
    submit_time: float
    group: StreamGroup
    output: RequestOutput | None = None
    error: Exception | None = None
    closed: bool = False
    timer: asyncio.TimerHandle | None = None
    _marks: list[Mark] = field(default_factory=list)
    _cursors: dict[int, _Cursor] = field(default_factory=dict)

    def push(self, output: RequestOutput, marks: Sequence[Mark]) -> None:
        """Note how far the request is. Marks that nobody has read are replaced, unless every step is wanted."""
        self.output = output
        if self._marks and not self.job.keep_steps:
            latest = {mark.completion: mark for mark in self._marks}
            latest.update((mark.completion, mark) for mark in marks)
            self._marks = list(latest.values())
        else:
            self._marks.extend(marks)
        self.group.wake()

    def fail(self, error: Exception) -> None:
        """End it with an error, unless it has ended."""
        if not self.closed and self.error is None:
            self.error = error
            self.group.wake()

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        if self.timer is not None:
            self.timer.cancel()
        self.group.wake()

    @property
    def has_news(self) -> bool:
        return bool(self._marks) or self.error is not None

    def take(self) -> list[Delta]:
        """All that is new, in order.

        Raises:
            Exception: :attr:`error`.
        """
        if self.error is not None:
            raise self.error
        marks, self._marks = self._marks, []
        return [self._delta(mark) for mark in marks]

    def _delta(self, mark: Mark) -> Delta:
        assert self.output is not None
        c = self.output.outputs[mark.completion]
        cursor = self._cursors.setdefault(mark.completion, _Cursor())
        start, end = cursor.num_tokens, mark.num_tokens
        text_start, ends = cursor.num_chars, c.text_ends[start:end]
        if mark.finished and ends:
            ends[-1] = _end_of_text(c, self.job)
        text_end = ends[-1] if ends else text_start
        cursor.num_tokens, cursor.num_chars = end, text_end
        return Delta(
            index=mark.completion,
            text=c.text[text_start:text_end],
            token_ids=c.token_ids[start:end],
            is_draft=c.is_draft[start:end],
            text_ends=ends,
            text_start=text_start,
            logprobs=None if c.logprobs is None else c.logprobs[start:end],
            finish_reason=c.finish_reason if mark.finished else None,
            stop_reason=c.stop_reason if mark.finished else None,
        )


def _end_of_text(completion: CompletionOutput, job: Job) -> int:
    """Where a finished completion's text ends: before a character that its tokens left incomplete.

    The engine ends such a text with U+FFFD, as decoding its tokens does. It came with the last token, so what earlier
    tokens wrote stays, whatever it is. A stop string ends the text itself, before what may be incomplete.
    """
    text, stop_reason = completion.text, completion.stop_reason
    if isinstance(stop_reason, str) or not text.endswith(REPLACEMENT):
        return len(text)
    token_ids = completion.token_ids
    if completion.finish_reason == "stop" and not job.params.include_stop_str_in_output:
        token_ids = token_ids[:-1]  # the token that ends it is not in the text
    ends = completion.text_ends
    before = ends[-2] if len(ends) > 1 else 0
    skip = job.params.skip_special_tokens
    return before + len(job.token_bytes.without_part(text[before:], token_ids, skip_special_tokens=skip))


class StreamGroup:
    """The requests of one client call, read together: an async iterator of what is new in them.

    Each item is a list of (place of the request in the call, :class:`Delta`). Iteration ends when all have finished,
    and raises what one of them failed with.
    """

    def __init__(self) -> None:
        self.streams: list[RequestStream] = []
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Something is new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The engine's outputs of all requests that have one."""
        return [stream.output for stream in self.streams if stream.output is not None]

    def __aiter__(self) -> StreamGroup:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        while True:
            news: list[tuple[int, Delta]] = []
            for place, stream in enumerate(self.streams):
                if stream.has_news:
                    news += [(place, delta) for delta in stream.take()]
            if news:
                return news
            if all(stream.closed for stream in self.streams):
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
