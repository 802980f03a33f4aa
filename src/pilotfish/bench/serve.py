"""Load for a server: so many requests at once, or arrivals as a Poisson process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pilotfish.bench.serve_client import ServeClient, ServedModel
from pilotfish.bench.serve_prompts import ServePrompt
from pilotfish.bench.serve_records import Level, Served
from pilotfish.errors import ConfigError

__all__ = ["poisson_arrivals", "request_settings", "run_level", "warm_up"]

Sleep = Callable[[float], Awaitable[object]]

_WARM_UP_TOKENS = 8


def request_settings(
    model: ServedModel, *, max_tokens: int, temperature: float, seed: int, ignore_eos: bool, speculate: bool
) -> dict[str, Any]:
    """The fields of every request.

    Ours go only to a server that knows them: others may refuse a request with unknown fields.

    Raises:
        ConfigError: ``speculate`` is False, and the server is none of ours.
    """
    settings: dict[str, Any] = {
        "model": model.name, "max_tokens": max_tokens, "temperature": temperature, "seed": seed
    }  # fmt: skip
    if ignore_eos:
        settings["ignore_eos"] = True
    if model.is_pilotfish:
        settings["include_speculation_stats"] = True
    if not speculate:
        if not model.is_pilotfish:
            raise ConfigError("--no-speculation: only a Pilotfish server can be asked for it, and this is none")
        settings["speculation"] = {"enabled": False}
    return settings


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Times of ``count`` arrivals, in seconds from the start; ``rate`` a second on average, the first at once."""
    gaps = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + gaps.expovariate(rate))
    return times[:count]


async def warm_up(client: ServeClient, prompts: Sequence[ServePrompt], settings: Mapping[str, Any], count: int) -> None:
    """Some short requests at once, which count for nothing: first use costs once what must not count.

    Raises:
        ConfigError: one of them fails; then the rest would, too.
    """
    few = {**settings, "max_tokens": _WARM_UP_TOKENS}
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    for served in await asyncio.gather(*(client.request(prompt, few) for prompt in chosen)):
        if served.error is not None:
            raise ConfigError(f"url={client.url!r}: prompt {served.name!r}: {served.error}: {served.message}")


async def run_level(
    client: ServeClient,
    level: Level,
    prompts: Sequence[ServePrompt],
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    done: Callable[[Served], None] = lambda served: None,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Serve all prompts under the level's load and put their records into it; what is there stays if cancelled.

    Args:
        client: of the server.
        level: says the load; takes the records.
        prompts: one request each, in this order.
        settings: the other fields of each request.
        seed: of the arrivals.
        done: told of each request that ended.
        sleep: waits for seconds; for tests.
    """
    start = client.clock()

    async def serve(prompt: ServePrompt, arrival: float | None) -> None:
        served = await client.request(prompt, settings, arrival)
        level.requests.append(served)
        done(served)

    try:
        if level.rate is None:
            await _closed(serve, prompts, level.concurrency or 1)
        else:
            times = [start + t for t in poisson_arrivals(level.rate, len(prompts), seed)]
            await _open(serve, client, prompts, times, level.concurrency, sleep)
        level.complete = True
    finally:
        level.seconds = client.clock() - start


async def _closed(
    serve: Callable[[ServePrompt, float | None], Awaitable[None]], prompts: Sequence[ServePrompt], concurrency: int
) -> None:
    """As many clients as ``concurrency``; each sends its next request when its last one has ended."""
    waiting = iter(prompts)

    async def work() -> None:
        for prompt in waiting:  # shared: each prompt is taken once
            await serve(prompt, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(work())


async def _open(
    serve: Callable[[ServePrompt, float | None], Awaitable[None]],
    client: ServeClient,
    prompts: Sequence[ServePrompt],
    times: Sequence[float],
    concurrency: int | None,
    sleep: Sleep,
) -> None:
    """Requests arrive at ``times`` whether or not others have ended; what waits for its turn counts as waiting."""
    places = asyncio.Semaphore(concurrency or len(prompts))

    async def take_turn(prompt: ServePrompt, arrival: float) -> None:
        async with places:
            await serve(prompt, arrival)

    async with asyncio.TaskGroup() as group:
        for prompt, arrival in zip(prompts, times, strict=True):
            await sleep(max(arrival - client.clock(), 0.0))
            group.create_task(take_turn(prompt, arrival))
