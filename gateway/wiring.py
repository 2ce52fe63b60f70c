"""Parts that a gateway has only where its configuration asks for them.

What they are built on is imported here, when they are made: Redis, OpenTelemetry and ZMQ are extras.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gateway.cluster.pending_updates import new_group
from gateway.config.models import Config
from gateway.observe.access_log import AccessLog
from gateway.observe.metrics.registry import Registry
from gateway.upstream.routed_request import Upstream
from gateway.workers.shared_access_log import SharedAccessLog
from gateway.workers.worker_context import WorkerContext
from policies.fleet.fleet import Fleet

if TYPE_CHECKING:
    from gateway.admission.key_store import Keyring
    from gateway.admission.redis_quotas import RedisQuotas
    from gateway.cluster.redis_client import RedisClient
    from gateway.cluster.replicas import Replicas
    from gateway.fleet.kv_event_listener import KvEvents
    from gateway.observe.otel.spans import Served
    from gateway.observe.otel.telemetry import Telemetry


def access_log(target: str, seat: WorkerContext | None) -> AccessLog | None:
    if target == "off":
        return None
    return AccessLog(target) if seat is None else SharedAccessLog(target, seat.lock)


def telemetry(config: Config, upstreams: Mapping[str, Upstream]) -> Telemetry | None:
    """OpenTelemetry is loaded where it is needed."""
    if config.telemetry.otlp is None:
        return None
    from gateway.observe.otel.telemetry import Telemetry

    return Telemetry(config.telemetry.otlp, served(upstreams))


def served(upstreams: Mapping[str, Upstream]) -> dict[str, Served]:
    """What spans say of endpoints."""
    from gateway.observe.otel.semconv import PROVIDERS
    from gateway.observe.otel.spans import Served

    served = {}
    for endpoint, up in upstreams.items():
        address, kind = up.origin.address, up.backend.kind
        served[endpoint] = Served(PROVIDERS.get(kind, kind), up.model, address.host, address.port)
    return served


def kv_events(config: Config, fleet: Fleet) -> KvEvents | None:
    """ZMQ is loaded where it is needed."""
    if not (sources := config.kv_events()):
        return None
    from gateway.fleet.kv_event_listener import KvEvents

    return KvEvents(fleet, sources)


def link(config: Config, registry: Registry) -> RedisClient | None:
    """Redis is loaded where it is needed."""
    if config.state.redis is None:
        return None
    from gateway.cluster.redis_client import RedisClient

    link = RedisClient(config.state.redis.get_secret_value())
    registry.register(link)
    return link


def shared_quotas(config: Config, link: RedisClient | None) -> RedisQuotas | None:
    if link is None:
        return None
    from gateway.admission.redis_quotas import RedisQuotas

    return RedisQuotas(link, config.server.workers)


def keyring(config: Config, link: RedisClient | None, changed: Callable[[], None]) -> Keyring | None:
    if link is None or config.state.keys != "redis":
        return None
    from gateway.admission.key_store import Keyring

    return Keyring(link, changed)


def replicas(config: Config, link: RedisClient | None, fleet: Fleet, seat: WorkerContext | None) -> Replicas | None:
    if link is None:
        return None
    from gateway.cluster.replicas import Replicas

    return Replicas(link, config.state.namespace, new_group() if seat is None else seat.group, fleet.knows)
