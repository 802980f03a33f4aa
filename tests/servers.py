"""Servers over the engines of :mod:`engines`: in this process without a network, and in a thread with one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import torch

from engines import engine_with
from fake_llm import Letters
from fakes import tiny_model_config
from pilotfish.config import EngineConfig, Ngram
from pilotfish.engine.engine import Engine
from pilotfish.kv import PagePool
from pilotfish.ops.reference import TorchOps
from pilotfish.runner import Segment
from pilotfish.server import EngineHost, HostSettings, ServerSettings, create_app
from pilotfish.server.run import Server, bind, url_of
from pilotfish.speculation.ngram import NgramProposer
from pilotfish.text import Tokenizer

MODEL = "letters"
DEFAULTS: dict[str, Any] = {"max_model_len": 128, "num_pages": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def letters_engine(scheme: str | None = "guess", **settings: Any) -> Engine:
    """An engine that takes and gives letters: see :func:`engines.engine_with`."""
    engine = engine_with(scheme, **DEFAULTS | settings)
    engine.tokenizer = Letters()  # type: ignore[assignment]
    return engine


def make_host(
    factory: Callable[[], Engine] = letters_engine, engine: Engine | None = None, **settings: Any
) -> EngineHost:
    """``settings`` are those of :class:`HostSettings`."""
    return EngineHost(factory, engine or factory(), HostSettings(**{"restart_delay": 0.01} | settings))


@contextlib.asynccontextmanager
async def client_of(host: EngineHost, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application without a network; ``settings`` are those of :class:`ServerSettings`."""
    app = create_app(host, ServerSettings(**{"model_names": (MODEL,)} | settings))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client


def with_client(
    work: Callable[[httpx.AsyncClient], Awaitable[None]], host: EngineHost | None = None, **settings: Any
) -> None:
    """Run ``work`` with a client of a new application."""

    async def main() -> None:
        async with client_of(host or make_host(), **settings) as client:
            await work(client)

    asyncio.run(main())


class RunningServer:
    """A server that listens, for clients in other threads.

    Attributes:
        url: where.
        host: its engine's.
    """

    def __init__(self, host: EngineHost, url: str, server: Server) -> None:
        self.host = host
        self.url = url
        self.server = server

    def call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """One request on a connection of its own."""
        with httpx.Client(base_url=self.url, timeout=120, trust_env=False) as client:
            return client.request(method, path, **kwargs)

    def free_pages(self) -> int:
        engine = self.host.engine
        assert engine is not None
        return engine.pool.num_free

    def wait_idle(self) -> None:
        """Until nothing runs or waits."""
        wait_for(lambda: self.host.num_open == 0 and not self.host.load.num_running)


@contextlib.contextmanager
def running(host: EngineHost | None = None, **settings: Any) -> Iterator[RunningServer]:
    """A server on a free port, until the end of the block."""
    host = host or make_host()
    app = create_app(host, ServerSettings(**{"model_names": (MODEL,)} | settings))
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        url = url_of(listener)
        server = Server(app, host)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            yield RunningServer(host, url, server)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server did not stop"


def wait_for(condition: Callable[[], bool], limit: float = 120.0) -> None:
    """Until ``condition`` holds; the limit is for tests that hang, not a measurement."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def events_of(text: str) -> list[dict[str, Any]]:
    """The objects of an event stream that ends in [DONE]."""
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class ScriptRunner:
    """A stand-in for a model that writes one text after any prompt of ``num_prompt`` tokens, then EOS.

    Args:
        script: token ids of the text.
        num_prompt: tokens of the prompt.
        vocab_size: width of the logits.
        eos: the token after the text.
    """

    page_size = 16

    def __init__(self, script: Sequence[int], num_prompt: int, vocab_size: int, eos: int) -> None:
        self.ops = TorchOps(torch.float32)
        self.features = self.hidden = torch.empty(0)
        self._script = [*script, eos]
        self._num_prompt = num_prompt
        self._vocab_size = vocab_size

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        places = [
            segment.start + len(segment.token_ids) - segment.num_logits + i + 1 - self._num_prompt
            for segment in segments
            for i in range(segment.num_logits)
        ]
        logits = torch.zeros(len(places), self._vocab_size)
        for row, place in enumerate(places):
            logits[row, self._script[min(place, len(self._script) - 1)]] = 50.0
        return logits


def script_engine(tokenizer: Tokenizer, script: str | Sequence[int], num_prompt: int) -> Engine:
    """An engine that writes a text or tokens after a prompt of so many tokens, with drafts by prompt lookup."""
    [eos] = tokenizer.eos_token_ids
    config = EngineConfig(
        max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory=1, threads=1,
        speculation=Ngram(num_drafts=3),
    )  # fmt: skip
    vocab_size = tokenizer.vocab_size
    token_ids = tokenizer.encode(script, add_special_tokens=False) if isinstance(script, str) else script
    runner = ScriptRunner(token_ids, num_prompt, vocab_size, eos)
    return Engine(
        config=config,
        model_config=replace(tiny_model_config(), vocab_size=vocab_size, eos_token_ids=(eos,)),
        tokenizer=tokenizer,
        runner=runner,  # type: ignore[arg-type]  # it has what the engine uses
        pool=PagePool(256, config.page_size),
        proposer=NgramProposer(4, 1),
    )
