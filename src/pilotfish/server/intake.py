"""What happens to a request before the engine has it: its body is read, and prepared in a thread, a few at once.

A request that ends early (its client goes, its time is over, the server stops) gives up its place and its body at
once. Work that is already in a thread cannot be stopped: it keeps its slot to the end, and what comes of it is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from pilotfish.server.errors import ApiError, bad_request
from pilotfish.server.host import Arrival, EngineHost

__all__ = ["Intake", "client_gone"]

_T = TypeVar("_T")

_SHORT_BODY = 64 * 1024
"""Bytes of a body up to which its preparation is quick, grammars aside."""

_SHORT_SLOTS = 4
_LONG_SLOTS = 2
"""Requests that are prepared at once. Few, for they take CPU time from the engine; the short ones have slots of their
own, so that they never wait behind long ones."""

_BODY_TIMEOUT = 60.0
"""Seconds that a client may take to send a body."""


class Intake:
    """Takes requests in, and does the CPU work that they bring where it holds up nobody.

    Args:
        host: in whose queue they have a place meanwhile.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._short = asyncio.Semaphore(_SHORT_SLOTS)
        self._long = asyncio.Semaphore(_LONG_SLOTS)

    async def prepared(self, request: Request, work: Callable[[bytes], _T]) -> tuple[_T, float]:
        """What ``work`` makes of the request's body, and when the request arrived, on the host's clock.

        Raises:
            ApiError: of ``work``; 400 for whatever is nested so deep that handling it fails; 408; 499, 503 or 504 for a
                request that ended before.
        """
        arrival = self._host.arrive()
        task = asyncio.ensure_future(self._prepare(request, work, arrival))
        try:
            await asyncio.wait((task, arrival.ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise arrival.ended.result()
            return task.result(), arrival.time
        except RecursionError:
            raise bad_request("The request body is nested too deep.") from None
        finally:
            task.cancel()
            self._host.leave(arrival)
            # An error's traceback holds this frame: with these it would hold itself, and the body with it.
            del task, arrival

    async def _prepare(self, request: Request, work: Callable[[bytes], _T], arrival: Arrival) -> _T:
        raw = await _body(request)
        self._host.enqueue(arrival)
        gone = asyncio.ensure_future(client_gone(request.receive))
        gone.add_done_callback(lambda _: arrival.end(ApiError(499, "the client has gone away", code="cancelled")))
        try:
            return await _in_slot(self._short if len(raw) <= _SHORT_BODY else self._long, work, raw)
        finally:
            gone.cancel()


async def client_gone(receive: Receive) -> None:
    """Returns when the client of a request whose body has been read has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        # Also a guard: pages of other origins cannot send this type without asking first.
        raise bad_request(
            f"Content-Type is {content_type[:80]!r}: must be application/json (curl: -H 'Content-Type: "
            "application/json')."
        )
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            # Not request.body(), which would keep it as long as the request.
            return b"".join([chunk async for chunk in request.stream()])
    except TimeoutError:
        message = f"The request body did not come within {_BODY_TIMEOUT:g} seconds."
        raise ApiError(408, message, code="body_timeout") from None


async def _in_slot(slots: asyncio.Semaphore, work: Callable[[bytes], _T], raw: bytes) -> _T:
    await slots.acquire()
    loop = asyncio.get_running_loop()
    job: Future[_T] = Future()
    job.set_running_or_notify_cancel()

    def release(_: Future[_T]) -> None:
        with contextlib.suppress(RuntimeError):  # the program ends, and the event loop has ended before this thread
            loop.call_soon_threadsafe(slots.release)

    job.add_done_callback(release)
    # A daemon, unlike the threads of a pool: the program's end does not wait for it.
    threading.Thread(target=_work, args=(job, work, raw), name="preparation", daemon=True).start()
    try:
        return await asyncio.wrap_future(job)
    finally:
        del job  # which may hold an error, whose traceback holds this frame


def _work(job: Future[_T], work: Callable[[bytes], _T], raw: bytes) -> None:
    try:
        job.set_result(work(raw))
    except Exception as error:
        job.set_exception(error)
    finally:
        del job, raw  # as above
