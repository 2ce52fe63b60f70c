"""Cache warming after a lost cache, before an engine takes its share; keep-warm for idle endpoints."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from gateway.parts.warming import part as cache_warming
from gateway.parts.warming.part import SavedPrompt
from gateway.synthetic_request import send_synthetic
from gateway.upstream.attempt import WireAttempt
from lab.servers.simulated_server import SimulatedServer
from policies.types import Load
from tests.support.gateways import document, running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

SYSTEM = " ".join(f"rule{i}" for i in range(400))
QUICK = {"scrape": "50ms"}


async def ask(gateway: Gateway, *said: str, system: str = SYSTEM) -> None:
    """Sends one turn of a conversation, with the caller's messages `said` so far."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": said[0]}]
    for word in said[1:]:
        messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": word}]
    body = {"model": "chat", "max_tokens": 2, "stream": True, "messages": messages}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status == 200
        await reply.read()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Gateway, SimulatedServer, SimulatedServer]]:
    """Gateway over a pool of two engines."""
    async with (
        engines(2) as (steady, mortal),
        running({"both": engine_pool(steady, mortal)}, defaults=QUICK) as gateway,
    ):
        yield gateway, steady, mortal


def load_of(gateway: Gateway, server: SimulatedServer) -> Load:
    return gateway.monitor.loads()[f"both/{server.url.removeprefix('http://')}"]


async def restart(gateway: Gateway, server: SimulatedServer) -> None:
    """Kills the engine until the gateway has noticed, then starts it with an empty cache."""
    await server.kill()
    await eventually(lambda: load_of(gateway, server).health.value == "down")
    server.requests.clear()
    await server.start()


def warmed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "was warmed up" in record.getMessage()]


async def test_a_restarted_engine_is_warmed_up_before_it_takes_its_share(caplog: pytest.LogCaptureFixture) -> None:
    """The first requests hit system prompt and conversation in the cache."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with pair() as (gateway, steady, mortal):
        for user in range(4):
            await ask(gateway, f"user {user}", "tell me " * 40)
        await restart(gateway, mortal)
        await eventually(lambda: load_of(gateway, mortal).warming)
        await eventually(lambda: warmed(caplog))
        await eventually(lambda: not load_of(gateway, mortal).warming)
        sent = [received.body for received in mortal.requests]
        assert sent
        assert all(body["max_tokens"] == 1 and body["messages"][0]["content"] == SYSTEM for body in sent)
        await steady.kill()
        await ask(gateway, "user 0", "tell me " * 40, "and then?")
        await ask(gateway, "somebody new")
        for record in list(gateway.recorder.recent)[-2:]:
            assert record.answer.prompt_tokens is not None
            assert record.answer.cached_tokens is not None
            assert record.answer.prompt_tokens - record.answer.cached_tokens <= 32


async def test_warm_up_requests_leave_no_record(caplog: pytest.LogCaptureFixture) -> None:
    """No Record, so no metric; the fleet learns from them, and no load remains."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with pair() as (gateway, _, mortal):
        for user in range(3):
            await ask(gateway, f"user {user}")
        endpoint = f"both/{mortal.url.removeprefix('http://')}"
        await restart(gateway, mortal)
        taught = gateway.monitor.fleet.view.statistics(endpoint, monotonic()).samples
        await eventually(lambda: warmed(caplog))
        assert gateway.monitor.fleet.view.statistics(endpoint, monotonic()).samples > taught
        assert (load_of(gateway, mortal).in_flight, load_of(gateway, mortal).queued_tokens) == (0, 0)
        assert [record.end for record in gateway.recorder.recent] == [RequestOutcome.COMPLETED] * 3


async def test_a_warm_up_is_a_request_of_the_caller_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence of a prompt is no second witness of its own caller."""
    callers: list[str] = []

    async def spy(*known: Any) -> WireAttempt:
        callers.append(known[-1])
        return await send_synthetic(*known)

    monkeypatch.setattr(cache_warming, "send_synthetic", spy)
    async with pair() as (gateway, _, mortal):
        await ask(gateway, "user")
        await restart(gateway, mortal)
        await eventually(lambda: callers)
        assert {*callers} == {"127.0.0.1"}


async def test_prompts_of_a_warm_up_are_cut_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of megabytes is decoded and estimated for several cuts: streams do not wait for them."""
    threads, prefix = set[threading.Thread](), SavedPrompt.prefix

    def spy(*known: Any) -> Any:
        threads.add(threading.current_thread())
        return prefix(*known)

    monkeypatch.setattr(SavedPrompt, "prefix", spy)
    async with pair() as (gateway, _, mortal):
        await ask(gateway, "user")
        await restart(gateway, mortal)
        await eventually(lambda: threads)
    assert threading.main_thread() not in threads


async def test_a_failed_warm_up_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Warm-up ends after two failures; the other engine answers."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with pair() as (gateway, _, mortal):
        for user in range(6):
            await ask(gateway, f"user {user}", system=f"{user} {SYSTEM}")
        mortal.faults.status = 500
        await restart(gateway, mortal)
        await eventually(lambda: warmed(caplog))
        assert ": 0 prefixes" in warmed(caplog)[0]
        await ask(gateway, "and now?")
        assert [record.end for record in gateway.recorder.recent] == [RequestOutcome.COMPLETED] * 7


async def test_an_engine_that_restarts_repeatedly_is_warmed_up_once(caplog: pytest.LogCaptureFixture) -> None:
    """After the second restart, requests of callers fill the cache."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with pair() as (gateway, _, mortal):
        await ask(gateway, "hello")
        await restart(gateway, mortal)
        await eventually(lambda: warmed(caplog))
        await restart(gateway, mortal)
        endpoint = f"both/{mortal.url.removeprefix('http://')}"
        await eventually(
            lambda: load_of(gateway, mortal).health.value != "down" and endpoint not in gateway.fleet.cache_lost
        )
        await ask(gateway, "hello")
        assert not load_of(gateway, mortal).warming
        assert {received.body["max_tokens"] for received in mortal.requests} <= {2}


async def test_the_only_engine_of_a_pool_is_not_warmed_up() -> None:
    """Requests of callers fill the cache."""
    async with engines(1) as (only,), running({"both": engine_pool(only)}, defaults=QUICK) as gateway:
        await ask(gateway, "hello")
        await restart(gateway, only)
        await eventually(lambda: load_of(gateway, only).health.value != "down")
        await ask(gateway, "hello again")
        assert [received.body["max_tokens"] for received in only.requests] == [2]


@pytest.mark.parametrize("only", [["eu"], ["eu", "us"]], ids=["its region", "both"])
async def test_no_prompt_is_sent_to_a_region_that_its_route_may_not_use(only: list[str]) -> None:
    """A warm-up is no way around `region.only`: an engine elsewhere stays cold."""
    async with engines(3) as (one, two, mortal):
        endpoints = [{"url": one.url, "region": "eu"}, {"url": two.url, "region": "eu"}]
        endpoints.append({"url": mortal.url, "region": "us"})
        route = {"tiers": ["both"], "region": {"only": only, "prefer": ["eu"]}}
        pools = {"both": {**engine_pool(), "endpoints": endpoints}}
        async with running(pools, {"chat": route}, defaults=QUICK) as gateway:
            for user in range(3):
                await ask(gateway, f"user {user}", "tell me " * 40)
            await restart(gateway, mortal)
            await eventually(lambda: load_of(gateway, mortal).health.value != "down")
            await asyncio.sleep(30.0)
            assert bool(mortal.requests) is ("us" in only)


async def test_an_idle_endpoint_is_kept_warm() -> None:
    """By repeated requests for one token; none while there is traffic."""
    pools: dict[str, Any] = {}
    async with engines(1) as (engine,):
        pools["both"] = engine_pool(engine, keep_warm={"idle": "150ms"})
        async with running(pools, defaults=QUICK) as gateway:
            await eventually(lambda: len(engine.requests) >= 2)
            assert {(body["max_tokens"], body["messages"][0]["content"]) for body in _bodies(engine)} == {(1, "hi")}
            engine.requests.clear()
            for _ in range(4):
                await ask(gateway, "hello")
                await asyncio.sleep(0.03)
            assert [body["max_tokens"] for body in _bodies(engine)] == [2] * 4
            assert len(gateway.recorder.recent) == 4


async def test_a_reload_begins_and_ends_keeping_warm() -> None:
    """No cache is lost meanwhile: the loop looks at idle endpoints because of the pool's new settings alone."""
    async with engines(1) as (engine,):
        cold, warm = {"both": engine_pool(engine)}, {"both": engine_pool(engine, keep_warm={"idle": "150ms"})}
        async with running(cold, defaults=QUICK) as gateway:
            await asyncio.sleep(5.0)
            assert not engine.requests
            await gateway.apply_config(Config.model_validate(document(warm, defaults=QUICK)))
            await eventually(lambda: len(engine.requests) >= 2)
            await gateway.apply_config(Config.model_validate(document(cold, defaults=QUICK)))
            await asyncio.sleep(1.0)
            engine.requests.clear()
            await asyncio.sleep(5.0)
            assert not engine.requests


def _bodies(engine: SimulatedServer) -> list[Any]:
    return [received.body for received in engine.requests]
