"""The engine host: queue, streams, cancellation, time-outs, failures, shutdown. No HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fake_llm import Letters
from pilotfish.engine.engine import Engine
from pilotfish.errors import CheckpointError, ConfigError, RequestError
from pilotfish.server import EngineHost, HostSettings, ServerSettings
from pilotfish.server.errors import ApiError
from pilotfish.server.protocol.token_bytes import TokenBytes
from pilotfish.server.stream import Delta, Job, StreamGroup
from pilotfish.types import SamplingParams
from servers import letters_engine, make_host

PROMPT = [1, 2, 3, 4, 5]


def params(**kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | kwargs)


def job(name: str = "a", sampling: SamplingParams | None = None, **kwargs: Any) -> Job:
    return Job(
        request_id=name,
        prompt_token_ids=kwargs.pop("prompt", PROMPT),
        params=sampling or params(),
        token_bytes=TokenBytes(Letters()),  # type: ignore[arg-type]
        **kwargs,
    )


def run(work: Callable[[EngineHost], Awaitable[None]], host: EngineHost | None = None) -> EngineHost:
    """``work`` with a started host, which is stopped afterwards."""

    async def main() -> EngineHost:
        served = host or make_host()
        await served.start()
        try:
            await work(served)
        finally:
            await served.stop()
        return served

    return asyncio.run(main())


async def read(group: StreamGroup) -> list[Delta]:
    return [delta async for news in group for _, delta in news]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


class GatedEngine:
    """An engine whose steps wait until they are let through.

    Attributes:
        steps: let through one step each; more than any test needs opens the gate for good.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or letters_engine()
        self.steps = threading.Semaphore(0)
        self.waiting = threading.Event()
        self._step = self.engine.step
        self.engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> Any:
        self.waiting.set()
        self.steps.acquire()
        return self._step()

    def open(self) -> None:
        self.steps.release(1_000_000)


def test_deltas_add_up_to_the_output_of_the_engine_alone() -> None:
    async def work(host: EngineHost) -> None:
        sampling = params(n=3, temperature=1.0, seed=4, logprobs=2)
        deltas = await read(host.submit([job("a", sampling, keep_steps=True)]))
        engine = letters_engine(None)
        engine.add_request("a", PROMPT, sampling)
        while engine.has_unfinished:
            outputs = engine.step()
        for c in outputs[0].outputs:
            mine = [delta for delta in deltas if delta.index == c.index]
            assert "".join(delta.text for delta in mine) == c.text
            assert [token for delta in mine for token in delta.token_ids] == c.token_ids
            assert [entry for delta in mine for entry in delta.logprobs or []] == c.logprobs
            assert [delta.finish_reason for delta in mine][-1] == c.finish_reason
            assert all(delta.finish_reason is None for delta in mine[:-1])
            assert all("".join(delta.pieces) == delta.text for delta in mine)
        assert any(any(delta.is_draft) for delta in deltas)

    run(work)


def test_a_request_that_the_engine_gives_up_half_way_fails_alone() -> None:
    engine = letters_engine()
    step = engine.step

    def give_up() -> Any:
        outputs = step()
        for output in outputs:
            if output.request_id == "bad" and not output.finished and len(output.outputs[0].token_ids) > 3:
                engine.abort("bad")
                output.error = RequestError("structured_outputs: cannot be followed", "structured_outputs")
        return outputs

    engine.step = give_up  # type: ignore[method-assign]

    async def work(host: EngineHost) -> None:
        names = {"structured_outputs": "response_format"}
        bad, good = host.submit([job("bad", param_names=names)]), host.submit([job("good")])
        with pytest.raises(ApiError, match="cannot be followed") as caught:
            await read(bad)
        assert (caught.value.status, caught.value.param) == (400, "response_format")
        assert sum(len(delta.token_ids) for delta in await read(good)) == 12
        assert host.num_open == 0 and engine.pool.num_free == engine.pool.num_pages

    run(work, make_host(engine=engine))


def test_what_waits_is_counted_in_sequences_and_cancellations_are_not() -> None:
    gate = GatedEngine()

    async def work(host: EngineHost) -> None:
        first = host.submit([job("first")])
        await asyncio.to_thread(gate.waiting.wait)
        more = host.submit([job("more", params(n=3))])
        counts = [host.load.num_running + host.load.num_waiting]
        host.cancel(more)
        host.cancel(first)
        counts.append(host.load.num_running + host.load.num_waiting)  # until the engine looks
        gate.open()
        await until(lambda: host.num_open == 0)
        assert counts == [4, 4]
        assert host.load.num_running == host.load.num_waiting == 0

    run(work, make_host(engine=gate.engine))


def test_a_slow_reader_gets_one_delta_or_each_step_if_it_wants_them() -> None:
    async def work(host: EngineHost) -> None:
        late = host.submit([job("late")])
        steps = host.submit([job("steps", keep_steps=True)])
        await until(lambda: host.num_open == 0)
        [delta] = await read(late)
        assert len(delta.token_ids) == 12 and delta.finish_reason == "length"
        deltas = await read(steps)
        assert len(deltas) > 3
        assert [token for d in deltas for token in d.token_ids] == list(delta.token_ids)
        assert all(len(d.token_ids) == 1 + sum(d.is_draft) for d in deltas[:-1])

    run(work)


def test_a_request_that_does_not_stream_is_reported_at_its_end_only() -> None:
    async def work(host: EngineHost) -> None:
        [delta] = await read(host.submit([job(streams=False, keep_steps=True)]))
        assert len(delta.token_ids) == 12

    run(work)


def test_many_at_once_equal_one_by_one() -> None:
    async def texts(host: EngineHost, together: bool) -> list[str]:
        jobs = [job(str(i), params(seed=i, temperature=1.0), prompt=[i, 2, i]) for i in range(8)]
        if together:
            groups = [host.submit([item]) for item in jobs]
            results = await asyncio.gather(*(read(group) for group in groups))
        else:
            results = [await read(host.submit([item])) for item in jobs]
        return ["".join(delta.text for delta in deltas) for deltas in results]

    async def work(host: EngineHost) -> None:
        assert await texts(host, together=True) == await texts(host, together=False)

    run(work)


def test_what_the_engine_refuses_fails_alone_and_names_the_field_of_the_request() -> None:
    async def work(host: EngineHost) -> None:
        good = host.submit([job("good")])
        bad = host.submit([job("bad", prompt=[1] * 500, param_names={"prompt": "messages"})])
        with pytest.raises(ApiError, match=r"500 tokens.*128") as caught:
            await read(bad)
        assert caught.value.status == 400 and caught.value.param == "messages"
        assert (await read(good))[-1].finish_reason == "length"
        assert host.num_restarts == 0

    run(work)


def test_the_queue_is_bounded_and_opens_again() -> None:
    gate = GatedEngine(letters_engine(max_num_seqs=2))

    async def work(host: EngineHost) -> None:
        groups = [host.submit([job(str(i), params(n=2))]) for i in range(3)]  # 6 sequences: 2 run, 4 wait
        with pytest.raises(ApiError, match="queue is full: 6 sequences") as caught:
            host.submit([job("one more")])
        assert caught.value.status == 503 and caught.value.headers["Retry-After"]
        assert host.num_open == 3
        for many, param in [([job(f"{i}") for i in range(7)], "prompt"), ([job("wide", params(n=7))], "n")]:
            with pytest.raises(ApiError, match=r"7 sequences.*at most 6") as refused:
                host.submit(many)
            assert refused.value.status == 400 and refused.value.param == param
        gate.open()
        for group in groups:
            assert (await read(group))[-1].finish_reason == "length"
        five = host.submit([job("five", params(n=5))])
        with pytest.raises(ApiError, match="queue is full: 5 sequences"):
            host.submit([job("two more", params(n=2))])
        assert (await read(host.submit([job("one more")])))[-1].finish_reason == "length"
        await read(five)

    run(work, make_host(engine=gate.engine, max_queue=4))


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_cancelling_in_queue_prefill_and_decode_frees_the_pages(steps: int) -> None:
    engine = letters_engine(max_num_seqs=1, max_num_batched_tokens=8)
    gate = GatedEngine(engine)
    free = engine.pool.num_free

    async def work(host: EngineHost) -> None:
        first = host.submit([job("first", params(max_tokens=100), prompt=[1] * 20)])
        queued = host.submit([job("queued")])
        await until(gate.waiting.is_set)
        for done in range(steps):
            gate.steps.release()
            await until(lambda done=done: engine.stats.num_steps > done)
        host.cancel(first)
        host.cancel(queued)
        gate.open()
        await until(lambda: host.num_open == 0)
        assert not engine.has_unfinished and engine.pool.num_free == free
        assert engine.stats.num_generation_tokens < 50, "they ran to their end"
        with pytest.raises(ApiError, match="gone away"):
            await read(first)
        assert (await read(host.submit([job("next")])))[-1].finish_reason == "length"

    run(work, make_host(engine=engine))


def test_the_time_before_a_request_is_submitted_counts() -> None:
    gate = GatedEngine()

    async def work(host: EngineHost) -> None:
        with pytest.raises(ApiError, match="longer than 1000 seconds"):
            await read(host.submit([job()], arrived=host.clock() - 1000))
        gate.open()

    run(work, make_host(engine=gate.engine, request_timeout=1000.0))


def test_a_request_that_takes_too_long_is_ended_with_504() -> None:
    gate = GatedEngine()

    async def work(host: EngineHost) -> None:
        with pytest.raises(ApiError, match="longer than") as caught:
            await read(host.submit([job()]))
        assert caught.value.status == 504
        gate.open()
        await until(lambda: host.num_open == 0)
        assert not gate.engine.has_unfinished

    run(work, make_host(engine=gate.engine, request_timeout=0.05))


def failing_engine(after: int = 3) -> Engine:
    """Raises in a step once there were so many."""
    engine = letters_engine()
    step = engine.step

    def fail() -> Any:
        if engine.stats.num_steps >= after:
            raise RuntimeError("a fault of the engine")
        return step()

    engine.step = fail  # type: ignore[method-assign]
    return engine


def test_a_failing_engine_fails_what_was_under_way_and_is_replaced() -> None:
    engines: list[Engine] = []

    def factory() -> Engine:
        engines.append(letters_engine())
        return engines[-1]

    async def work(host: EngineHost) -> None:
        groups = [host.submit([job(name)]) for name in "abc"]
        for group in groups:
            with pytest.raises(ApiError, match="engine failed") as caught:
                await read(group)
            assert caught.value.status == 500
        before = host.stats.num_generation_tokens
        assert before > 0
        await until(lambda: host.state == "ready")
        assert host.num_restarts == len(engines) == 1 and host.num_open == 0
        assert (await read(host.submit([job("next")])))[-1].finish_reason == "length"
        assert host.stats.num_generation_tokens == before + 12  # counters go on

    run(work, make_host(factory, failing_engine()))


def test_while_the_engine_is_down_requests_are_refused_and_building_is_tried_again() -> None:
    allowed = threading.Event()
    tries: list[int] = []

    def factory() -> Engine:
        tries.append(1)
        if not allowed.is_set():
            raise CheckpointError("the file is away")
        return letters_engine()

    async def work(host: EngineHost) -> None:
        with pytest.raises(ApiError, match="engine failed"):
            await read(host.submit([job()]))
        await until(lambda: len(tries) > 2)
        assert host.state == "restarting" and "a fault of the engine" in host.reason
        with pytest.raises(ApiError, match="takes no requests") as caught:
            host.submit([job()])
        assert caught.value.status == 503
        allowed.set()
        await until(lambda: host.state == "ready")
        assert (await read(host.submit([job()])))[-1].finish_reason == "length"

    run(work, make_host(factory, failing_engine()))


def test_restarts_in_a_row_wait_longer_each_time() -> None:
    now = [100.0]
    settings = HostSettings(restart_delay=1.0, max_restart_delay=5.0, healthy_after=60.0)
    host = EngineHost(letters_engine, letters_engine(), settings, clock=lambda: now[0])
    assert [host._next_delay() for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    now[0] += 61.0
    assert host._next_delay() == 0.0


def test_a_hung_step_is_left_behind() -> None:
    gate = GatedEngine()

    async def work(host: EngineHost) -> None:
        group = host.submit([job()])
        with pytest.raises(ApiError, match="engine failed") as caught:
            await read(group)
        assert caught.value.status == 500
        await until(lambda: host.state == "ready")
        next_group = host.submit([job("next")])
        gate.open()  # the old thread goes on, and nobody hears of it
        deltas = await read(next_group)
        assert sum(len(delta.token_ids) for delta in deltas) == 12
        assert host.num_restarts == 1

    run(work, make_host(engine=gate.engine, step_timeout=0.2))


def test_each_of_several_hung_engines_is_left_behind() -> None:
    gates = [GatedEngine() for _ in range(3)]
    spare = iter([*(gate.engine for gate in gates[1:]), letters_engine()])

    async def work(host: EngineHost) -> None:
        try:
            for number, gate in enumerate(gates, start=1):
                with pytest.raises(ApiError, match="engine failed"):
                    await asyncio.wait_for(read(host.submit([job(str(number))])), 30)
                await until(lambda: host.state == "ready")
                assert host.num_restarts == number and host.engine is not gate.engine
        finally:
            for gate in gates:
                gate.open()
        assert (await read(host.submit([job("next")])))[-1].finish_reason == "length"

    run(work, make_host(lambda: next(spare), gates[0].engine, step_timeout=0.2))


def test_shutdown_lets_requests_finish_and_refuses_new_ones() -> None:
    gate = GatedEngine()

    async def work(host: EngineHost) -> None:
        group = host.submit([job()])
        host.begin_drain()
        with pytest.raises(ApiError, match="shutting down"):
            host.submit([job("late")])
        gate.open()
        assert (await read(group))[-1].finish_reason == "length"

    assert run(work, make_host(engine=gate.engine)).state == "stopped"


def test_shutdown_ends_what_does_not_finish_in_time() -> None:
    gate = GatedEngine()

    async def work(host: EngineHost) -> None:
        group = host.submit([job()])
        host.begin_drain()
        with pytest.raises(ApiError, match="shut down before") as caught:
            await read(group)
        assert caught.value.status == 503
        gate.open()

    host = run(work, make_host(engine=gate.engine, shutdown_timeout=0.05))
    assert not gate.engine.has_unfinished and host.num_open == 0


def test_the_thread_sleeps_while_there_is_nothing_to_do() -> None:
    async def work(host: EngineHost) -> None:
        await read(host.submit([job()]))
        assert host.engine is not None
        steps = host.engine.stats.num_steps
        assert host._worker is not None
        await until(lambda: host._worker is not None and host._worker.busy_since is None)
        await asyncio.sleep(0.05)
        assert host._worker.busy_since is None and host.engine.stats.num_steps == steps

    run(work)


def test_several_requests_of_a_call_are_read_together() -> None:
    async def work(host: EngineHost) -> None:
        group = host.submit([job("a", params(max_tokens=3)), job("b", params(max_tokens=5))])
        tokens = {0: 0, 1: 0}
        async for news in group:
            for place, delta in news:
                tokens[place] += len(delta.token_ids)
        assert tokens == {0: 3, 1: 5}

    run(work)


def test_scheme_without_drafts_has_none() -> None:
    async def work(host: EngineHost) -> None:
        deltas = await read(host.submit([job(keep_steps=True)]))
        assert len(deltas) == 12 and not any(any(delta.is_draft) for delta in deltas)

    run(work, make_host(engine=letters_engine(None)))


@pytest.mark.parametrize(
    "settings",
    [{"max_queue": -1}, {"request_timeout": 0}, {"step_timeout": float("nan")}, {"shutdown_timeout": -1.0}],
)
def test_wrong_host_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        HostSettings(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_names": ()},
        {"model_names": ("",)},
        {"api_key": ""},
        {"api_key": "ä"},
        {"max_request_bytes": 0},
        {"cors_origins": ("foo",)},
        {"cors_origins": ("https://a.example/path",)},
    ],
)
def test_wrong_server_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**{"model_names": ("a",)} | settings)
