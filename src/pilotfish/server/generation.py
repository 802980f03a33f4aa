"""Serves one client call from its engine requests: as a whole or as a stream, until it is done or the client goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pilotfish.server.errors import ApiError
from pilotfish.server.host import EngineHost
from pilotfish.server.intake import client_gone
from pilotfish.server.middleware import ErrorResponse, Refusal
from pilotfish.server.prepare import Prepared
from pilotfish.server.protocol.answers import Choice, ChunkWriter, usage
from pilotfish.server.stream import Delta, StreamGroup

__all__ = ["Generation"]

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Generation(Response):
    """The response of a generating route.

    The status is sent with the first tokens, so that a request which the engine refuses gets the error's status. An
    error after that is the stream's last event.

    Args:
        host: of the engine.
        call: what to generate.
        arrived: when the request did, on the host's clock.
    """

    def __init__(self, host: EngineHost, call: Prepared, arrived: float) -> None:
        super().__init__()
        self._host = host
        self._call = call
        self._arrived = arrived
        self._group = StreamGroup()
        self._status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError | None = None
        try:
            self._group = self._host.submit(self._call.jobs, self._arrived)
        except ApiError as refusal:
            await Refusal(refusal)(scope, receive, send)
            return
        gone = asyncio.ensure_future(client_gone(receive))
        gone.add_done_callback(lambda _: self._host.cancel(self._group))
        try:
            if self._call.stream:
                error = await self._stream(send)
            else:
                await self._whole(send)
        except ApiError as refusal:
            error, self._status = refusal, refusal.status
            await ErrorResponse(refusal)(scope, receive, send)
        finally:
            gone.cancel()
            self._host.cancel(self._group)
            self._log(scope, error)

    async def _whole(self, send: Send) -> None:
        answer = self._call.answer
        choices = [Choice(index) for index in range(len(self._call.jobs) * answer.n)]
        async for news in self._group:
            for place, delta in news:
                choices[self._index(place, delta)].add(delta, answer.logprobs_of(delta))
        body = answer.whole(choices, self._group.outputs)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> ApiError | None:
        """Returns the error that ended a stream which had begun.

        Raises:
            ApiError: before that.
        """
        writer = ChunkWriter(self._call.answer)
        num_open = len(self._call.jobs) * self._call.answer.n
        started = False
        try:
            async for news in self._group:
                outputs = self._group.outputs
                parts: list[str] = []
                for place, delta in news:
                    parts += writer.write(self._index(place, delta), delta, outputs)
                    num_open -= delta.finish_reason is not None
                body = "".join(parts).encode("ascii") if num_open else writer.end(parts, outputs)
                if not started and body:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except ApiError as error:
            if not started:
                raise
            event = b"data: " + error.json() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return error
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    def _index(self, place: int, delta: Delta) -> int:
        """The choice's index in the answer: the completions of the first prompt, then those of the second."""
        return place * self._call.answer.n + delta.index

    def _log(self, scope: Scope, error: ApiError | None) -> None:
        """One line a request that the engine took, at its end."""
        answer, outputs = self._call.answer, self._group.outputs
        fields: dict[str, Any] = {
            "id": answer.answer_id,
            "path": scope["path"],
            "status": self._status,
            "stream": self._call.stream,
            "prompt_tokens": sum(len(job.prompt_token_ids) for job in self._call.jobs),
            "seconds": self._host.clock() - self._arrived,
        }
        if outputs:
            fields |= self._figures()
        if error is not None:
            fields |= {"error": error.code or error.message, "param": error.param}
        logger.log(logging.WARNING if self._status >= 500 else logging.INFO, "request", extra={"fields": fields})

    def _figures(self) -> Mapping[str, Any]:
        outputs = self._group.outputs
        used, first = usage(outputs), outputs[0].stats
        reasons = dict.fromkeys(c.finish_reason or "abort" for output in outputs for c in output.outputs)
        return {
            "tokens": used["completion_tokens"],
            "cached": used["prompt_tokens_details"]["cached_tokens"],
            "ttft_ms": first.ttft_ms,
            "tokens_per_second": first.tokens_per_second,
            "mean_accepted_length": first.speculation.mean_accepted_length,
            "finish": ",".join(reasons),
        }
