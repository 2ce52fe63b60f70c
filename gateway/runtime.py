"""What a configuration comes to: the values, and the ways to backends, that are built of it alone.

They can be built beside those in force, in a thread, and put in place of them in one turn of the loop
(`gateway.app.Gateway.take`). What learns or waits (fleet, line, recorder) is not among them: it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backends import catalog
from backends.http.connection_pool import ConnectionPool
from backends.http.write_coalescer import WriteCoalescer
from backends.interface import Backend, BackendConfig
from gateway.admission.auth import Keys, Tenant
from gateway.admission.cache_salts import CacheSalts, GroupMember
from gateway.admission.route_table import Routes
from gateway.config.models import Config, Key
from gateway.proxy import RequestLimits
from gateway.tokenize.estimator import PoolTokenizer
from gateway.tokenize.tokenizers import encoder
from gateway.upstream.routed_request import Upstream
from policies.routes.route import Route
from policies.types import Pool, Price

IDLE = 4.0  # s an upstream connection may idle: vLLM closes at 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
RECEIVE_BUFFER = 16 * 1024  # bytes the kernel may hold of one upstream that its reader has not taken


def tokenizers(config: Config) -> list[PoolTokenizer]:
    return [PoolTokenizer(name, pool.tokenizer, pool.block_size) for name, pool in config.pools.items()]


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a configuration comes to, as far as it can be built beside one that is in force."""

    pools: tuple[Pool, ...]
    routes: Routes
    every_route: list[Route]
    upstreams: Mapping[str, Upstream]
    keys: Keys
    backends: Mapping[str, tuple[BackendConfig, Backend]]  # by pool
    origins: Mapping[UpstreamAddress, ConnectionPool]
    outbox: WriteCoalescer  # of them all


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """To one endpoint: whoever goes it can share its connections."""

    url: str
    at: str
    connect: float


def parts(config: Config, before: Runtime | None = None) -> Runtime:
    """Of those before it keeps what is the same: connections, most of all."""
    routes = Routes(config.routes, config.passthrough_route, open=not config.keyed)
    every_route = [*config.routes.values(), *([routes.passthrough] if routes.passthrough else [])]
    backends = {name: _backend(name, config, before) for name in config.pools}
    connect, known = config.defaults.connect, {} if before is None else before.origins
    ways = {endpoint: UpstreamAddress(server.url, server.at, connect) for endpoint, server in config.sites().items()}
    outbox = WriteCoalescer() if before is None else before.outbox
    origins = {way: known.get(way) or _origin(way, outbox) for way in ways.values()}
    upstreams = _upstreams(config, {endpoint: origins[way] for endpoint, way in ways.items()}, backends)
    keys = Keys(tenants(config), closed=config.keyed)
    return Runtime(config.fleet(), routes, every_route, upstreams, keys, backends, origins, outbox)


def warmed(config: Config, before: Runtime) -> Runtime:
    """The same, with all that its requests need in memory."""
    for pool in config.pools.values():
        encoder(pool.tokenizer)
    return parts(config, before)


def prices(pools: Iterable[Pool]) -> Mapping[str, Price]:
    return {pool.name: pool.price for pool in pools}


def limits_of(config: Config) -> RequestLimits:
    return RequestLimits(config.defaults.max_body, config.defaults.stream_idle)


def _backend(pool: str, config: Config, before: Runtime | None) -> tuple[BackendConfig, Backend]:
    wanted, known = config.backend(pool), None if before is None else before.backends.get(pool)
    return known if known is not None and known[0] == wanted else (wanted, catalog.build(wanted))


def _origin(way: UpstreamAddress, outbox: WriteCoalescer) -> ConnectionPool:
    return ConnectionPool(
        way.url,
        at=way.at,
        connect_timeout=way.connect,
        idle_timeout=IDLE,
        receive_buffer=RECEIVE_BUFFER,
        outbox=outbox,
    )


def watched(upstreams: Mapping[str, Upstream]) -> Mapping[str, tuple[ConnectionPool, Backend]]:
    return {endpoint: (up.origin, up.backend) for endpoint, up in upstreams.items()}


def _upstreams(
    config: Config, origins: Mapping[str, ConnectionPool], backends: Mapping[str, tuple[BackendConfig, Backend]]
) -> Mapping[str, Upstream]:
    publishing = config.kv_events()
    return {
        endpoint.id: Upstream(
            origins[endpoint.id],
            backends[pool.name][1],
            pool.model,
            kv_events=endpoint.id in publishing,
            priority=config.pools[pool.name].priority_scheduling,
            traced=config.telemetry.trace_apis or not catalog.kind(config.pools[pool.name].backend).needs_key,
        )
        for pool in config.fleet()
        for endpoint in pool.endpoints
    }


def tenants(config: Config, found: Iterable[Key] = ()) -> tuple[Tenant, ...]:
    """The keys of the file, and those that were found elsewhere. Of one name that of the file stands."""
    by_name = {key.name: key for key in (*found, *config.keys)}
    members = {key.name: GroupMember(key.name, bytes.fromhex(key.sha256), key.cache_group) for key in by_name.values()}
    secret = config.state.cache_secret
    groups = CacheSalts("" if secret is None else secret.get_secret_value(), members.values())
    return tuple(
        Tenant(
            key.name,
            members[key.name].digest,
            None if key.routes is None else frozenset(key.routes),
            groups.name(members[key.name]),
            key.limits,
        )
        for key in by_name.values()
    )


def shown(config: Config) -> dict[str, Any]:
    """The config without secrets. A digest is one: weak keys could be guessed from it."""
    return config.model_dump(mode="json", exclude={"keys": {"__all__": {"sha256"}}})
