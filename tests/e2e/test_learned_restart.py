"""A gateway restarted in front of engines that it knows, over real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest

from gateway.app import Gateway
from policies.types import Forecast, Load, PoolEstimate
from tests.support.builders import CHAT, calling, get, post
from tests.support.gateways import running
from tests.support.redis import redis_server
from tests.support.served import serving, write_config
from tests.support.simulated import engine_pool, engines, eventually

LESSONS = 20  # requests before the restart
SHORT = {"stream": True, "max_tokens": 2}
ROUTES = {"chat": {"tiers": ["only"], "ttft": {"budget": "20s"}}}


async def ask(gateway: Gateway, random: Random, count: int) -> None:
    """New prompts of 100 to 800 tokens, one after the other."""
    for _ in range(count):
        words = " ".join(str(random.randrange(1000)) for _ in range(random.randrange(100, 800)))
        async with calling(gateway.url) as caller:
            await caller.ask(
                post({**CHAT, "messages": [{"role": "user", "content": words}], **SHORT}, "connection: close")
            )
            await caller.rest()


def forecast(gateway: Gateway) -> Forecast:
    """Of a prompt of 1,000 new tokens on an idle engine."""
    now, pool = monotonic(), gateway.runtime.current.pools["only"]
    idle = dict.fromkeys((endpoint.id for endpoint in pool.endpoints), Load())
    return gateway.fleet.view.candidates(idle, PoolEstimate(1_000), 0, 0.0, now, 60.0)[0].forecast


def spread(found: Forecast) -> float:
    return found.p90 / found.p50


@pytest.mark.virtual_time
async def test_the_first_predictions_after_a_restart_are_those_of_before(tmp_path: Path) -> None:
    """Of an engine about ten times slower than the one that a cold gateway assumes."""
    state: dict[str, Any] = {"state": {"dir": str(tmp_path)}}
    async with engines(1, "8b-l4") as only:
        pools = {"only": engine_pool(*only)}
        async with running(pools, ROUTES, **state) as gateway:
            cold = forecast(gateway)
            await ask(gateway, Random(5), LESSONS)
            learned = forecast(gateway)
        async with running(pools, ROUTES, **state) as gateway:
            [restored] = [f for f in gateway.registry.collect() if f.name.endswith("restored_endpoints")]
            assert [sample.value for sample in restored.samples] == [1.0]
            after = forecast(gateway)
    print(
        f"p50 (p90 / p50): cold {cold.p50:.3f} ({spread(cold):.2f}), learned {learned.p50:.3f} ({spread(learned):.2f})"
    )
    assert after.p50 == pytest.approx(learned.p50, rel=0.1)
    assert spread(after) == pytest.approx(spread(learned), rel=0.2)
    assert learned.p50 > 2 * cold.p50
    assert spread(learned) < spread(cold)


async def test_a_process_with_a_successor_leaves_the_file_to_it(tmp_path: Path) -> None:
    """It ends later, and knows less."""
    async with engines(1) as only:
        pools, state = {"only": engine_pool(*only)}, {"dir": str(tmp_path)}
        async with running(pools, ROUTES, state=state) as gateway:
            await ask(gateway, Random(5), 2)
            await gateway.stop(handed_over=True)
            assert not (tmp_path / "learned.json").exists()
        async with running(pools, ROUTES, state=state) as gateway:
            await ask(gateway, Random(5), 2)
        assert (tmp_path / "learned.json").exists()


async def test_redis_keeps_what_was_learned_where_there_is_no_directory(caplog: pytest.LogCaptureFixture) -> None:
    """For the next process, on whatever machine; a Redis that is absent at the start delays nothing for long."""
    random = Random(6)
    async with redis_server() as redis, engines(1, "8b-l4") as only:
        pools, state = {"only": engine_pool(*only)}, {"state": {"redis": redis.url, "namespace": "one"}}
        other = {"state": {"redis": redis.url, "namespace": "two"}}
        async with running(pools, ROUTES, **state) as gateway:
            await ask(gateway, random, LESSONS)
            learned = forecast(gateway)
        async with redis.client() as client:
            assert 0 < await client.ttl("one:learned") <= 7 * 86_400
        async with running(pools, ROUTES, **other) as gateway:
            assert (
                gateway.fleet.view.statistics(next(iter(gateway.runtime.current.upstreams)), monotonic()).samples == 0
            )
        async with running(pools, ROUTES, **state) as gateway:
            assert forecast(gateway).p50 == pytest.approx(learned.p50, rel=0.1)
        async with redis.client() as client:
            await client.set("one:learned", b"\x00garbage")
        async with running(pools, ROUTES, **state) as gateway:
            await ask(gateway, random, 1)
    assert "learned state in key one:learned in Redis is ignored: broken" in caplog.text
    async with engines(1) as only, running({"only": engine_pool(*only)}, ROUTES, **state) as gateway:
        await ask(gateway, random, 1)
    assert "learned state in key one:learned in Redis cannot be read" in caplog.text


async def test_a_redis_that_comes_later_is_read_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that began cold takes over what is saved, while it serves, in place of saving less."""
    random = Random(7)
    async with redis_server() as redis, engines(1, "8b-l4") as only:
        pools, state = {"only": engine_pool(*only)}, {"state": {"redis": redis.url}}
        async with running(pools, ROUTES, **state) as gateway:
            await ask(gateway, random, LESSONS)
        async with redis.client() as client:
            await client.rename("firsttoken:learned", "firsttoken:learned:firsttoken")  # as before 0.2.0
        monkeypatch.setattr("gateway.fleet.learned_keeper.SAVE_INTERVAL", 0.05)
        monkeypatch.setattr("gateway.fleet.learned_keeper.START_WAIT", 0.1)
        redis.freeze()
        async with running(pools, ROUTES, **state) as gateway:
            [endpoint] = gateway.runtime.current.upstreams
            assert gateway.fleet.view.statistics(endpoint, monotonic()).samples == 0
            await ask(gateway, random, 1)
            redis.thaw()
            await eventually(lambda: gateway.fleet.view.statistics(endpoint, monotonic()).samples >= LESSONS)
            await ask(gateway, random, 1)
        async with redis.client() as client:
            saved = json.loads(await client.get("firsttoken:learned"))
    assert saved["endpoints"][endpoint]["engine"]["samples"] > LESSONS
    assert sum("cannot be read" in line for line in caplog.messages) == 1


async def test_one_worker_saves_and_all_restore(tmp_path: Path) -> None:
    """At a stop of the service."""
    async with engines(1, "8b-l4") as only:
        home = tmp_path / "state"
        config = write_config(tmp_path / "fleet.yaml", only[0].url, "simulated")
        config.write_text(f"{config.read_text()}state: {{dir: {home}}}\n")
        for life in range(2):
            async with serving(config, "--workers", "2") as served:
                for _ in range(20):
                    async with calling(served.url) as caller:
                        await caller.ask(post({**CHAT, **SHORT}, "connection: close"))
                        await caller.rest()
                page = (await get(served.admin, "/metrics"))[2].decode()
                assert f"firsttoken_learned_state_restored_endpoints {float(life)}" in page
                served.process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(served.process.wait(), 60)
            await eventually((home / "learned.json").exists)
            saved = json.loads((home / "learned.json").read_bytes())
            assert [found["engine"]["samples"] for found in saved["endpoints"].values()] > [0]
            assert {entry.name for entry in home.iterdir()} == {"learned.json"}
