"""A client of OpenAI-compatible servers that notes when each token came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from pilotfish.bench.serve_prompts import ServePrompt
from pilotfish.bench.serve_records import Served
from pilotfish.errors import ConfigError

__all__ = ["Clock", "ServeClient", "ServedModel"]

Clock = Callable[[], float]
"""Seconds, from any start."""

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of a server; ``is_pilotfish`` says that the server knows our fields of a request."""

    name: str
    is_pilotfish: bool


class ServeClient:
    """Streams answers and measures them. Closed by :meth:`aclose`.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: sent as a bearer token; None sends none.
        timeout: longest wait for the next bytes, in seconds.
        clock: that times are read from.
        transport: in place of the network.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        clock: Clock = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = _base_url(url)
        self.clock = clock
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
            trust_env=False,  # a proxy between client and server would be what is measured
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def find_model(self, name: str | None) -> ServedModel:
        """The model of that name, or the first that the server has.

        Raises:
            ConfigError: the server cannot be reached, refuses, or has no such model.
        """
        try:
            response = await self._http.get("v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(f"url={self.url!r}: cannot be reached: {_reason(error)}") from error
        if response.status_code != httpx.codes.OK:
            hint = " Give a key with --api-key." if response.status_code == httpx.codes.UNAUTHORIZED else ""
            problem = _problem(response.content) or response.reason_phrase
            raise ConfigError(f"url={self.url!r}: /v1/models answers HTTP {response.status_code}: {problem}{hint}")
        try:
            owners = {str(model["id"]): model.get("owned_by") for model in response.json()["data"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"url={self.url!r}: /v1/models is not OpenAI's list of models: {error!r}") from error
        if not owners:
            raise ConfigError(f"url={self.url!r}: the server has no models")
        chosen = name if name is not None else next(iter(owners))
        if chosen not in owners:
            raise ConfigError(f"model={name!r}: the server has {', '.join(map(repr, owners))}")
        return ServedModel(chosen, owners[chosen] == "pilotfish")

    async def request(self, prompt: ServePrompt, settings: Mapping[str, Any], arrival: float | None = None) -> Served:
        """Send one prompt and read its answer to the end. Whatever goes wrong is in the record, not raised.

        Args:
            prompt: what to send.
            settings: the other fields of the request.
            arrival: by the clock, where times count from; None: now.
        """
        start = self.clock() if arrival is None else arrival
        answer = _Answer(prompt.name, start)
        body = {**prompt.body, **settings, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", prompt.endpoint, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    problem = _problem(await response.aread()) or response.reason_phrase
                    answer.fail(f"HTTP {response.status_code}", problem)
                else:
                    await self._read(response, answer)
        except httpx.TimeoutException as error:
            answer.fail("timeout", _reason(error))
        except httpx.HTTPError as error:
            answer.fail("connection", _reason(error))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            answer.fail("bad answer", repr(error))
        return answer.record(self.clock())

    async def _read(self, response: httpx.Response, answer: _Answer) -> None:
        ended = False
        async with aclosing(_events(response)) as events:
            async for data in events:  # to the last byte: a connection with some left is not used again
                if data == b"[DONE]":
                    ended = True
                elif not ended:
                    answer.add(json.loads(data), self.clock())
        if not ended:
            answer.fail("broken stream", "ended without [DONE]")


class _Answer:
    """One answer as it comes."""

    def __init__(self, name: str, start: float) -> None:
        self._served = Served(name)
        self._start = start
        self._last: float | None = None
        self._counted = 0
        self._usage: Mapping[str, Any] | None = None

    def add(self, chunk: Mapping[str, Any], now: float) -> None:
        """Take in one chunk, read at ``now``."""
        if "error" in chunk:
            self.fail("error event", str(chunk["error"].get("message", "")))
            return
        ours = chunk.get("pilotfish") or {}
        self._served.stats = ours.get("stats") or self._served.stats
        self._usage = chunk.get("usage") or self._usage
        num_tokens = 0
        for choice in chunk.get("choices") or ():
            self._served.finish_reason = choice.get("finish_reason") or self._served.finish_reason
            # What a server of another make sends: its text stands for one token, however many it was.
            num_tokens += bool(choice.get("text") or (choice.get("delta") or {}).get("content"))
        if ours.get("tokens"):
            num_tokens = len(ours["tokens"])
        if num_tokens:
            self._tokens(num_tokens, now)

    def fail(self, error: str, message: str) -> None:
        """Note the first thing that went wrong."""
        if self._served.error is None:
            self._served.error, self._served.message = error, message

    def record(self, now: float) -> Served:
        """All of it, when it is over."""
        served, usage = self._served, self._usage or {}
        served.e2e_ms = _ms(now - self._start)
        served.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
        served.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        served.num_tokens = int(usage.get("completion_tokens") or self._counted)
        return served

    def _tokens(self, count: int, now: float) -> None:
        if self._last is None:
            self._served.ttft_ms = _ms(now - self._start)
        else:
            self._served.itl_ms += [_ms((now - self._last) / count)] * count
        self._last = now
        self._counted += count


async def _events(response: httpx.Response) -> AsyncGenerator[bytes]:
    """The data of server-sent events.

    Lines end at "\\n" or "\\r\\n" only: ``aiter_lines`` also splits at other characters, which JSON may hold.
    """
    pending, lines = b"", list[bytes]()
    async for part in response.aiter_bytes():
        *whole, pending = (pending + part).split(b"\n")
        for line in whole:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []


def _base_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"url={url!r}: is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"url={url!r}: must be a URL such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _problem(content: bytes) -> str:
    """The message of an error object; "" if it is none."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
