"""Data-parallel ranks that a server does not have, and engines that sleep: told, and no caller's loss."""

from __future__ import annotations

import asyncio
import json
import logging
from time import monotonic
from typing import Any

import pytest

from backends.ext_proc.messages import BodyMode
from gateway.app import Gateway
from gateway.observe.record import Stage
from gateway.parts.picker.part import PickerPart
from lab.servers.simulated_server import SimulatedServer
from tests.gateway.picker.test_picker import Envoy, destination
from tests.support.builders import get, stream_status
from tests.support.gateways import running
from tests.support.grpc_client import grpc_client
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

ROUTES = {"chat": {"tiers": ["own"], "ttft": "off"}}
SOON = {"scrape": "50ms"}


def rank_pool(*servers: SimulatedServer, ranks: range) -> dict[str, Any]:
    endpoints = [{"url": server.url, "dp_rank": rank} for server in servers for rank in ranks]
    return {**engine_pool(), "endpoints": endpoints}


async def views(gateway: Gateway) -> dict[str, dict[str, Any]]:
    """The answer of GET /fleet, by endpoint."""
    _, _, body = await get(gateway.admin_url, "/fleet")
    return {one["endpoint"]["id"]: one for one in json.loads(body)}


async def statuses(gateway: Gateway, count: int) -> list[int]:
    """Of so many streams at once: one after the other, engines are polled a thousand times meanwhile."""
    return await asyncio.gather(*(stream_status(gateway) for _ in range(count)))


def health(gateway: Gateway) -> list[str]:
    return [load.health.value for load in gateway.monitor.loads().values()]


def answered(server: SimulatedServer) -> int:
    """Callers' requests so far; those of the gateway's own ask for one token."""
    return sum(each.body.get("max_tokens") != 1 for each in server.requests)


# --------------------------------------------------------------------------- ranks


async def test_ranks_that_a_server_does_not_have_get_no_caller_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Two nodes, both written with the ranks of the first: an idle rank without a series is the most attractive."""
    with caplog.at_level(logging.WARNING, "firsttoken"):
        async with (
            engines(1, ranks=range(4)) as [first],
            engines(1, ranks=range(4, 8)) as [second],
            running({"own": rank_pool(first, second, ranks=range(4))}, ROUTES, defaults=SOON) as gateway,
        ):
            await eventually(lambda: health(gateway).count("down") == 4)
            assert await statuses(gateway, 60) == [200] * 60
            assert (answered(first), answered(second)) == (60, 0)
            told = {id: one["why"] for id, one in (await views(gateway)).items() if one["load"]["health"] == "down"}
    reason = "this server has ranks 4..7, not {}, by its /metrics"
    assert told == {f"own/127.0.0.1:{second.port}/dp{rank}": reason.format(rank) for rank in range(4)}
    assert sum("this server has ranks 4..7, not 0" in entry.message for entry in caplog.records) == 2


async def test_one_rank_too_many_costs_no_caller_an_answer() -> None:
    async with (
        engines(1, ranks=range(4, 8)) as [server],
        running({"own": rank_pool(server, ranks=range(3, 6))}, ROUTES, defaults=SOON) as gateway,
    ):
        await eventually(lambda: health(gateway) == ["down", "up", "up"])
        assert await statuses(gateway, 30) == [200] * 30


async def test_a_page_that_names_other_ranks_is_disproved_by_an_answer() -> None:
    """A front end may count its ranks from 0 where its page counts those of all nodes: the gateway asks itself."""
    async with engines(1, ranks=range(4, 8)) as [server]:
        server.takes_any_rank = True
        async with running({"own": rank_pool(server, ranks=range(2))}, ROUTES, defaults=SOON) as gateway:
            await eventually(lambda: health(gateway) in (["probing", "probing"], ["up", "up"]), within=60)
            assert [await stream_status(gateway) for _ in range(10)] == [200] * 10
            assert health(gateway) == ["up", "up"]
            assert all("ranks 4..7" in one["why"] for one in (await views(gateway)).values())


# --------------------------------------------------------------------------- sleep


async def test_a_sleeping_engine_gets_no_request_and_nobody_calls_it_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No trial by a caller either; told by /fleet, the log and the reason of a decision."""
    with caplog.at_level(logging.WARNING, "firsttoken"):
        async with (
            engines(2) as [idle, busy],
            running({"own": engine_pool(idle, busy)}, ROUTES, defaults=SOON) as gateway,
        ):
            idle.sleeping.sleep()
            await eventually(lambda: health(gateway) == ["asleep", "up"])
            for _ in range(20):
                assert await stream_status(gateway) == 200
                await asyncio.sleep(1.0)
            assert (answered(idle), answered(busy)) == (0, 20)
            [view, _] = (await views(gateway)).values()
            assert (view["load"]["health"], view["breaker"]) == ("asleep", "closed")
            assert view["why"] == "it is asleep: it gets no request until it is woken"
            assert [each["what"] for each in view["believed"]] == ["asleep"]
            await idle.sleeping.wake()
            await eventually(lambda: health(gateway) == ["up", "up"])
    lines = [entry.message for entry in caplog.records]
    assert [line.partition(" is ")[2] for line in lines] == [
        "asleep: it gets no request until it is woken",
        "awake, with an empty cache",
    ]


async def test_a_sleep_forgets_the_prefixes() -> None:
    """vLLM discards its KV cache, and no counter of its page decreases."""
    async with engines(1) as [server], running({"own": engine_pool(server)}, ROUTES, defaults=SOON) as gateway:
        endpoint, *_ = gateway.monitor.loads()
        cache = gateway.fleet.cache(endpoint)
        assert cache is not None
        await eventually(lambda: gateway.monitor.engine_loads())
        cache.index.record(range(100))
        server.sleeping.sleep(level=2)
        await eventually(lambda: health(gateway) == ["asleep"])
        slept = len(cache.index)
        cache.index.record(range(100))
        await server.sleeping.wake()
        await eventually(lambda: health(gateway) == ["up"])
        assert (slept, len(cache.index)) == (0, 0)


async def test_while_a_whole_pool_sleeps_the_next_tier_answers() -> None:
    routes = {"chat": {"tiers": ["own", "next"], "ttft": "off"}}
    async with engines(2) as [sleeper, other]:
        sleeper.sleeping.sleep()
        pools = {"own": engine_pool(sleeper), "next": engine_pool(other)}
        async with running(pools, routes, defaults=SOON) as gateway:
            await eventually(lambda: health(gateway) == ["asleep", "up"])
            assert [await stream_status(gateway) for _ in range(6)] == [200] * 6
        assert (answered(sleeper), answered(other)) == (0, 6)


async def test_a_fleet_that_sleeps_refuses_at_once_with_the_reason() -> None:
    """A request there would wait until somebody wakes it."""
    async with engines(1) as [sleeper]:
        sleeper.sleeping.sleep()
        own = engine_pool(sleeper, keep_warm={"idle": "100ms"})
        pick = {"listen": "127.0.0.1:0"}
        async with running({"own": own}, {**ROUTES, "served": ROUTES["chat"]}, defaults=SOON, pick=pick) as gateway:
            await eventually(lambda: health(gateway) == ["asleep"])
            before = len(sleeper.requests)
            assert await stream_status(gateway) == 503
            assert "asleep" in gateway.recorder.recent[-1].error
            (incident,) = json.loads((await get(gateway.admin_url, "/incidents?minutes=5"))[2])["incidents"]
            assert (incident["culprit"], incident["cause"]) == (f"own/{sleeper.url[7:]}", "endpoint_failed")
            assert "asleep at the decision" in str(incident)
            assert (await get(gateway.url, "/ready"))[0] == 503
            async with grpc_client(gateway.part(PickerPart).url) as client:
                told = await Envoy(client, BodyMode.BUFFERED).pick()
            assert told.immediate_response.status.code == 503
            await asyncio.sleep(3.0)
            assert (len(sleeper.requests), sleeper.sleeping.woken) == (before, 0)  # kept warm, probed: neither


async def test_attempts_at_an_engine_that_falls_asleep_are_moved() -> None:
    """They would wait for its waking; another engine answers."""
    async with engines(2) as [one, two], running({"own": engine_pool(one, two)}, ROUTES, defaults=SOON) as gateway:
        await eventually(lambda: health(gateway) == ["up", "up"])
        assert await stream_status(gateway) == 200
        favourite = one if one.requests else two  # of the next request with this prompt
        favourite.sleeping.sleep()
        asked = [asyncio.create_task(stream_status(gateway)) for _ in range(4)]
        async with asyncio.timeout(60):
            assert await asyncio.gather(*asked) == [200] * 4
        assert len(favourite.requests) > 1
        assert favourite.sleeping.woken == 0


# --------------------------------------------------------------------------- waking


WAKING = 4.0  # s


@pytest.mark.parametrize("ttft", ["off", {"budget": "1s"}], ids=["without a budget", "with one"])
async def test_a_pool_that_sleeps_is_woken_for_a_caller(ttft: Any) -> None:
    """Once, for all who come; the wait is part of the connection, and no pace of the engine's."""
    async with engines(1) as [sleeper]:
        sleeper.sleeping.sleep()
        sleeper.sleeping.wake_s = WAKING
        routes = {"chat": {"tiers": ["own"], "ttft": ttft}}
        async with running({"own": engine_pool(sleeper, wake=True)}, routes, defaults=SOON) as gateway:
            await eventually(lambda: health(gateway) == ["asleep"])
            assert (await get(gateway.url, "/ready"))[0] == 200
            async with asyncio.timeout(60):
                assert await asyncio.gather(*(stream_status(gateway) for _ in range(5))) == [200] * 5
            assert (sleeper.sleeping.woken, health(gateway)) == (1, ["up"])
            connecting = [record.spent[Stage.CONNECT] for record in gateway.recorder.recent]
            assert all(seconds is not None and seconds >= WAKING * 0.9 for seconds in connecting)
            [load] = gateway.monitor.loads()
            assert gateway.fleet.view.statistics(load, monotonic()).error[1] < 10


async def test_a_pool_is_not_woken_while_another_can_answer_in_time() -> None:
    """The wait counts as a cold start: it is part of the forecast."""
    routes = {"chat": {"tiers": ["own", "next"], "ttft": {"budget": "1s"}}}
    async with engines(2) as [sleeper, other]:
        sleeper.sleeping.sleep()
        pools = {"own": engine_pool(sleeper, wake=True), "next": engine_pool(other)}
        async with running(pools, routes, defaults=SOON) as gateway:
            await eventually(lambda: health(gateway) == ["asleep", "up"])
            assert [await stream_status(gateway) for _ in range(6)] == [200] * 6
        assert (answered(sleeper), answered(other), sleeper.sleeping.woken) == (0, 6, 0)


async def test_an_awake_engine_of_the_pool_is_preferred_to_waking_another() -> None:
    async with engines(2) as [sleeper, other]:
        sleeper.sleeping.sleep()
        async with running({"own": engine_pool(sleeper, other, wake=True)}, ROUTES, defaults=SOON) as gateway:
            await eventually(lambda: health(gateway) == ["asleep", "up"])
            assert [await stream_status(gateway) for _ in range(6)] == [200] * 6
        assert (answered(other), sleeper.sleeping.woken) == (6, 0)


async def test_the_picker_wakes_the_engine_that_it_names() -> None:
    async with engines(1) as [sleeper]:
        sleeper.sleeping.sleep()
        own, pick = engine_pool(sleeper, wake=True), {"listen": "127.0.0.1:0"}
        async with running({"own": own}, {"served": ROUTES["chat"]}, defaults=SOON, pick=pick) as gateway:
            await eventually(lambda: health(gateway) == ["asleep"])
            async with grpc_client(gateway.part(PickerPart).url) as client:
                named = destination(await Envoy(client, BodyMode.BUFFERED).pick())
            assert named == sleeper.url.removeprefix("http://")
            await eventually(lambda: health(gateway) == ["up"])
        assert sleeper.sleeping.woken == 1
