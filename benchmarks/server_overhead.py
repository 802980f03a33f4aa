"""What the server costs: throughput and inter-token latency over HTTP beside the offline ``LLM``.

    python benchmarks/server_overhead.py [--model smollm2-135m] [--scheme auto] [--rounds 3] [--num-prompts 48]
        [--concurrency 16] [--url URL] [--json OUT]

Both have the same model, settings and prompts, both are greedy, and they take turns in one session: while one works the
other sleeps. Every figure is the median of the ratios of such pairs.

* throughput: tokens a second with ``--concurrency`` streaming clients, against ``LLM.chat`` on all prompts. At least
  0.90.
* inter-token latency: of one stream at a time, against ``LLM.stream``: the time from the first text to the last, by the
  tokens after the first. At most 1.05.

Texts must be equal. Exits with 1 if a bar is missed or a text differs. Client and server share the machine; below the
table is what the server's event loop and the client used of it, in CPU time a token.

With ``--url`` the server is one that runs already, with the options that this program would give it; it prints them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import add_json_option, median, write_figures
from rich.console import Console
from rich.table import Table
from server_process import Reply, ServerProcess, post, serving

from pilotfish import LLM, SamplingParams
from pilotfish.bench.questions import load_questions, take
from pilotfish.bench.results import machine_facts
from pilotfish.cli.options import parse_size
from pilotfish.cli.speculation import SpeculationOptions

MIN_THROUGHPUT = 0.90
MAX_LATENCY = 1.05

_SETTLE = 0.3
"""Seconds between two turns, for threads that wait actively to fall asleep."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, and how long its answer may be."""

    prompt: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.max_tokens)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side did in its turn.

    Attributes:
        texts: of the answers, in the order of the tasks.
        num_tokens: of all of them.
        seconds: throughput: of all; latency: from the first text to the last.
        client_s: CPU seconds of this process; for the server's turns only.
        loop_s: CPU seconds of the server's event loop.
    """

    texts: list[str]
    num_tokens: int
    seconds: float
    client_s: float = 0.0
    loop_s: float = 0.0


def main() -> int:
    args = parse_args()
    console = Console(stderr=args.json == "-")
    options = server_options(args)
    console.print(f"server: pilotfish serve {args.model} {shlex.join(options)}", highlight=False, soft_wrap=True)
    with connected(args, options) as server:
        llm = LLM(
            args.model,
            speculation=SpeculationOptions(scheme=args.scheme).settings(),
            max_num_seqs=args.concurrency,
            max_model_len=args.max_model_len,
            kv_cache_memory=parse_size("kv_cache_memory", args.kv_cache_memory),
            threads=args.threads,
        )
        results = [throughput(llm, server, args, console), latency(llm, server, args, console)]
    print_table(results, console)
    write_figures("server overhead", args, results=results)
    return 0 if all(result["passed"] for result in results) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scheme", default="auto", help="auto, none, ngram, ...: of both sides")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of turns for throughput")
    parser.add_argument("--num-prompts", type=int, default=48, help="prompts of a turn for throughput")
    parser.add_argument("--latency-prompts", type=int, default=24, help="pairs of streams for latency")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-cache-memory", default="512M", help="of each side")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--url", default=None, help="a server that runs already")
    add_json_option(parser)
    return parser.parse_args()


def server_options(args: argparse.Namespace) -> list[str]:
    """Those that give the server the settings of the offline side."""
    options = ["--scheme", args.scheme, "--max-num-seqs", str(args.concurrency)]
    options += ["--max-model-len", str(args.max_model_len), "--kv-cache-memory", args.kv_cache_memory]
    return options if args.threads is None else [*options, "--threads", str(args.threads)]


@contextlib.contextmanager
def connected(args: argparse.Namespace, options: Sequence[str]) -> Iterator[ServerProcess]:
    """The server of ``--url``, or one for this run."""
    if args.url is not None:
        yield ServerProcess(args.url)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args.model, options, Path(folder, "server.log")) as server,
    ):
        yield server


def make_tasks(count: int) -> list[Task]:
    """Prompts of all kinds in turn, as often as needed, with 64 to 128 tokens each."""
    questions = take(load_questions(), min(count, len(load_questions())))
    return [Task(questions[i % len(questions)].turns[0], 64 + 64 * (i * 5 % 9) // 8) for i in range(count)]


# Throughput


def throughput(llm: LLM, server: ServerProcess, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Turns with all prompts at once."""
    tasks = make_tasks(args.num_prompts)

    def offline() -> Turn:
        start = time.perf_counter()
        outputs = llm.chat([task.messages for task in tasks], [task.params for task in tasks])
        seconds = time.perf_counter() - start
        completions = [output.outputs[0] for output in outputs]
        return Turn([c.text for c in completions], sum(len(c.token_ids) for c in completions), seconds)

    def online() -> Turn:
        client, loop = time.process_time(), server.loop_cpu()
        start = time.perf_counter()
        replies = asyncio.run(clients(server, tasks, args.concurrency))
        seconds = time.perf_counter() - start
        client, loop = time.process_time() - client, server.loop_cpu() - loop
        answers = [read(reply) for reply in replies]
        return Turn([text for text, _ in answers], sum(count for _, count in answers), seconds, client, loop)

    offline(), online()  # to fill both prefix caches, and to warm up
    pairs = []
    for number in range(args.rounds):
        pair = taken_in_turn(offline, online, number)
        pairs.append(pair)
        speeds = [turn.num_tokens / turn.seconds for turn in pair]
        console.print(f"throughput, pair {number + 1}: {speeds[0]:.1f} and {speeds[1]:.1f} tokens/s", highlight=False)
    speeds = [median([pair[side].num_tokens / pair[side].seconds for pair in pairs]) for side in (0, 1)]
    ratio = median([a.seconds / a.num_tokens / (b.seconds / b.num_tokens) for a, b in pairs])
    name = f"tokens/s, {args.concurrency} at once"
    return result(name, speeds, ratio, ratio >= MIN_THROUGHPUT, f">= {MIN_THROUGHPUT:.2f}", pairs)


async def clients(server: ServerProcess, tasks: Sequence[Task], count: int) -> list[Reply]:
    """``count`` clients, each of which sends its next prompt when it has its answer."""
    replies: list[Reply] = [Reply()] * len(tasks)
    waiting = iter(enumerate(tasks))

    async def client() -> None:
        for place, task in waiting:
            replies[place] = await post(server.address, "/v1/chat/completions", task.body)

    await asyncio.gather(*(client() for _ in range(count)))
    return replies


# Latency


def latency(llm: LLM, server: ServerProcess, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Pairs of streams, one at a time."""
    tasks = make_tasks(args.latency_prompts)
    pairs = []
    for number, task in enumerate([tasks[0], *tasks]):  # the first is to warm up

        def offline(task: Task = task) -> Turn:
            times, text, count = [], "", 0
            for piece in llm.stream(task.messages, task.params):
                if piece.text:
                    times.append(time.perf_counter())
                text, count = text + piece.text, count + len(piece.token_ids)
            return Turn([text], count, times[-1] - times[0])

        def online(task: Task = task) -> Turn:
            client, loop = time.process_time(), server.loop_cpu()
            [reply] = asyncio.run(clients(server, [task], 1))
            client, loop = time.process_time() - client, server.loop_cpu() - loop
            text, count = read(reply)
            first, last = reply.span()
            return Turn([text], count, last - first, client, loop)

        pairs.append(taken_in_turn(offline, online, number))
    del pairs[0]
    gaps = [median([milliseconds(pair[side]) for pair in pairs]) for side in (0, 1)]
    ratio = median([milliseconds(b) / milliseconds(a) for a, b in pairs])
    spread = sorted(milliseconds(b) / milliseconds(a) for a, b in pairs)
    low, high = spread[len(spread) // 4], spread[3 * len(spread) // 4]
    console.print(f"latency: {len(pairs)} pairs, half of the ratios within {low:.3f} to {high:.3f}", highlight=False)
    return result("ms a token, 1 at once", gaps, ratio, ratio <= MAX_LATENCY, f"<= {MAX_LATENCY:.2f}", pairs)


def milliseconds(turn: Turn) -> float:
    """A token, after the first."""
    return 1e3 * turn.seconds / max(turn.num_tokens - 1, 1)


# Both


def taken_in_turn(offline: Any, online: Any, number: int) -> tuple[Turn, Turn]:
    """The turns of one pair, the order changing from pair to pair; offline is the first of the result."""
    turns = {}
    for side in (offline, online) if number % 2 == 0 else (online, offline):
        time.sleep(_SETTLE)
        turns[side] = side()
    return turns[offline], turns[online]


def read(reply: Reply) -> tuple[str, int]:
    """Text and number of tokens of a stream.

    Raises:
        RuntimeError: the server refused.
    """
    if reply.status != 200:
        raise RuntimeError(f"the server answers {reply.status}: {reply.body[:500]!r}")
    events = reply.events
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]


def result(
    name: str, figures: Sequence[float], ratio: float, passed: bool, bar: str, pairs: Sequence[tuple[Turn, Turn]]
) -> dict[str, Any]:
    """One line of the table."""
    # The server leaves out a part of a character at the end, where the offline API writes U+FFFD.
    texts = [both for a, b in pairs for both in zip(a.texts, b.texts, strict=True)]
    different = sum(x.rstrip("\ufffd") != y.rstrip("\ufffd") for x, y in texts)
    return {
        "measure": name,
        "offline": figures[0],
        "server": figures[1],
        "ratio": ratio,
        "bar": bar,
        "pairs": len(pairs),
        "loop_us_per_token": median([1e6 * b.loop_s / b.num_tokens for _, b in pairs]),
        "client_us_per_token": median([1e6 * b.client_s / b.num_tokens for _, b in pairs]),
        "texts_that_differ": different,
        "passed": passed and not different,
    }


def print_table(results: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="the server beside the offline LLM")
    for name in ("", "offline", "server", "ratio", "bar", "differ", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in results:
        table.add_row(
            row["measure"], f"{row['offline']:.2f}", f"{row['server']:.2f}", f"{row['ratio']:.3f}", row["bar"],
            str(row["texts_that_differ"]), "passed" if row["passed"] else "MISSED",
        )  # fmt: skip
    console.print(table)
    for row in results:
        loop, client = row["loop_us_per_token"], row["client_us_per_token"]
        console.print(f"{row['measure']}: CPU µs a token: event loop {loop:.0f}, client {client:.0f}", highlight=False)
    for name, value in machine_facts().items():
        console.print(f"{name}: {value}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
