"""One engine in a thread of its own: commands in, one report a step out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pilotfish.engine import Engine
from pilotfish.errors import RequestError
from pilotfish.server.stream import Job, Mark
from pilotfish.types import RequestOutput

__all__ = ["EngineWorker", "Progress", "Report"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is. ``marks`` are of completions that its reader wants to know about now."""

    request_id: str
    output: RequestOutput
    marks: list[Mark]
    finished: bool


@dataclass(slots=True)
class Report:
    """What one round of the thread brought: requests that got on, and requests that the engine refused."""

    progress: list[Progress] = field(default_factory=list)
    refused: list[tuple[str, RequestError]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class EngineWorker:
    """Drives an engine. It sleeps while there is nothing to do.

    A thread cannot be killed. One that hangs is *abandoned*: whatever it still does, nobody hears of it.

    Args:
        engine: only this thread calls it from now on.
        on_report: called in the thread after each round that brought something.
        on_failure: called in the thread, as its last act, with what the engine raised.
        clock: monotonic seconds.

    Attributes:
        busy_since: when the round under way began; None while it sleeps.
    """

    def __init__(
        self,
        engine: Engine,
        on_report: Callable[[EngineWorker, Report], None],
        on_failure: Callable[[EngineWorker, BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.busy_since: float | None = None
        self._on_report = on_report
        self._on_failure = on_failure
        self._clock = clock
        self._commands: queue.SimpleQueue[Job | _Abort | None] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._sent: dict[str, list[int]] = {}  # tokens of each completion that a report has named
        # Each is written by one thread only.
        self._num_added = self._num_taken = 0
        self._stopping = False
        # A daemon: one that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_queued(self) -> int:
        """Sequences of requests that the engine has not been given yet."""
        return self._num_added - self._num_taken

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, job: Job) -> None:
        """Queue a request. The answer is a report: progress, or that the engine refused it."""
        self._num_added += job.params.n
        self._commands.put(job)

    def abort(self, request_id: str) -> None:
        """End a request. A report says so, unless it had ended."""
        self._commands.put(_Abort(request_id))

    def stop(self) -> None:
        """Let the thread end after the round under way."""
        self._stopping = True
        self._commands.put(None)

    abandon = stop

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; False if it still runs."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                command = None if self.engine.has_unfinished else self._commands.get()
                if self._stopping:
                    return
                self.busy_since = self._clock()
                self._round(command)
                self.busy_since = None
        except BaseException as error:  # whatever it is, the requests under way must hear of it
            if not self._stopping:
                self._on_failure(self, error)

    def _round(self, command: Job | _Abort | None) -> None:
        report = Report()
        while True:
            if command is not None:
                self._apply(command, report)
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
        if self.engine.has_unfinished:
            for output in self.engine.step():
                self._note(output, report)
        if (report.progress or report.refused) and not self._stopping:
            self._on_report(self, report)

    def _apply(self, command: Job | _Abort, report: Report) -> None:
        if isinstance(command, _Abort):
            output = self.engine.abort(command.request_id)
            if output is not None:
                self._note(output, report)
            return
        self._num_taken += command.params.n
        try:
            self.engine.add_request(command.request_id, command.prompt_token_ids, command.params)
        except RequestError as error:
            report.refused.append((command.request_id, error))
        else:
            self._jobs[command.request_id] = command
            self._sent[command.request_id] = [0] * command.params.n

    def _note(self, output: RequestOutput, report: Report) -> None:
        request_id, finished = output.request_id, output.finished
        if not finished and not self._jobs[request_id].streams:
            return
        sent, marks = self._sent[request_id], []
        for c in output.outputs:
            num_tokens, ended = len(c.token_ids), c.finish_reason is not None
            # A completion that has ended gets no more tokens: -1 says that its end is out.
            if sent[c.index] >= 0 and (num_tokens > sent[c.index] or ended):
                marks.append(Mark(c.index, num_tokens, ended))
                sent[c.index] = -1 if ended else num_tokens
        if finished:
            del self._jobs[request_id], self._sent[request_id]
        report.progress.append(Progress(request_id, output, marks, finished))
