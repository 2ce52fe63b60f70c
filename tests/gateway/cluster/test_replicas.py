"""Replicas, and their link, as tasks: they end when they are told to."""

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


class Losing:
    """A client of Redis that loses a cancellation, as redis-py may before Python 3.12: it answers instead."""

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
    """So that it is the cancellation that ends a call."""
    monkeypatch.setattr(links, "PROBE_INTERVAL", 0.01)
    monkeypatch.setattr("gateway.cluster.replicas.SEND_TIMEOUT", 60.0)


async def test_they_end_though_their_cancellation_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a gateway that is told to stop would never."""
    async with redis_server() as server:
        link, losing = RedisClient(server.url), Losing()
        link.start()
        await eventually(lambda: link.up)
        replicas = Replicas(link, "test", new_group(), lambda _: True)
        replicas.start()
        monkeypatch.setattr(link.client, "publish", losing.answer)
        replicas.publish("small/a", NO_LOAD)
        async with asyncio.timeout(20):
            await losing.asked.wait()
            monkeypatch.undo()
            await replicas.close()
            await link.close()


async def test_a_link_ends_though_its_cancellation_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it looks whether Redis is there."""
    async with redis_server() as server:
        link, losing = RedisClient(server.url, timeout=60.0), Losing()
        link.start()
        await eventually(lambda: link.up)
        monkeypatch.setattr(link.client, "set", losing.answer)
        async with asyncio.timeout(20):
            await losing.asked.wait()
            await link.close()
