"""Shares quotas of keys and loads of endpoints with other gateways, through Redis."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.admission.redis_quotas import RedisQuotas
from gateway.cluster.gossip import new_group
from gateway.cluster.redis_client import RedisClient
from gateway.cluster.replicas import Replicas
from gateway.core.part import Part
from gateway.observe.metrics.series import gauge
from gateway.wiring import Core


class ReplicasPart(Part, Collector):
    """Offers the RedisClient and its quotas to other parts."""

    name = "replicas"

    def __init__(self, core: Core) -> None:
        self.client: RedisClient | None = None
        self.collectors = [self]
        state, worker = core.config.state, core.worker
        if state.redis is not None:
            self.client = RedisClient(state.redis.get_secret_value(), namespace=state.namespace)
            self.quotas = RedisQuotas(self.client, core.config.server.workers)
            group = new_group() if worker is None else worker.group
            self.replicas = Replicas(self.client, state.namespace, group, core.fleet.view.knows)
            self.collectors = [self, self.client]
            core.offer(self.client)
            core.offer(self.quotas)
            core.join(self.replicas)

    def collect(self) -> Iterable[Metric]:
        """Live gateways, including this gateway."""
        yield gauge("firsttoken_replicas", [((), 1 if self.client is None else self.replicas.count())])

    async def start(self) -> None:
        if self.client is not None:
            for component in (self.client, self.quotas, self.replicas):
                component.start()

    async def close(self) -> None:
        if self.client is not None:
            for component in (self.replicas, self.quotas, self.client):
                await component.close()
