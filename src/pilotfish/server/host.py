"""The engine host: a bounded queue before an engine that is watched, and built anew when it fails.

Everything here runs in the event loop's thread; the engine runs in its worker's. The two meet in
``call_soon_threadsafe``, once an engine step.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pilotfish.engine import Engine
from pilotfish.engine.engine import EngineStats
from pilotfish.errors import PilotfishError
from pilotfish.server.errors import ApiError, bad_request, from_request_error, unavailable
from pilotfish.server.settings import HostSettings
from pilotfish.server.stream import Job, RequestStream, StreamGroup
from pilotfish.server.totals import add_stats
from pilotfish.server.worker import EngineWorker, Report

__all__ = ["Arrival", "EngineHost", "Load", "State"]

logger = logging.getLogger(__name__)

State = Literal["new", "ready", "restarting", "draining", "stopped"]

_JOIN_TIMEOUT = 5.0
"""Seconds that a stopped worker may take for the step under way, when the program ends."""


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to do now: sequences that run, those that wait (with the requests that are being prepared), and the
    share of KV pages in use."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0


@dataclass(slots=True, eq=False)
class Arrival:
    """A request before the engine has it.

    Attributes:
        time: when it began to come, on the host's clock.
        ended: why it ended, should it end before it is prepared.
        is_queued: it has come as a whole and has a place in the queue.
        timer: ends it.
    """

    time: float
    ended: asyncio.Future[ApiError]
    is_queued: bool = False
    timer: asyncio.TimerHandle | None = None

    def end(self, error: ApiError) -> None:
        """Nobody waits for it any more, or shall; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(error)


class EngineHost:
    """Runs an engine for many callers of one event loop.

    Args:
        factory: builds an engine; called in a thread after a failure. It may raise, and is then tried again later.
        engine: the first engine, for which ``factory`` is not called.
        settings: limits.
        clock: monotonic seconds. Must be the engine's.

    Attributes:
        clock: see above.
        num_restarts: engines built after the first.
        on_close: called with each request when the engine is done with it, whatever became of it.
    """

    def __init__(
        self,
        factory: Callable[[], Engine],
        engine: Engine,
        settings: HostSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or HostSettings()
        self.num_restarts = 0
        self.on_close: list[Callable[[RequestStream], None]] = []
        # What does not change when an engine is replaced: callers use these from any thread.
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.model_config.vocab_size
        self.config = engine.config
        self._factory = factory
        self.clock = clock
        self._state: State = "new"
        self._reason = "it has not been started"
        self._worker: EngineWorker | None = None
        self._first_engine: Engine | None = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrivals: set[Arrival] = set()
        self._open: dict[str, RequestStream] = {}
        self._num_open_seqs = 0
        self._past = EngineStats()  # of engines that are gone
        self._num_failures = 0
        self._last_failure = -float("inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # What goes on

    @property
    def state(self) -> State:
        """``ready`` takes requests; all others refuse them."""
        return self._state

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""
        return self._reason

    @property
    def engine(self) -> Engine | None:
        """The engine at work; it belongs to its own thread, others may only look. None while there is none."""
        return self._worker.engine if self._worker is not None else None

    def ready_engine(self) -> Engine:
        """The engine, as :attr:`engine`, when it takes requests.

        Raises:
            ApiError: 503, it does not.
        """
        return self._ready_worker().engine

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self._open)

    @property
    def load(self) -> Load:
        """What there is to do now."""
        engine, waiting = self.engine, self._num_arrived
        if engine is None:
            return Load(num_waiting=waiting)
        assert self._worker is not None
        pool, waiting = engine.pool, waiting + len(engine.scheduler.waiting) + self._worker.num_queued
        return Load(len(engine.scheduler.running), waiting, 1.0 - pool.num_free / pool.num_pages)

    @property
    def stats(self) -> EngineStats:
        """What all engines so far have done. A copy."""
        engine = self.engine
        return add_stats(self._past, engine.stats if engine is not None else EngineStats())

    # Start and stop

    async def start(self) -> None:
        """Begin to take requests, in the running event loop."""
        assert self._state == "new" and self._first_engine is not None
        self._loop = asyncio.get_running_loop()
        engine, self._first_engine = self._first_engine, None
        self._run(engine)
        self._spawn(self._watch())

    def begin_drain(self) -> None:
        """Take no more requests. Those under way may go on for ``shutdown_timeout`` seconds."""
        if self._is_ending:
            return
        self._state, self._reason = "draining", "it is shutting down"
        for arrival in self._arrivals:
            if arrival.is_queued:
                arrival.end(_shut_down())
        if self._loop is not None:
            self._loop.call_later(self.settings.shutdown_timeout, self._end_all)

    async def stop(self) -> None:
        """Drain, then end the engine's thread."""
        self.begin_drain()
        await self._idle.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        worker, self._worker, self._state = self._worker, None, "stopped"
        if worker is not None:
            self._past = add_stats(self._past, worker.engine.stats)
            worker.stop()
            if not await asyncio.to_thread(worker.join, _JOIN_TIMEOUT):
                logger.warning("the engine's thread is still in a step; the program ends without waiting for it")

    # Requests

    def arrive(self) -> Arrival:
        """A request begins to come. Its time runs from now on, until :meth:`leave`."""
        assert self._loop is not None
        arrival = Arrival(self.clock(), self._loop.create_future())
        arrival.timer = self._timer(arrival.time, arrival.end)
        self._arrivals.add(arrival)
        return arrival

    def enqueue(self, arrival: Arrival) -> None:
        """It has come as a whole and is to be prepared: give it a place in the queue.

        Raises:
            ApiError: 503, there is none, or the server stops.
        """
        if self._is_ending:
            raise self._unavailable()
        self._check_room(1)
        arrival.is_queued = True

    def leave(self, arrival: Arrival) -> None:
        """It is prepared, or has ended: its place is free."""
        self._arrivals.discard(arrival)
        if arrival.timer is not None:
            arrival.timer.cancel()

    def submit(self, jobs: Sequence[Job], arrived: float | None = None) -> StreamGroup:
        """Queue the requests of one client call: all of them or none.

        Args:
            jobs: the requests.
            arrived: when the call did, on the host's clock. None is now.

        Raises:
            ApiError: 503 if the queue is full or there is no engine to take them, 400 for more than the queue can hold.
        """
        worker = self._admitting(jobs)
        group, now = StreamGroup(), self.clock()
        for job in jobs:
            stream = RequestStream(job, now, group)
            group.streams.append(stream)
            self._open[job.request_id] = stream
            self._num_open_seqs += job.params.n
            stream.timer = self._timer(now if arrived is None else arrived, partial(self._end, stream))
            worker.add(job)
        self._idle.clear()
        return group

    def cancel(self, group: StreamGroup) -> None:
        """End those of the group's requests that still run: nobody reads them any more."""
        for stream in group.streams:
            if not stream.closed:
                self._end(stream, ApiError(499, "the client has gone away", code="cancelled"))

    def _admitting(self, jobs: Sequence[Job]) -> EngineWorker:
        worker = self._ready_worker()
        count = sum(job.params.n for job in jobs)
        if count > self._max_open_seqs:
            raise bad_request(
                f"The request asks for {count} sequences (prompts times n); this server takes at most "
                f"{self._max_open_seqs} at once (max_num_seqs + max_queue). Ask for fewer, or start it with a larger "
                "--max-queue.",
                "prompt" if len(jobs) > 1 else "n",
            )
        self._check_room(count)
        return worker

    def _check_room(self, count: int) -> None:
        """Whether so many sequences more may wait."""
        taken = self._num_open_seqs + self._num_arrived
        if taken + count > self._max_open_seqs:
            raise unavailable(
                f"The queue is full: {taken} sequences run or wait, and at most {self._max_open_seqs} may "
                "(max_num_seqs + max_queue). Try again later, or start the server with a larger --max-queue.",
                "queue_full",
            )

    @property
    def _max_open_seqs(self) -> int:
        return self.config.max_num_seqs + self.settings.max_queue

    @property
    def _num_arrived(self) -> int:
        """Requests that are being prepared; each counts as one sequence."""
        return sum(arrival.is_queued for arrival in self._arrivals)

    @property
    def _is_ending(self) -> bool:
        return self._state in ("draining", "stopped")

    def _ready_worker(self) -> EngineWorker:
        worker = self._worker
        if self._state != "ready" or worker is None:
            raise self._unavailable()
        return worker

    def _unavailable(self) -> ApiError:
        return unavailable(f"The engine takes no requests: {self._reason}. Try again later.", "engine_unavailable")

    def _timer(self, arrived: float, end: Callable[[ApiError], None]) -> asyncio.TimerHandle | None:
        """Calls ``end`` when the time of a request that arrived then is over."""
        timeout = self.settings.request_timeout
        if timeout is None:
            return None
        assert self._loop is not None
        message = f"The request took longer than {timeout:g} seconds (--request-timeout) and was ended."
        error = ApiError(504, message, code="request_timeout")
        return self._loop.call_later(arrived + timeout - self.clock(), end, error)

    def _end(self, stream: RequestStream, error: ApiError) -> None:
        """Fail it now; it stays open until the engine has let it go."""
        stream.fail(error)
        if self._worker is not None and not stream.closed:
            self._worker.abort(stream.job.request_id)

    def _end_all(self) -> None:
        for arrival in self._arrivals:
            arrival.end(_shut_down())
        for stream in list(self._open.values()):
            self._end(stream, _shut_down())

    def _close(self, stream: RequestStream) -> None:
        if self._open.pop(stream.job.request_id, None) is None:
            return
        self._num_open_seqs -= stream.job.params.n
        stream.close()
        for notify in self.on_close:
            notify(stream)
        if not self._open:
            self._idle.set()

    # From the engine's thread

    def _run(self, engine: Engine) -> None:
        self._worker = EngineWorker(engine, self._post_report, self._post_failure, self.clock)
        self._worker.start()
        if self._state in ("new", "restarting"):
            self._state, self._reason = "ready", ""

    def _post_report(self, worker: EngineWorker, report: Report) -> None:
        self._post(self._on_report, worker, report)

    def _post_failure(self, worker: EngineWorker, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        # The traceback holds the engine, whose memory the next one needs.
        error.__traceback__ = None
        self._post(self._on_failure, worker, f"{type(error).__name__}: {error}", text)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("the event loop has ended before the engine's thread")

    def _on_report(self, worker: EngineWorker, report: Report) -> None:
        if worker is not self._worker:
            return
        for request_id, error in report.refused:
            stream = self._open.get(request_id)
            if stream is not None:
                stream.fail(from_request_error(error, stream.job.param_names))
                self._close(stream)
        for item in report.progress:
            stream = self._open.get(item.request_id)
            if stream is None:
                continue
            if item.finished and item.output.error is not None:  # a grammar that cannot be followed any longer
                stream.fail(from_request_error(item.output.error, stream.job.param_names))
            stream.push(item.output, item.marks)
            if item.finished:
                self._close(stream)

    # Failures

    def _on_failure(self, worker: EngineWorker, what: str, details: str) -> None:
        if worker is not self._worker:
            return
        logger.error("the engine failed and will be built anew\n%s", details.rstrip())
        self._replace(what)

    def _replace(self, what: str) -> None:
        """Leave the engine, fail what it had under way, and build another."""
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.abandon()
        self._past = add_stats(self._past, worker.engine.stats)
        if self._state == "ready":
            self._state, self._reason = "restarting", f"it failed and is being restarted ({what})"
        for stream in list(self._open.values()):
            message = "The engine failed while it worked on this request. It is being restarted: try again."
            stream.fail(ApiError(500, message, code="engine_failed"))
            self._close(stream)
        if self._state == "restarting":
            self._spawn(self._rebuild())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rebuild(self) -> None:
        while True:
            await asyncio.sleep(self._next_delay())
            gc.collect()
            try:
                engine = await asyncio.to_thread(self._factory)
            except (PilotfishError, OSError, MemoryError, RuntimeError) as error:
                logger.error("the engine could not be built: %s", error)
                continue
            if self._state == "restarting":
                self.num_restarts += 1
                self._run(engine)
                logger.warning("the engine was restarted", extra={"fields": {"restarts": self.num_restarts}})
            return

    def _next_delay(self) -> float:
        """Seconds to wait before the next build: none at first, then longer with each failure in a row."""
        settings, now = self.settings, self.clock()
        if now - self._last_failure > settings.healthy_after:
            self._num_failures = 0
        self._last_failure = now
        self._num_failures += 1
        if self._num_failures == 1:
            return 0.0
        exponent = min(self._num_failures - 2, 32)
        return float(min(settings.restart_delay * 2**exponent, settings.max_restart_delay))

    async def _watch(self) -> None:
        """Leave an engine whose step does not end."""
        limit = self.settings.step_timeout
        while True:
            await asyncio.sleep(min(limit / 4, 1.0))
            worker = self._worker
            since = worker.busy_since if worker is not None else None
            if since is not None and self.clock() - since > limit:
                logger.error(
                    "an engine step has taken more than %g seconds (--step-timeout): its thread is left behind, as it "
                    "cannot be stopped, with the memory that it holds; another engine is built",
                    limit,
                )
                self._replace(f"a step took more than {limit:g} seconds")


def _shut_down() -> ApiError:
    return unavailable("The server shut down before the request was done.", "shutting_down")
