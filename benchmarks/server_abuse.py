"""A server under clients that send nonsense, ask for all there is, dawdle and vanish: what is left of it afterwards.

    python benchmarks/server_abuse.py [--bodies 500] [--clients 64] [--model smollm2-135m] [--scheme auto]
        [--max-model-len 1024] [--seed 0] [--json OUT]

Starts a server and sends it, a group after the other:

* bodies that are valid by the server's own /openapi.json but for one thing: a value of a wrong type, a field too few or
  too many, a huge or deeply nested value, broken UTF-8 or JSON; each followed by a normal request;
* so many clients at once, of which half go at random times, by RST or by a half-close;
* a body of 10 MB; a prompt as long as the context allows, and longer ones; max_tokens at the limit, and one more;
* a client that reads a few bytes at a time.

All of it is done once as a warm-up and then again, with other bodies and other times. What must be true, or the exit
code is 1:

* nothing but the errors that were provoked, and a normal request after each group gives the text that it always gives;
* afterwards as many pages are free as at the start, and nothing runs or waits;
* the process' memory is within 5% of what it was after the warm-up;
* no request failed in the engine, it was never restarted, and the log has no error.
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abuse_bodies import Bodies
from common import add_json_option, write_figures
from rich.console import Console
from rich.table import Table
from server_checks import Check, as_dicts, checks_of, table_of
from server_process import Reply, ServerProcess, leave, post, read_slowly, request_bytes, serving
from soak_requests import CHAT, COMPLETIONS, WrongAnswer, joined, texts_of

_NORMAL: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three fish."}], "temperature": 0}
_LONG_BODY = 10_000_000
_DRAIN_TIMEOUT = 60.0
_CALL_TIMEOUT = 300.0


@dataclass(slots=True)
class Group:
    """What became of the requests of one group.

    Attributes:
        statuses: of the responses; 0: the client left.
        problems: what must not be.
    """

    name: str
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Abuse:
    """Sends the groups to one server.

    Args:
        server: that is abused.
        args: of the command line.
        seed: of what is sent, and when clients go.
    """

    def __init__(self, server: ServerProcess, args: argparse.Namespace, seed: str) -> None:
        self._server = server
        self._args = args
        self._rng = random.Random(seed)
        self._bodies = Bodies(json.loads(server.get("/openapi.json")), seed)
        self._expected: dict[int, list[tuple[str, str]]] = {}  # by max_tokens

    async def run(self) -> list[Group]:
        """All groups, in order."""
        works: dict[str, Callable[[Group], Awaitable[None]]] = {
            "spoiled bodies": self._spoiled_bodies,
            "clients of which half vanish": self._vanishing_clients,
            "a body of 10 MB": self._long_body,
            "prompts at the context's end": self._long_prompts,
            "max_tokens at the limit": self._long_outputs,
            "a slow reader": self._slow_reader,
        }
        groups = []
        await self._normal()  # what is expected from now on
        for name, work in works.items():
            group = Group(name)
            groups.append(group)
            await _noting(group, work(group))
            await _noting(group, self._normal())
        return groups

    async def _normal(self, max_tokens: int = 24) -> None:
        """A normal request, whose text is the same each time."""
        reply = await self._post(CHAT, _NORMAL | {"max_tokens": max_tokens})
        if reply.status != 200:
            raise WrongAnswer(f"a normal request got status {reply.status}: {reply.body[:300]!r}")
        texts = texts_of(reply.json)
        if self._expected.setdefault(max_tokens, texts) != texts:
            raise WrongAnswer(f"a normal request got {texts} after {self._expected[max_tokens]}")

    async def _post(self, path: str, body: dict[str, Any] | bytes) -> Reply:
        async with asyncio.timeout(_CALL_TIMEOUT):
            return await post(self._server.address, path, body)

    async def _refused(self, group: Group, path: str, body: dict[str, Any] | bytes, *statuses: int) -> Reply:
        """Send what may have one of these statuses; errors must have an error object."""
        reply = await self._post(path, body)
        group.statuses[reply.status] += 1
        if reply.status not in statuses:
            raise WrongAnswer(f"status {reply.status} instead of {statuses}: {reply.body[:300]!r}")
        if reply.status != 200 and set(reply.json["error"]) != {"message", "type", "param", "code"}:
            raise WrongAnswer(f"no error object: {reply.body[:300]!r}")
        return reply

    async def _spoiled_bodies(self, group: Group) -> None:
        for _ in range(self._args.bodies):
            body = self._bodies.next()
            try:
                # Leaving out what need not be there is no error; a huge value may be longer than a body may be.
                await self._refused(group, body.path, body.content, 200, 400, 404, 413)
            except WrongAnswer as error:
                group.problems.append(f"{body.how}: {error}; body {body.content[:300]!r}")
            await self._normal(max_tokens=1)

    async def _vanishing_clients(self, group: Group) -> None:
        async def stay() -> None:
            await _noting(group, self._normal())
            group.statuses[200] += 1

        async def vanish(number: int) -> None:
            stream, ending = number % 4 < 2, "reset" if number % 2 else "half-close"
            body = _NORMAL | {"ignore_eos": True, "stream": stream}  # as long as the context is
            await leave(self._server.address, request_bytes(CHAT, body), ending, self._rng)
            group.statuses[0] += 1

        half = self._args.clients // 2
        clients = [*(stay() for _ in range(self._args.clients - half)), *(vanish(number) for number in range(half))]
        self._rng.shuffle(clients)
        await asyncio.gather(*(_noting(group, client) for client in clients))

    async def _long_body(self, group: Group) -> None:
        await self._refused(group, CHAT, b'{"messages": "' + b"x" * _LONG_BODY + b'"}', 413)

    async def _long_prompts(self, group: Group) -> None:
        limit = self._args.max_model_len
        for length, status in ((limit - 1, 200), (limit, 400), (limit + 1, 400), (100 * limit, 400)):
            body = {"prompt": [1 + i % 30 for i in range(length)], "max_tokens": 1}
            reply = await self._refused(group, COMPLETIONS, body, status)
            message = reply.json["error"]["message"] if status == 400 else f"{length} of {limit}"
            if str(length) not in message or str(limit) not in message:
                raise WrongAnswer(f"both lengths, {length} and {limit}, must be in {message!r}")

    async def _long_outputs(self, group: Group) -> None:
        prompt = [1, 2, 3]
        room = self._args.max_model_len - len(prompt)
        for max_tokens, status in ((room, 200), (room + 1, 400), (2**62, 400)):
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            reply = await self._refused(group, COMPLETIONS, body, status)
            if status == 200 and reply.json["usage"]["completion_tokens"] != room:
                raise WrongAnswer(f"{reply.json['usage']} instead of {room} tokens")

    async def _slow_reader(self, group: Group) -> None:
        body = _NORMAL | {"max_tokens": 24, "stream": True}
        reply = await read_slowly(self._server.address, request_bytes(CHAT, body))
        group.statuses[reply.status] += 1
        if texts_of(joined(reply.events)) != self._expected[24]:
            raise WrongAnswer(f"{texts_of(joined(reply.events))} instead of {self._expected[24]}")


async def _noting(group: Group, work: Awaitable[None]) -> None:
    """Do it, and note what goes wrong."""
    try:
        await work
    except (WrongAnswer, ValueError, KeyError, TypeError, OSError, TimeoutError) as error:
        group.problems.append(f"{type(error).__name__}: {error}")


def drained(server: ServerProcess) -> dict[str, float]:
    """The metrics when no page is in use any more, or after a while."""
    end = time.monotonic() + _DRAIN_TIMEOUT
    while (metrics := server.metrics())["kv_cache_usage_perc"] > 0 and time.monotonic() < end:
        time.sleep(0.2)
    return metrics


def print_groups(groups: list[Group], console: Console) -> None:
    table = Table(title="abuse, each group followed by a normal request")
    for name in ("group", "requests", "statuses", "problems"):
        table.add_column(name, justify="left" if name in ("group", "statuses") else "right")
    for group in groups:
        statuses = ", ".join(f"{count} x {status or 'left'}" for status, count in sorted(group.statuses.items()))
        table.add_row(group.name, str(group.statuses.total()), statuses, str(len(group.problems)))
    console.print(table)
    for group in groups:
        for problem in group.problems[:5]:
            console.print(f"{group.name}: {problem}", highlight=False, markup=False)


def main() -> int:
    args = parse_args()
    console = Console(stderr=args.json == "-")
    options = ["--scheme", args.scheme, "--max-model-len", str(args.max_model_len)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with serving(args.model, options, log) as server:
            warm_up = asyncio.run(Abuse(server, args, f"{args.seed}, warm-up").run())
            drained(server)
            before = server.rss()
            groups = asyncio.run(Abuse(server, args, str(args.seed)).run())
            metrics, health, after = drained(server), json.loads(server.get("/health")), server.rss()
        text = log.read_text(errors="replace")
    num_problems = sum(len(group.problems) for group in [*warm_up, *groups])
    checks: list[Check] = [
        ("only provoked errors, normal answers afterwards", f"{num_problems} problems", num_problems == 0),
        *checks_of(metrics, health, text, before, after),
    ]
    print_groups(groups, console)
    console.print(table_of(checks))
    figures = [{"group": g.name, "statuses": dict(g.statuses), "problems": g.problems} for g in groups]
    write_figures("server abuse", args, groups=figures, checks=as_dicts(checks))
    return 0 if all(passed for *_, passed in checks) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=500)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scheme", default="auto")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0, help="of what is sent")
    add_json_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
