"""Optional components of a gateway, by configuration, or for one of several workers.

Redis, OpenTelemetry and ZMQ are optional dependencies, imported here on use.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gateway.admission.local_quotas import LocalQuotas
from gateway.cluster.gossip import new_group
from gateway.config.models import Config
from gateway.observe.logs import AccessLog
from gateway.observe.metrics.scrape_collectors import Registry
from gateway.upstream.upstream_request import Upstream
from policies.fleet.fleet import Fleet
from policies.fleet.peers import PeerLink

if TYPE_CHECKING:
    from gateway.admission.key_store import Keyring
    from gateway.admission.redis_quotas import RedisQuotas
    from gateway.cluster.redis_client import RedisClient
    from gateway.cluster.replicas import Replicas
    from gateway.fleet.kv_event_listener import KvEvents
    from gateway.observe.otel.spans import ServedEndpoint
    from gateway.observe.otel.telemetry import Telemetry


class SlotSharing(PeerLink, Protocol):
    """A link to the other workers, in which each endpoint has a slot."""

    def share(self, endpoints: Iterable[str]) -> None:
        """Shares these endpoints, and no others."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Resources of a worker, from the supervisor. `data`: socket for callers; `admin`: Unix socket for the aggregator;
    `group`: name of this gateway among replicas; `log_lock`: file to lock while writing the access log."""

    number: int
    data: socket.socket
    admin: socket.socket
    peers: SlotSharing
    group: bytes
    log_lock: Path
    quotas: LocalQuotas

    @property
    def is_leader(self) -> bool:
        """The leader runs singleton jobs."""
        return self.number == 0


def access_log(target: str, worker: WorkerContext | None) -> AccessLog | None:
    if target == "off":
        return None
    return AccessLog(target, None if worker is None else worker.log_lock)


def telemetry(config: Config, upstreams: Mapping[str, Upstream]) -> Telemetry | None:
    if config.telemetry.otlp is None:
        return None
    from gateway.observe.otel.telemetry import Telemetry

    return Telemetry(config.telemetry.otlp, served(upstreams))


def served(upstreams: Mapping[str, Upstream]) -> dict[str, ServedEndpoint]:
    """Span attributes of each endpoint."""
    from gateway.observe.otel.spans import PROVIDERS, ServedEndpoint

    found = {}
    for endpoint, upstream in upstreams.items():
        address, kind = upstream.connections.address, upstream.backend.kind
        found[endpoint] = ServedEndpoint(PROVIDERS.get(kind, kind), upstream.model, address.host, address.port)
    return found


def kv_events(config: Config, fleet: Fleet) -> KvEvents | None:
    if not (sources := config.kv_events()):
        return None
    from gateway.fleet.kv_event_listener import KvEvents

    return KvEvents(fleet, sources)


def redis_client(config: Config, registry: Registry) -> RedisClient | None:
    if config.state.redis is None:
        return None
    from gateway.cluster.redis_client import RedisClient

    redis = RedisClient(config.state.redis.get_secret_value())
    registry.register(redis)
    return redis


def redis_quotas(config: Config, redis: RedisClient | None) -> RedisQuotas | None:
    if redis is None:
        return None
    from gateway.admission.redis_quotas import RedisQuotas

    return RedisQuotas(redis, config.server.workers)


def keyring(config: Config, redis: RedisClient | None, on_change: Callable[[], None]) -> Keyring | None:
    if redis is None or config.state.keys != "redis":
        return None
    from gateway.admission.key_store import Keyring

    return Keyring(redis, on_change)


def replicas(config: Config, redis: RedisClient | None, fleet: Fleet, worker: WorkerContext | None) -> Replicas | None:
    if redis is None:
        return None
    from gateway.cluster.replicas import Replicas

    return Replicas(redis, config.state.namespace, new_group() if worker is None else worker.group, fleet.knows)
