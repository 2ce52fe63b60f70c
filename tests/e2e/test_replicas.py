"""Replicas that share load, prompts and down endpoints over a real Redis."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.app import Gateway
from gateway.parts.replicas.part import ReplicasPart
from policies.types import Health, Load
from tests.support.builders import CHAT, DONE, FINISH, TOKEN, Caller, calling, get, last, post
from tests.support.gateways import pool, running
from tests.support.redis import RedisServer, cluster_port, redis_server
from tests.support.served import Served, serving
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

STREAM = {**CHAT, "stream": True}
HELD: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
PAGE = Path(__file__).parents[2] / "docs/scaling.md"
ACL_COMMAND = next(line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("ACL ")).replace(
    "PASSWORD", "CANARY"
)
GONE = 30.0  # s, for an expiry of 3 s
BACK = 30.0


def state(server: RedisServer, url: str = "", **more: str) -> dict[str, Any]:
    return {"state": {"redis": url or server.url, **more}}


async def connected(*gateways: Gateway, count: int = 0) -> None:
    """Waits until all gateways know each other."""
    await eventually(lambda: all(replica_count(one) == (count or len(gateways)) for one in gateways), BACK)


def replica_count(gateway: Gateway) -> int:
    return gateway.part(ReplicasPart).replicas.count()


def in_flight(gateway: Gateway) -> int:
    return sum(load.in_flight for load in loads(gateway))


@asynccontextmanager
async def streaming(url: str, count: int) -> AsyncIterator[list[Caller]]:
    """Callers with the first token of a stream each."""
    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(calling(url)) for _ in range(count)]
        for caller in callers:
            assert (await caller.ask(post(STREAM)))[0] == 200
        yield callers


def config(path: Path, endpoint: str, redis: str) -> Path:
    path.write_text(
        "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
        f"pools: {{only: {{backend: compatible, model: served, endpoints: [{endpoint}]}}}}\n"
        "routes: {chat: {tiers: [only]}}\n"
        f"state: {{redis: {redis}}}\n"
        "telemetry: {access_log: off}\n"
    )
    return path


def kill(served: Served) -> None:
    """Kills a process with all children."""
    pid = served.process.pid
    for each in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        os.kill(each, signal.SIGKILL)


async def metric_value(served: Served, name: str) -> float:
    """Sum of a metric over all labels."""
    page = (await get(served.admin, "/metrics"))[2].decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.split("{")[0].split()[0] == name)


async def until_metric(served: Served, name: str, value: float) -> None:
    async with asyncio.timeout(BACK):
        while await metric_value(served, name) != value:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# --------------------------------------------------------------------------- shared state


async def test_a_replica_sees_the_requests_in_flight_of_others() -> None:
    """From the first byte to the last."""
    async with redis_server() as server, Upstream(HELD) as upstream:
        only = {"only": pool(upstream.url)}
        async with running(only, **state(server)) as one, running(only, **state(server)) as other:
            await connected(one, other)
            async with streaming(one.url, 3) as callers:
                await eventually(lambda: in_flight(other) == 3)
                assert in_flight(one) == 3
                for caller in callers:
                    upstream.proceed()
                    await caller.chunks()
                await eventually(lambda: in_flight(other) == 0)


async def test_replicas_send_a_conversation_to_the_same_engine() -> None:
    """A conversation's next request may arrive at any replica."""
    async with redis_server() as server, engines(4) as fleet:
        only = {"only": engine_pool(*fleet)}
        async with running(only, **state(server)) as one, running(only, **state(server)) as other:
            await connected(one, other)
            await eventually(lambda: all(load.scraped_at > 0 for each in (one, other) for load in loads(each)))
            for number in range(4):
                begun = [{"role": "user", "content": f"{number} " + f"story {number} " * 800}]
                before = {each: indexed_blocks(one, each) for each in one.monitor.loads()}
                await ask(one, begun)
                place = last(one).endpoint.id
                await eventually(lambda place=place, known=before[place]: indexed_blocks(one, place) > known)
                await eventually(lambda place=place: indexed_blocks(one, place) <= indexed_blocks(other, place))
                await eventually(lambda place=place: other.monitor.loads()[place].backlog_s < 0.01)  # of the first turn
                await ask(other, [*begun, {"role": "user", "content": "go on"}])
                assert last(other).endpoint.id == place
                assert (last(other).answer.cached_tokens or 0) > 700


def loads(gateway: Gateway) -> Iterable[Load]:
    return gateway.monitor.loads().values()


def indexed_blocks(gateway: Gateway, endpoint: str) -> int:
    """Blocks in the gateway's prefix index of the endpoint."""
    gateway.monitor.loads()
    return gateway.monitor.fleet.view.statistics(endpoint, monotonic()).prefix_blocks


async def ask(gateway: Gateway, messages: list[dict[str, str]]) -> None:
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post({"model": "chat", "messages": messages, "stream": True, "max_tokens": 2}))
        assert status == 200
        await caller.chunks()


async def test_an_endpoint_down_on_one_replica_is_down_on_all_and_each_recovers_by_its_own_probe() -> None:
    """The other replica has sent no request there."""
    port = cluster_port()
    async with redis_server() as server, Upstream(HELD) as upstream:
        both = {"only": pool(upstream.url, f"http://127.0.0.1:{port}")}
        async with running(both, **state(server)) as one, running(both, **state(server)) as other:
            await connected(one, other)
            dead = next(name for name in other.runtime.current.upstreams if name.endswith(str(port)))
            for _ in range(2):
                one.monitor.fleet.on_probe_failed(dead, monotonic())
            await eventually(lambda: other.monitor.loads()[dead].health is Health.DOWN)
            other.monitor.fleet.on_probe_answered(dead, monotonic())
            assert other.monitor.loads()[dead].health is Health.PROBING
            assert one.monitor.loads()[dead].health is Health.DOWN


async def test_no_text_goes_to_redis() -> None:
    """Published messages contain no text of prompts, answers or keys."""
    async with redis_server() as server, engines(1) as fleet, Redis.from_url(server.url) as client:
        only = {"only": engine_pool(*fleet)}
        async with running(only, **state(server)) as one, running(only, **state(server, namespace="other")) as other:
            await eventually(lambda: one.part(ReplicasPart).client.up)
            async with client.pubsub(ignore_subscribe_messages=True) as listening:
                await listening.psubscribe("*")
                await ask(one, [{"role": "user", "content": "CANARY " * 200}])
                published = bytearray()
                async with asyncio.timeout(BACK):
                    while len(published) < 1000 or fleet[0].url.rpartition("/")[2].encode() not in published:
                        message = await listening.get_message(timeout=0.1)
                        published += message["data"] if message else b""
            assert b"CANARY" not in published
            assert replica_count(other) == 1  # another namespace


# --------------------------------------------------------------------------- failures


async def test_the_load_of_a_killed_replica_expires(tmp_path: Path) -> None:
    """A killed replica announces nothing."""
    async with redis_server() as server, Upstream(HELD) as upstream:
        file = config(tmp_path / "f.yaml", upstream.url, server.url)
        async with running({"only": pool(upstream.url)}, **state(server)) as one, serving(file) as served:
            await connected(one, count=2)
            async with streaming(served.url, 2):
                await eventually(lambda: in_flight(one) == 2, BACK)
                served.process.kill()
                await eventually(lambda: (in_flight(one), replica_count(one)) == (0, 1), GONE)


async def test_replicas_continue_alone_without_redis_and_reconnect(caplog: pytest.LogCaptureFixture) -> None:
    """No request is affected; the log has one line per change."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with redis_server() as server, Upstream(HELD) as upstream:
        only = {"only": pool(upstream.url)}
        async with running(only, **state(server)) as one, running(only, **state(server)) as other:
            await connected(one, other)
            async with streaming(one.url, 2):
                await eventually(lambda: in_flight(other) == 2)
                server.kill()
                await eventually(lambda: (in_flight(other), replica_count(other)) == (0, 1), GONE)
                async with streaming(one.url, 1):
                    assert in_flight(one) == 3
                    await server.start()
                    await eventually(lambda: in_flight(other) == 3, BACK)
            await connected(one, other)
    states = [record.getMessage().split(": ")[1] for record in caplog.records if "redis" in record.getMessage()]
    assert sorted(states) == ["connected"] * 2 + ["reconnected"] * 2 + ["unavailable"] * 2
    assert not [record for record in caplog.records if "replicas" in record.getMessage()]


async def test_a_hanging_redis_counts_as_unavailable() -> None:
    """Connections stay open, and no request waits for Redis."""
    async with redis_server() as server, Upstream(HELD) as upstream:
        only = {"only": pool(upstream.url)}
        async with running(only, **state(server)) as one, running(only, **state(server)) as other:
            await connected(one, other)
            async with streaming(one.url, 2):
                await eventually(lambda: in_flight(other) == 2)
                server.freeze()
                await eventually(lambda: in_flight(other) == 0, GONE)
                server.thaw()
                await eventually(lambda: in_flight(other) == 2, BACK)


async def test_malformed_messages_on_the_channel_are_ignored() -> None:
    """Among at least as many malformed as valid messages."""
    async with redis_server() as server, Upstream(HELD) as upstream, server.client() as client:
        only = {"only": pool(upstream.url)}
        async with running(only, **state(server)) as one, running(only, **state(server)) as other:
            await connected(one, other)
            async with streaming(one.url, 2) as callers:
                for number in range(400):
                    noise = b"ftr1" + bytes([number % 256]) * (number % 97)
                    await client.publish(one.part(ReplicasPart).replicas.channel, noise)
                await eventually(lambda: in_flight(other) == 2)
                await eventually(lambda: other.part(ReplicasPart).replicas.peers.malformed == 400)  # type: ignore[union-attr]
                for caller in callers:
                    upstream.proceed()
                    await caller.chunks()
                await eventually(lambda: in_flight(other) == 0)


async def test_a_replica_without_channel_permission_continues_alone_and_logs_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other uses of Redis continue. With the permission, the replicas connect."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with redis_server() as server, server.client() as client, Upstream(HELD) as upstream:
        await client.execute_command(*ACL_COMMAND.replace(" &firsttoken:*", "").split())
        url, only = server.url.replace("://", "://firsttoken:CANARY@"), {"only": pool(upstream.url)}
        async with running(only, **state(server, url)) as one, running(only, **state(server)) as other:
            await eventually(lambda: sum("Redis denies" in r.getMessage() for r in caplog.records) == 2, BACK)
            assert (replica_count(one), one.part(ReplicasPart).client.up) == (1, True)
            await client.execute_command("ACL", "SETUSER", "firsttoken", "&firsttoken:*")
            await connected(one, other)
    assert "CANARY" not in caplog.text


# --------------------------------------------------------------------------- workers and clusters


async def test_workers_of_two_replicas_count_each_request_once(tmp_path: Path) -> None:
    """Workers share memory, replicas share Redis."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(redis_server())
        upstream = await stack.enter_async_context(Upstream(HELD))
        file = config(tmp_path / "f.yaml", upstream.url, server.url)
        two = [await stack.enter_async_context(serving(file, "--workers", "2")) for _ in range(2)]
        for served in two:
            await until_metric(served, "firsttoken_replicas", 2)
            await stack.enter_async_context(streaming(served.url, 6))
        for served in two:
            await until_metric(served, "firsttoken_endpoint_in_flight", 12)
        for _ in range(30):  # over several full messages
            for served in two:
                assert await metric_value(served, "firsttoken_endpoint_in_flight") == 12
            await asyncio.sleep(0.05)
        kill(two[0])
        await until_metric(two[1], "firsttoken_endpoint_in_flight", 6)
        kill(two[1])


async def test_a_redis_cluster_carries_updates() -> None:
    """Through a single node."""
    async with redis_server("--cluster-enabled", "yes") as server, server.client() as client:
        await client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        url = f"redis+cluster://127.0.0.1:{server.port}"
        async with Upstream(HELD) as upstream:
            only = {"only": pool(upstream.url)}
            async with running(only, **state(server, url)) as one, running(only, **state(server, url)) as other:
                await connected(one, other)
                async with streaming(one.url, 1):
                    await eventually(lambda: in_flight(other) == 1)


async def test_one_gateway_is_one_replica() -> None:
    """With Redis or without."""
    async with Upstream(HELD) as upstream, running({"only": pool(upstream.url)}) as one:
        page = (await get(one.admin_url, "/metrics"))[2]
        assert b"\nfirsttoken_replicas 1.0\n" in page
        assert json.loads((await get(one.url, "/ready"))[2])
