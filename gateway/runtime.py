"""Builds a Runtime from a Config: every value derived from the configuration alone.

Rules:
- A Runtime is frozen. A reload builds a new Runtime in a thread and replaces `RuntimeHolder.current` by an assignment.
- A request reads `current` once and keeps the same Runtime to the end.
- Two Runtimes share the connections and backends common to both configurations.
- Components with learned state (fleet, estimator, queue, metrics) are not part of a Runtime: `gateway.app` tells them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from backends import catalog
from backends.http.connection import WriteCoalescer
from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend, BackendConfig
from gateway.admission.auth import CacheSalts, GroupMember, Keys, Routes, Tenant
from gateway.config.models import Config, Key
from gateway.tokenize.estimator import TokenizerConfig
from gateway.tokenize.tokenizers import encoder
from gateway.upstream.upstream_request import Upstream
from policies.types import Pool

IDLE = 4.0  # s an upstream connection may idle: vLLM closes at 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
RECEIVE_BUFFER = 16 * 1024  # unread bytes of one upstream in the kernel


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """Network address of endpoints, which share connections. `at`: resolved address; `connect`: timeout in s."""

    url: str
    at: str
    connect: float


@dataclass(frozen=True, slots=True)
class Runtime:
    """One configuration in force: `pools` by name, `upstreams` by endpoint id.

    `backends` (by pool), `connections` and `coalescer` are kept for the next Runtime to reuse.
    """

    config: Config
    pools: Mapping[str, Pool]
    routes: Routes
    keys: Keys
    upstreams: Mapping[str, Upstream]
    wanted_headers: frozenset[str]  # request headers read by a tier's `when`
    backends: Mapping[str, tuple[BackendConfig, Backend]]
    connections: Mapping[UpstreamAddress, ConnectionPool]
    coalescer: WriteCoalescer

    def with_stored_keys(self, stored: Iterable[Key]) -> Runtime:
        """Returns the same Runtime with keys of Redis beside the keys of the file."""
        return replace(self, keys=Keys(tenants(self.config, stored), closed=self.config.keyed))


@dataclass(slots=True)
class RuntimeHolder:
    """The Runtime in force. A reload assigns `current`; running requests keep the previous Runtime."""

    current: Runtime


def build_runtime(config: Config, before: Runtime | None = None) -> Runtime:
    """Reuses unchanged connections and backends of `before`."""
    routes = Routes(config.routes, config.passthrough_route, open=not config.keyed)
    backends = {name: _backend(name, config, before) for name in config.pools}
    coalescer = WriteCoalescer() if before is None else before.coalescer
    known = {} if before is None else before.connections
    addresses = {
        endpoint: UpstreamAddress(address.url, address.ip, config.defaults.connect)
        for endpoint, address in config.addresses().items()
    }
    connections = {address: known.get(address) or _connections(address, coalescer) for address in addresses.values()}
    by_endpoint = {endpoint: connections[address] for endpoint, address in addresses.items()}
    return Runtime(
        config=config,
        pools={pool.name: pool for pool in config.fleet()},
        routes=routes,
        keys=Keys(tenants(config), closed=config.keyed),
        upstreams=_upstreams(config, by_endpoint, backends),
        wanted_headers=routes.wanted_headers(),
        backends=backends,
        connections=connections,
        coalescer=coalescer,
    )


def build_warm_runtime(config: Config, before: Runtime) -> Runtime:
    """`build_runtime` with every tokenizer loaded. Slow: to be called in a thread."""
    for pool in config.pools.values():
        encoder(pool.tokenizer)
    return build_runtime(config, before)


def _backend(pool: str, config: Config, before: Runtime | None) -> tuple[BackendConfig, Backend]:
    wanted = config.backend(pool)
    known = None if before is None else before.backends.get(pool)
    return known if known is not None and known[0] == wanted else (wanted, catalog.build(wanted))


def _connections(address: UpstreamAddress, coalescer: WriteCoalescer) -> ConnectionPool:
    return ConnectionPool(
        address.url,
        connect_to=address.at,
        connect_timeout=address.connect,
        idle_timeout=IDLE,
        receive_buffer=RECEIVE_BUFFER,
        coalescer=coalescer,
    )


def _upstreams(
    config: Config, connections: Mapping[str, ConnectionPool], backends: Mapping[str, tuple[BackendConfig, Backend]]
) -> Mapping[str, Upstream]:
    publishing = config.kv_events()
    return {
        endpoint.id: Upstream(
            connections[endpoint.id],
            backends[pool.name][1],
            pool.model,
            kv_events=endpoint.id in publishing,
            priority=config.pools[pool.name].priority_scheduling,
            traced=config.telemetry.trace_apis or not catalog.kind(config.pools[pool.name].backend).needs_key,
            price=pool.price,
        )
        for pool in config.fleet()
        for endpoint in pool.endpoints
    }


def tokenizers(config: Config) -> dict[str, TokenizerConfig]:
    return {name: TokenizerConfig(pool.tokenizer, pool.block_size) for name, pool in config.pools.items()}


def tenants(config: Config, stored: Iterable[Key] = ()) -> tuple[Tenant, ...]:
    """Tenants of the file's keys and of `stored` keys; for equal names the file's key wins."""
    by_name = {key.name: key for key in (*stored, *config.keys)}
    members = {key.name: GroupMember(key.name, bytes.fromhex(key.sha256), key.cache_group) for key in by_name.values()}
    secret = config.state.cache_secret
    salts = CacheSalts("" if secret is None else secret.get_secret_value(), members.values())
    return tuple(
        Tenant(
            key.name,
            members[key.name].digest,
            None if key.routes is None else frozenset(key.routes),
            salts.salt(members[key.name]),
            key.limits,
        )
        for key in by_name.values()
    )


def redacted_config(config: Config) -> dict[str, Any]:
    """The configuration without secrets. The digest of a key is secret: a weak key could be guessed from the digest."""
    return config.model_dump(mode="json", exclude={"keys": {"__all__": {"sha256"}}})
