"""Minutes of mixed load on a server, and whether it comes out of it as it went in.

    python benchmarks/server_soak.py [--minutes 10] [--clients 12] [--model smollm2-135m] [--scheme auto]
        [--max-num-seqs 16] [--kv-cache-memory 32M] [--seed 0] [--json OUT]

Starts a server with so little KV cache that sequences lose their pages, and sends it, from so many clients at once:
greedy and seeded requests, streamed and not, with drafts and without; n = 3, log-probabilities, stop strings, lists of
prompts, schemas (known and new) and regular expressions, shared prefixes, tokenisation; clients that close, reset or
half-close the connection at any time, or read slowly; prompts that are too long and bodies that are wrong.

What must be true, or the exit code is 1:

* every response is what was asked for, and errors are those that were provoked;
* requests with a seed, and greedy ones, give the same text each time;
* afterwards all pages are free and nothing runs or waits;
* the process' memory grew by no more than 5% from the end of the warm-up (20% of the time) to the end;
* the engine was never restarted, and the log has no error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import add_json_option, median, write_figures
from rich.console import Console
from rich.table import Table
from server_checks import Check, as_dicts, checks_of, table_of
from server_process import Reply, ServerProcess, leave, post, read_slowly, request_bytes, serving
from soak_requests import Call, Requests, WrongAnswer, joined, texts_of

WARM_UP = 0.2

_SAMPLE_INTERVAL = 1.0
_LINE_INTERVAL = 10.0
_DRAIN_TIMEOUT = 120.0
_CALL_TIMEOUT = 300.0


@dataclass(slots=True)
class Tally:
    """What became of the requests of one kind."""

    sent: int = 0
    right: int = 0
    refused: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one time: seconds from the start, memory in bytes, sequences, share of pages, preemptions."""

    when: float
    rss: int
    running: float
    waiting: float
    kv_usage: float
    preemptions: float


@dataclass(slots=True)
class Soak:
    """What is found out while it runs.

    Attributes:
        tallies: by kind.
        first: the texts that each repeated request gave the first time.
        repeated: how often one was asked again.
        problems: what must not be; the first ones are printed.
        samples: of the server, in order.
    """

    server: ServerProcess
    tallies: dict[str, Tally] = field(default_factory=dict)
    first: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    repeated: int = 0
    problems: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def num_sent(self) -> int:
        return sum(tally.sent for tally in self.tallies.values())

    async def client(self, requests: Requests, rng: random.Random, is_over: Callable[[], bool]) -> None:
        """Sends one request after the other, until it is over."""
        while not is_over():
            call = requests.next()
            tally = self.tallies.setdefault(call.kind, Tally())
            tally.sent += 1
            try:
                async with asyncio.timeout(_CALL_TIMEOUT):
                    await self._send(call, rng, tally)
            except (WrongAnswer, ValueError, KeyError, TypeError, OSError, TimeoutError) as error:
                self.problems.append(f"{call.kind}: {type(error).__name__}: {error}; request {str(call.body)[:300]}")

    async def _send(self, call: Call, rng: random.Random, tally: Tally) -> None:
        if call.ending in ("read", "slow"):
            if call.ending == "slow":
                reply = await read_slowly(self.server.address, request_bytes(call.path, call.body))
            else:
                reply = await post(self.server.address, call.path, call.body, content_type=call.content_type)
            self._judge(call, reply, tally)
        else:
            await leave(self.server.address, request_bytes(call.path, call.body), call.ending, rng)
            tally.left += 1

    def _judge(self, call: Call, reply: Reply, tally: Tally) -> None:
        if reply.status not in call.statuses:
            raise WrongAnswer(f"status {reply.status} instead of {call.statuses}: {reply.body[:300]!r}")
        answer = joined(reply.events) if call.streams and reply.status == 200 else reply.json
        if call.check is not None:
            call.check(answer)
        if call.repeats is not None:
            texts = texts_of(answer)
            before = self.first.setdefault(call.repeats, texts)
            self.repeated += before is not texts
            if before != texts:
                raise WrongAnswer(f"not the same as the first time: {texts} after {before}")
        if reply.status == 200:
            tally.right += 1
        else:
            tally.refused += 1

    async def watch(self, start: float, console: Console) -> None:
        """Looks at the server each second, and prints a line now and then."""
        next_line = start
        while True:
            try:
                metrics = await asyncio.to_thread(self.server.metrics)
            except OSError as error:
                self.problems.append(f"/metrics: {error}")
                return
            now = time.monotonic()
            sample = Sample(
                when=now - start,
                rss=self.server.rss(),
                running=metrics["num_requests_running"],
                waiting=metrics["num_requests_waiting"],
                kv_usage=metrics["kv_cache_usage_perc"],
                preemptions=metrics["num_preemptions_total"],
            )
            self.samples.append(sample)
            if now >= next_line:
                next_line = now + _LINE_INTERVAL
                console.print(
                    f"{sample.when:6.0f} s  {self.num_sent:6} requests  {sample.running:3.0f} run {sample.waiting:3.0f}"
                    f" wait  pages {sample.kv_usage:4.0%}  preemptions {sample.preemptions:5.0f}  "
                    f"memory {sample.rss / 2**20:6.1f} MiB  problems {len(self.problems)}",
                    highlight=False,
                    soft_wrap=True,
                )
            await asyncio.sleep(_SAMPLE_INTERVAL)


def growth(samples: Sequence[Sample]) -> tuple[int, int]:
    """Memory in bytes at the end of the warm-up and at the end: medians over a tenth of the time after and before."""
    total = samples[-1].when
    after = [s.rss for s in samples if WARM_UP * total <= s.when <= (WARM_UP + 0.1) * total] or [samples[0].rss]
    at_end = [s.rss for s in samples if s.when >= 0.9 * total]
    return int(median(after)), int(median(at_end))


async def soak(server: ServerProcess, args: argparse.Namespace, console: Console) -> Soak:
    """Load for the time that was asked for; then until the server has nothing more to do."""
    state, start = Soak(server), time.monotonic()
    watcher = asyncio.create_task(state.watch(start, console))

    async def client(seed: str) -> None:
        requests, rng = Requests(seed, args.max_model_len), random.Random(f"client {seed}")
        await state.client(requests, rng, lambda: time.monotonic() > start + 60 * args.minutes)

    await asyncio.gather(*(client(f"{args.seed}/{i}") for i in range(args.clients)))
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    end = time.monotonic() + _DRAIN_TIMEOUT
    while time.monotonic() < end and server.metrics()["kv_cache_usage_perc"] > 0:
        await asyncio.sleep(0.2)
    return state


def verdicts(state: Soak, metrics: dict[str, float], health: dict[str, Any], log: str) -> list[Check]:
    """Everything that is checked."""
    refused = sum(tally.refused for tally in state.tallies.values())
    return [
        ("only provoked errors, right answers", f"{len(state.problems)} problems, {refused} provoked",
         not state.problems),
        ("the same text each time", f"{state.repeated} repeats of {len(state.first)} requests", state.repeated > 0),
        *checks_of(metrics, health, log, *growth(state.samples)),
        ("the load took pages away from sequences", f"{metrics['num_preemptions_total']:.0f} preemptions",
         metrics["num_preemptions_total"] > 0),
        ("the load shared prefixes", f"{metrics['prefix_cache_hits_total']:.0f} tokens",
         metrics["prefix_cache_hits_total"] > 0),
    ]  # fmt: skip


def print_tables(state: Soak, checks: Sequence[Check], console: Console) -> None:
    table = Table(title="requests")
    for name in ("kind", "sent", "right", "refused as it must be", "left by the client", "problems"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    problems = Counter(problem.partition(":")[0] for problem in state.problems)
    for kind, tally in sorted(state.tallies.items()):
        table.add_row(kind, *map(str, (tally.sent, tally.right, tally.refused, tally.left, problems[kind])))
    console.print(table)
    console.print(table_of(checks))
    for problem in state.problems[:10]:
        console.print(problem, highlight=False, markup=False)


def main() -> int:
    args = parse_args()
    console = Console(stderr=args.json == "-")
    options = ["--scheme", args.scheme, "--max-num-seqs", str(args.max_num_seqs)]
    options += ["--max-model-len", str(args.max_model_len), "--kv-cache-memory", args.kv_cache_memory]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with serving(args.model, options, log) as server:
            state = asyncio.run(soak(server, args, console))
            metrics, health = server.metrics(), json.loads(server.get("/health"))
        text = log.read_text(errors="replace")
    if args.log is not None:
        args.log.write_text(text)
    checks = verdicts(state, metrics, health, text)
    print_tables(state, checks, console)
    write_figures(
        "server soak",
        args,
        requests={kind: asdict(tally) for kind, tally in state.tallies.items()},
        checks=as_dicts(checks),
        problems=state.problems,
        samples=[asdict(sample) for sample in state.samples],
    )
    return 0 if all(passed for *_, passed in checks) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scheme", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-memory", default="32M", help="small enough that sequences lose their pages")
    parser.add_argument("--seed", type=int, default=0, help="of the load")
    parser.add_argument("--log", type=Path, default=None, help="keep the server's log in this file")
    add_json_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
