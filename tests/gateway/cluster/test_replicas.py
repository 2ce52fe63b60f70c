"""Tasks of replicas and of the Redis client end on `close`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.cluster import redis_client as links
from gateway.cluster.gossip import new_group
from gateway.cluster.redis_client import RedisClient
from gateway.cluster.replicas import Replicas
from policies.fleet.peers import NO_LOAD
from tests.support.redis import redis_server
from tests.support.simulated import eventually


class LosesCancellation:
    """A Redis client that swallows a cancellation and answers, as redis-py may before Python 3.12."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def answer(self, *_: Any, **__: Any) -> int:
        self.asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return 1


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long timeouts, so that only the cancellation ends a call."""
    monkeypatch.setattr(links, "PROBE_INTERVAL", 0.01)
    monkeypatch.setattr("gateway.cluster.replicas.SEND_TIMEOUT", 60.0)


async def test_replicas_close_despite_a_lost_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a gateway would never stop."""
    async with redis_server() as server:
        link, client = RedisClient(server.url), LosesCancellation()
        link.start()
        await eventually(lambda: link.up)
        replicas = Replicas(link, "test", new_group(), lambda _: True)
        replicas.start()
        monkeypatch.setattr(link.client, "publish", client.answer)
        replicas.publish("small/a", NO_LOAD)
        async with asyncio.timeout(50):
            await client.asked.wait()
            monkeypatch.undo()
            await replicas.close()
            await link.close()


async def test_a_redis_client_closes_despite_a_lost_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a probe of Redis."""
    async with redis_server() as server:
        link, client = RedisClient(server.url, timeout=60.0), LosesCancellation()
        link.start()
        await eventually(lambda: link.up)
        monkeypatch.setattr(link.client, "set", client.answer)
        async with asyncio.timeout(50):
            await client.asked.wait()
            await link.close()
