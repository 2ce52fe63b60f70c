"""The state that replicas share through Redis: quotas of keys, and the load of endpoints."""

from __future__ import annotations

from collections.abc import Callable

from gateway.admission.redis_quotas import RedisQuotas
from gateway.cluster.redis_client import RedisClient
from gateway.cluster.replicas import Replicas


class RedisState:
    """`group`: name of the workers of this gateway; `knows`: True for an endpoint of this gateway."""

    def __init__(self, url: str, namespace: str, workers: int, group: bytes, knows: Callable[[str], bool]) -> None:
        self.client = RedisClient(url, namespace=namespace)
        self.quotas = RedisQuotas(self.client, workers)
        self.replicas = Replicas(self.client, namespace, group, knows)

    def start(self) -> None:
        for component in (self.client, self.quotas, self.replicas):
            component.start()

    async def close(self) -> None:
        for component in (self.replicas, self.quotas, self.client):
            await component.close()
