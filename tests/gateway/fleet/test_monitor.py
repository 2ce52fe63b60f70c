"""Polling of endpoints, and the effect of answers on the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import monotonic
from weakref import WeakKeyDictionary

import pytest

from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend
from gateway.fleet import endpoint_poll
from gateway.fleet import monitor as module
from gateway.fleet.endpoint_poll import EndpointPoll, PollTarget, engine_load
from gateway.fleet.monitor import Monitor
from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Health, Load, PoolEstimate, PrefixBlocks
from tests.support.builders import POOL, backend, candidate
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, Script, Upstream, reply

pytestmark = pytest.mark.virtual_time

ENDPOINT = "small/a"
POLLS: WeakKeyDictionary[Monitor, EndpointPoll] = WeakKeyDictionary()
PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="1000"} 1.0
process_start_time_seconds 1.7e9
"""
GOOD: Script = [reply(PAGE)]
BAD: Script = [reply(b"", "500 x")]


class UnreadableOnce:
    """A vLLM backend that fails to read the first page."""

    def __init__(self) -> None:
        self.inner, self.reads = backend(), 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def read_load(self, body: bytes) -> Mapping[str, float | None]:
        self.reads += 1
        if self.reads == 1:
            raise OverflowError("cannot convert float infinity to integer")
        return self.inner.read_load(body)


@asynccontextmanager
async def monitoring(
    *scripts: Script, kind: str = "vllm"
) -> AsyncIterator[tuple[Monitor, ConnectionPool, Backend, Upstream]]:
    """A monitor, and an endpoint of its fleet that plays a script at each poll."""
    async with Upstream(*scripts) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        yield Monitor(Fleet([POOL])), origin, backend(kind), upstream
        await origin.close()


async def poll(monitor: Monitor, connections: ConnectionPool, speaking: Backend) -> None:
    """One poll of the endpoint, after those before."""
    known = POLLS.setdefault(monitor, EndpointPoll(ENDPOINT, PollTarget(connections, speaking), 1.0))
    known.target = PollTarget(connections, speaking, POOL.name)
    await monitor.poll(known)


def health(monitor: Monitor) -> Health:
    return monitor.loads()[ENDPOINT].health


# --------------------------------------------------------------------------- attempts


def test_an_attempt_counts_from_its_sending_to_its_end() -> None:
    """As in flight, and as prefilling until the first token."""
    monitor, now, key = Monitor(Fleet([POOL])), monotonic(), object()

    def load() -> tuple[int, int]:
        found = monitor.fleet.snapshot(now).loads[ENDPOINT]
        return found.in_flight, found.prefilling

    seen = [load()]
    monitor.fleet.on_sent(key, candidate(ENDPOINT), PoolEstimate(100), now, stream=True)
    seen.append(load())
    monitor.fleet.on_first_token(key, now)
    seen.append(load())
    monitor.fleet.on_ended(key, AttemptOutcome.COMPLETED, now, AttemptReport())
    assert [*seen, load()] == [(0, 0), (1, 1), (1, 0), (0, 0)]


class Answer:
    """An attempt with a number of output tokens."""

    def __init__(self) -> None:
        self.output_tokens = 1


async def test_progress_of_running_answers_is_reported_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first token of the first answer to the end of the last; never without answers."""
    monkeypatch.setattr(module, "PROGRESS", 0.005)
    monitor, reports = Monitor(Fleet([POOL])), list[list[int]]()
    monkeypatch.setattr(
        monitor.fleet, "on_progress", lambda tokens, now: reports.append([count for _, count in tokens])
    )
    monitor.watch({}, 1.0)
    answers = [Answer(), Answer()]
    for answer in answers:
        monitor.fleet.on_sent(answer, candidate(ENDPOINT), PoolEstimate(1), monotonic(), stream=True)
        monitor.fleet.on_first_token(answer, monotonic())
    answers[0].output_tokens = 7
    await eventually(lambda: reports)
    assert reports[0] == [7, 1]
    monitor.fleet.on_ended(answers[0], AttemptOutcome.COMPLETED, monotonic(), AttemptReport())
    await eventually(lambda: reports[-1] == [1])
    monitor.fleet.on_ended(answers[1], AttemptOutcome.COMPLETED, monotonic(), AttemptReport())
    count = len(reports)
    await asyncio.sleep(0.02)
    assert len(reports) == count
    await monitor.close()


def test_on_news_is_called_at_first_tokens_and_ends() -> None:
    """A sending makes no room in the queue."""
    monitor, now, key, heard = Monitor(Fleet([POOL])), monotonic(), Answer(), list[str]()
    monitor.fleet.on_news = lambda: heard.append("news")
    monitor.fleet.on_sent(key, candidate(ENDPOINT), PoolEstimate(1), now, stream=True)
    assert heard == []
    monitor.fleet.on_first_token(key, now)
    assert heard == ["news"]
    monitor.fleet.on_ended(key, AttemptOutcome.COMPLETED, now, AttemptReport())
    assert heard == ["news"] * 2


# --------------------------------------------------------------------------- one poll


async def test_publish_soon_publishes_without_another_event() -> None:
    """Nor a decision."""
    reports = asyncio.Event()
    monitor = Monitor(Fleet([]))
    monitor.fleet.publish = reports.set  # type: ignore[method-assign]
    monitor.publish_soon()
    assert not reports.is_set()
    async with asyncio.timeout(5):
        await reports.wait()


async def test_two_polls_show_other_traffic() -> None:
    """The engine's counts exceed the gateway's own requests; one poll could be outdated."""
    async with monitoring(GOOD) as (monitor, origin, vllm, upstream):
        for _ in range(2):
            await poll(monitor, origin, vllm)
        found = monitor.loads()[ENDPOINT]
        assert (upstream.requests[0].method, upstream.requests[0].target) == ("GET", "/metrics")
    assert (found.running, found.waiting, found.kv_usage, found.health) == (3, 2, 0.25, Health.UP)
    assert found.scraped_at == pytest.approx(monotonic(), abs=2)


async def test_hits_are_whole_blocks_of_the_reported_size() -> None:
    """The engine's own, whatever the configuration says."""
    prompt = PoolEstimate(200, PrefixBlocks((1, 2, 3, 4, 5)))
    async with monitoring(GOOD) as (monitor, origin, vllm, _):
        endpoint, *_ = monitor.fleet.snapshot(monotonic()).pools["small"].endpoints
        cache = monitor.fleet.cache(ENDPOINT)
        assert cache is not None
        cache.index.record(prompt.blocks.hashes)
        before = monitor.fleet.view.hit(endpoint, prompt)
        await poll(monitor, origin, vllm)
        assert (before, monitor.fleet.view.hit(endpoint, prompt)) == (80, 64)


async def test_an_endpoint_without_metrics_is_up() -> None:
    """A 404 is an answer; the known load is unchanged."""
    async with monitoring([reply(b"", "404 Not Found")]) as (monitor, origin, vllm, _):
        for _ in range(3):
            await poll(monitor, origin, vllm)
        assert (health(monitor), monitor.loads()[ENDPOINT].scraped_at) == (Health.UP, Load().scraped_at)


@pytest.mark.parametrize("script", [BAD, [CLOSE], [reply(b"", "503 x")], [HANG], [b"not HTTP\r\n\r\n"]])
async def test_two_failed_probes_take_an_endpoint_down(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single failure may be an accident."""
    monkeypatch.setattr(endpoint_poll, "PROBE_TIMEOUT", 0.1)
    async with monitoring(script) as (monitor, origin, vllm, _):
        seen = []
        for _ in range(2):
            await poll(monitor, origin, vllm)
            seen.append(health(monitor))
    assert seen == [Health.UP, Health.DOWN]


async def test_a_lost_endpoint_is_probing_after_an_answered_probe() -> None:
    """One request follows, and decides."""
    async with monitoring(GOOD) as (monitor, origin, vllm, _):
        dead = ConnectionPool("http://127.0.0.1:9", connect_timeout=1)
        for _ in range(2):
            await poll(monitor, dead, vllm)
        assert health(monitor) is Health.DOWN
        await poll(monitor, origin, vllm)
        assert health(monitor) is Health.PROBING


async def test_each_change_of_health_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """At any number of polls in between."""
    key = object()
    with caplog.at_level(logging.INFO, "firsttoken"):
        async with monitoring(GOOD, GOOD, *[BAD] * 8, GOOD) as (monitor, origin, vllm, _):
            for _ in range(9):
                await poll(monitor, origin, vllm)
            monitor.fleet.on_sent(key, candidate(ENDPOINT), PoolEstimate(1), monotonic(), stream=True)
            monitor.fleet.on_first_token(key, monotonic())
            for _ in range(2):
                await poll(monitor, origin, vllm)
    assert [entry.message for entry in caplog.records] == [
        "the load of endpoint small/a is not known: its /health answers 500; its own requests are counted",
        "endpoint small/a is down for 5 s: its /health answers 500",
        "endpoint small/a tells its load",
        "endpoint small/a is on trial",
        "endpoint small/a is up",
    ]


# --------------------------------------------------------------------------- periodic polls


async def test_every_endpoint_is_polled_at_once_and_periodically() -> None:
    """Until `close`."""
    async with monitoring(GOOD) as (monitor, origin, vllm, upstream), monitoring(GOOD) as (_, other, _, second):
        monitor.watch({"small/a": PollTarget(origin, vllm), "small/b": PollTarget(other, vllm)}, 0.05)
        await upstream.until(lambda seen: len(seen.requests) >= 3)
        await second.until(lambda seen: len(seen.requests) >= 3)
        await monitor.close()
        asked = len(upstream.requests)
        await asyncio.sleep(0.15)
        assert len(upstream.requests) == asked
        assert monitor.loads()["small/b"].running == 3


async def test_an_api_is_never_polled(caplog: pytest.LogCaptureFixture) -> None:
    """An API is billed by the request, and has neither probe nor load."""
    async with monitoring(GOOD, kind="compatible") as (monitor, origin, api, upstream):
        monitor.watch({ENDPOINT: PollTarget(origin, api)}, 0.01)
        await asyncio.sleep(0.05)
        await monitor.close()
        assert (upstream.connections, health(monitor)) == (0, Health.UP)
    assert caplog.records == []


async def test_an_error_in_reading_a_page_does_not_stop_polling(caplog: pytest.LogCaptureFixture) -> None:
    """The gateway's fault is logged once."""
    odd: Backend = UnreadableOnce()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, "firsttoken"):
        async with monitoring(GOOD) as (monitor, origin, _, _):
            monitor.watch({ENDPOINT: PollTarget(origin, odd)}, 0.01)
            await eventually(lambda: monitor.loads()[ENDPOINT].running == 3)
            await monitor.close()
    assert [entry.message for entry in caplog.records] == ["the load of endpoint small/a could not be read"]


# --------------------------------------------------------------------------- reported load


@pytest.mark.parametrize(
    ("reported", "load"),
    [
        ({}, EngineLoad()),
        ({"running": 3.0, "waiting": 0.0, "kv_usage": 0.5}, EngineLoad(running=3, waiting=0, kv_usage=0.5)),
        ({"block_size": 32.0, "kv_blocks": 1000.0}, EngineLoad(block_size=32, kv_blocks=1000)),
        ({"running": None, "started_at": 1.5}, EngineLoad(started_at=1.5)),
        ({"prefix_queries": 10.0, "prefix_hits": 4.0}, EngineLoad(prefix_queries=10.0, prefix_hits=4.0)),
        ({"unheard_of": 1.0, "waiting": 2.9}, EngineLoad(waiting=2)),
        ({"running": -1.0, "block_size": -16.0, "waiting": 1e300}, EngineLoad()),
        ({"kv_usage": 45.0, "running": 1.0}, EngineLoad(running=1)),
    ],
)
def test_invalid_values_of_a_load_are_ignored(reported: Mapping[str, float | None], load: EngineLoad) -> None:
    """Counts are non-negative integers; unknown names are ignored. Usage in percent would close the engine for ever."""
    assert engine_load(reported) == load
