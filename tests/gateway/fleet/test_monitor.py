"""What is asked of endpoints, and what follows from their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend
from gateway.fleet import monitor as module
from gateway.fleet.monitor import Monitor, engine_load
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, EngineLoad, Health, Load, PoolEstimate
from tests.gateway.builders import POOL, backend, candidate
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, Script, Upstream, reply

ENDPOINT = "small/a"
PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="1000"} 1.0
process_start_time_seconds 1.7e9
"""
GOOD: Script = [reply(PAGE)]
BAD: Script = [reply(b"", "500 x")]


class Odd:
    """A vLLM whose page we fail to read, at first."""

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
async def asking(
    *scripts: Script, kind: str = "vllm"
) -> AsyncIterator[tuple[Monitor, ConnectionPool, Backend, Upstream]]:
    """A monitor, and one endpoint of its fleet that plays a script at each question."""
    async with Upstream(*scripts) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=1)
        yield Monitor(Fleet([POOL])), origin, backend(kind), upstream
        await origin.close()


def health(monitor: Monitor) -> Health:
    return monitor.loads()[ENDPOINT].health


# --------------------------------------------------------------------------- attempts


def test_an_attempt_counts_from_its_sending_to_its_end() -> None:
    """As in flight; and as prefilling until its first token."""
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
    """An attempt that has had so many tokens."""

    def __init__(self) -> None:
        self.output_tokens = 1


async def test_while_answers_are_written_the_fleet_is_told_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times a second, from the first token of the first to the end of the last; then nothing is told."""
    monkeypatch.setattr(module, "PROGRESS", 0.005)
    monitor, told = Monitor(Fleet([POOL])), list[list[int]]()
    monkeypatch.setattr(monitor.fleet, "on_progress", lambda tokens, now: told.append([count for _, count in tokens]))
    monitor.watch({}, 1.0)
    answers = [Answer(), Answer()]
    for answer in answers:
        monitor.fleet.on_sent(answer, candidate(ENDPOINT), PoolEstimate(1), monotonic(), stream=True)
        monitor.fleet.on_first_token(answer, monotonic())
    answers[0].output_tokens = 7
    await eventually(lambda: told)
    assert told[0] == [7, 1]
    monitor.fleet.on_ended(answers[0], AttemptOutcome.COMPLETED, monotonic(), AttemptReport())
    await eventually(lambda: told[-1] == [1])
    monitor.fleet.on_ended(answers[1], AttemptOutcome.COMPLETED, monotonic(), AttemptReport())
    looks = len(told)
    await asyncio.sleep(0.02)
    assert len(told) == looks
    await monitor.close()


def test_news_is_told_to_whoever_waits_for_it() -> None:
    """A first token and an end; a sending makes no room."""
    monitor, now, key, heard = Monitor(Fleet([POOL])), monotonic(), Answer(), list[str]()
    monitor.fleet.on_news = lambda: heard.append("news")
    monitor.fleet.on_sent(key, candidate(ENDPOINT), PoolEstimate(1), now, stream=True)
    assert heard == []
    monitor.fleet.on_first_token(key, now)
    assert heard == ["news"]
    monitor.fleet.on_ended(key, AttemptOutcome.COMPLETED, now, AttemptReport())
    assert heard == ["news"] * 2


# --------------------------------------------------------------------------- one question


async def test_siblings_are_told_soon_after_something_changed() -> None:
    """Without another event or a decision."""
    told = asyncio.Event()
    monitor = Monitor(Fleet([]))
    monitor.fleet.publish = told.set  # type: ignore[method-assign]
    monitor.publish_soon()
    assert not told.is_set()
    async with asyncio.timeout(5):
        await told.wait()


async def test_an_engine_is_asked_for_its_load_and_believed() -> None:
    """What it says of itself shows other traffic than ours, once two looks agree on it."""
    async with asking(GOOD) as (monitor, origin, vllm, upstream):
        for _ in range(2):
            await monitor.poll(ENDPOINT, origin, vllm)
        found = monitor.loads()[ENDPOINT]
        assert (upstream.requests[0].method, upstream.requests[0].target) == ("GET", "/metrics")
    assert (found.running, found.waiting, found.kv_usage, found.health) == (3, 2, 0.25, Health.UP)
    assert found.scraped_at == pytest.approx(monotonic(), abs=2)


async def test_the_block_size_that_an_engine_says_is_passed_on() -> None:
    """By pool: prefixes are cut into the engine's own blocks from then on."""
    said: list[tuple[str, int]] = []
    async with asking(GOOD) as (monitor, origin, vllm, _):
        monitor = Monitor(monitor.fleet, on_block_size=lambda pool, tokens: said.append((pool, tokens)))
        await monitor.poll(ENDPOINT, origin, vllm)
    assert said == [("small", 32)]


async def test_an_endpoint_without_metrics_is_alive_all_the_same() -> None:
    """A 404 is an answer; that nothing was said of the load changes nothing that is known of it."""
    async with asking([reply(b"", "404 Not Found")]) as (monitor, origin, vllm, _):
        for _ in range(3):
            await monitor.poll(ENDPOINT, origin, vllm)
        assert (health(monitor), monitor.loads()[ENDPOINT].scraped_at) == (Health.UP, Load().scraped_at)


@pytest.mark.parametrize("script", [BAD, [CLOSE], [reply(b"", "503 x")], [HANG], [b"not HTTP\r\n\r\n"]])
async def test_an_endpoint_that_cannot_answer_twice_is_down(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe counts as an attempt does; once may be an accident."""
    monkeypatch.setattr(module, "PROBE_TIMEOUT", 0.1)
    async with asking(script) as (monitor, origin, vllm, _):
        seen = []
        for _ in range(2):
            await monitor.poll(ENDPOINT, origin, vllm)
            seen.append(health(monitor))
    assert seen == [Health.UP, Health.DOWN]


async def test_an_endpoint_where_nobody_listens_is_down_and_may_try_again_once_somebody_does() -> None:
    """Found again by a probe, it is given one request; that request decides."""
    async with asking(GOOD) as (monitor, origin, vllm, _):
        dead = ConnectionPool("http://127.0.0.1:9", connect_timeout=1)
        for _ in range(2):
            await monitor.poll(ENDPOINT, dead, vllm)
        assert health(monitor) is Health.DOWN
        await monitor.poll(ENDPOINT, origin, vllm)
        assert health(monitor) is Health.PROBING


async def test_a_change_of_health_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is asked in between: an operator reads when it went and when it came back."""
    key = object()
    with caplog.at_level(logging.INFO, "firsttoken"):
        async with asking(GOOD, GOOD, BAD, BAD, BAD, BAD, GOOD) as (monitor, origin, vllm, _):
            for _ in range(9):
                await monitor.poll(ENDPOINT, origin, vllm)
            monitor.fleet.on_sent(key, candidate(ENDPOINT), PoolEstimate(1), monotonic(), stream=True)
            monitor.fleet.on_first_token(key, monotonic())
            for _ in range(2):
                await monitor.poll(ENDPOINT, origin, vllm)
    assert [entry.message for entry in caplog.records] == [
        "endpoint small/a is down for 5 s: nobody answered 2 times in a row",
        "endpoint small/a is on trial",
        "endpoint small/a is up",
    ]


# --------------------------------------------------------------------------- all the time


async def test_every_endpoint_is_asked_at_once_and_then_again_and_again() -> None:
    """Each in its turn; closing ends it."""
    async with asking(GOOD) as (monitor, origin, vllm, upstream), asking(GOOD) as (_, other, _, second):
        monitor.watch({"small/a": (origin, vllm), "small/b": (other, vllm)}, 0.05)
        await upstream.until(lambda seen: len(seen.requests) >= 3)
        await second.until(lambda seen: len(seen.requests) >= 3)
        await monitor.close()
        asked = len(upstream.requests)
        await asyncio.sleep(0.15)
        assert len(upstream.requests) == asked
        assert monitor.loads()["small/b"].running == 3


async def test_who_has_nothing_to_say_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    """An API is billed by the request, and has neither probe nor load."""
    async with asking(GOOD, kind="compatible") as (monitor, origin, api, upstream):
        monitor.watch({ENDPOINT: (origin, api)}, 0.01)
        await asyncio.sleep(0.05)
        await monitor.close()
        assert (upstream.connections, health(monitor)) == (0, Health.UP)
    assert caplog.records == []


async def test_a_page_that_we_fail_to_read_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    """Our bug is said once, and the endpoint is asked on."""
    odd: Backend = Odd()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, "firsttoken"):
        async with asking(GOOD) as (monitor, origin, _, _):
            monitor.watch({ENDPOINT: (origin, odd)}, 0.01)
            await eventually(lambda: monitor.loads()[ENDPOINT].running == 3)
            await monitor.close()
    assert [entry.message for entry in caplog.records] == ["the load of endpoint small/a could not be read"]


# --------------------------------------------------------------------------- what an engine says


@pytest.mark.parametrize(
    ("said", "load"),
    [
        ({}, EngineLoad()),
        ({"running": 3.0, "waiting": 0.0, "kv_usage": 0.5}, EngineLoad(running=3, waiting=0, kv_usage=0.5)),
        ({"block_size": 32.0, "kv_blocks": 1000.0}, EngineLoad(block_size=32, kv_blocks=1000)),
        ({"running": None, "started_at": 1.5}, EngineLoad(started_at=1.5)),
        ({"prefix_queries": 10.0, "prefix_hits": 4.0}, EngineLoad(prefix_queries=10.0, prefix_hits=4.0)),
        ({"unheard_of": 1.0, "waiting": 2.9}, EngineLoad(waiting=2)),
        ({"running": -1.0, "block_size": -16.0, "waiting": 1e300}, EngineLoad()),
    ],
)
def test_what_is_understood_is_taken_and_the_rest_left(said: Mapping[str, float | None], load: EngineLoad) -> None:
    """Counts are whole numbers; what cannot be one was not said."""
    assert engine_load(said) == load
