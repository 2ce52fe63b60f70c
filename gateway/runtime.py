"""Builds a Runtime from a Config: every value derived from the configuration alone.

Rules:
- A Runtime is frozen. A reload builds a new Runtime in a thread and replaces `RuntimeHolder.current` by an assignment.
- A request reads `current` once and keeps the same Runtime to the end; without a place yet, it goes on by the new one.
- Two Runtimes share the connections and backends common to both configurations.
- Components with learned state (fleet, estimator, queue, metrics) are not part of a Runtime: `gateway.app` tells them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from backends import catalog
from backends.facts.model_facts import Facts
from backends.http.connection import WriteCoalescer
from backends.http.connection_pool import ConnectionPool
from backends.http.tls_files import TlsFiles
from backends.http.tunnel import ProxyAddress
from backends.interface import Backend, BackendConfig, Operation
from backends.translation.turn_state.seals import maker_of
from gateway.admission.auth import CacheSalts, GroupMember, Keys, Tenant
from gateway.admission.route_table import PoolModels, Routes
from gateway.api.operation_fit import Servers
from gateway.api.same_origin import Cors, SameOrigin
from gateway.config.field_types import authority
from gateway.config.models import Config, Key
from gateway.config.pool_section import PoolSection
from gateway.observe.metrics.request_metrics import ServedLabels
from gateway.tokenize.media import family_of
from gateway.tokenize.prompt_reader import TokenizerConfig
from gateway.tokenize.tokenizers import encoder
from gateway.upstream.routed_request import Upstream
from policies.routes.route import Route
from policies.types import Pool, Price

IDLE = 4.0  # s an upstream connection may idle: vLLM closes at 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
RECEIVE_BUFFER = 16 * 1024  # unread bytes of one upstream in the kernel


Backends = Mapping[tuple[str, int | None, int | None], tuple[BackendConfig, Backend]]  # by pool, rank and key


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """Network address of endpoints and the way there; equal ones share connections.

    `at`: resolved address; `connect`: timeout in s.
    """

    url: str
    at: str
    connect: float
    tls: TlsFiles | None = None
    proxy: ProxyAddress | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """One configuration in force: `pools` by name, `upstreams` by endpoint id.

    `backends`, `connections` and `coalescer` are kept for the next Runtime to reuse.
    """

    config: Config
    pools: Mapping[str, Pool]
    routes: Routes
    keys: Keys
    masked_pools: frozenset[str]  # pools with cached token counts hidden from callers
    same_origin: SameOrigin | None  # if no key protects the data port
    cors: Cors | None  # pages of other origins
    upstreams: Mapping[str, Upstream]
    wanted_headers: frozenset[str]  # request headers read by a tier's `when`
    backends: Backends
    dialects: Mapping[str, Backend]  # a backend of each pool
    operations: Mapping[str, frozenset[Operation]]  # spoken natively, by pool
    makers: Mapping[str, str]  # digests of the account and the own model of each pool
    attributed: frozenset[str]  # pools whose servers read a client's line at the head of the prompt
    connections: Mapping[UpstreamAddress, ConnectionPool]
    coalescer: WriteCoalescer

    def price_of(self, pool: str) -> Price | None:
        """None: there is no such pool."""
        return self.pools[pool].price if pool in self.pools else None

    def servers(self, model: str = "") -> Servers:
        """The servers of all pools for a request. `model`: as the caller names it; empty: each pool's own."""
        return Servers(self.operations, partial(self._facts, model), partial(self.maker, model), self.attributed)

    def maker(self, model: str, pool: str) -> str:
        """Digest of the account and the model that write the turns of a pool; empty: there is no such pool. `model`: as
        the caller names it; empty: the pool's own."""
        if not model or pool not in self.makers:
            return self.makers.get(pool, "")
        return _maker(self.config.pools[pool], model)

    def _facts(self, model: str, pool: str) -> Facts:
        return self.dialects[pool].facts(model or self.config.pools[pool].model)

    def served_labels(self) -> ServedLabels:
        """Metric labels: the model of each pool, and the keys that the configuration lists."""
        models = {name: section.model for name, section in self.config.pools.items()}
        return ServedLabels(models, frozenset(self.config.telemetry.label_keys))

    def endpoints(self, *routes: Route) -> list[str]:
        """Ids of all endpoints that some routes may use."""
        wanted = dict.fromkeys((pool, route.confines) for route in routes for pool in route.pools)
        able = (one for pool, only in wanted for one in self.pools[pool].endpoints if not only or only.allows(one))
        return [*dict.fromkeys(endpoint.id for endpoint in able)]

    def context_window(self, model: str, tenant: Tenant) -> int | None:
        """The largest context window, in tokens, among pools of a caller's model name; None: a window is unknown.
        Raises ApiError (404)."""
        named = self.routes.match(model, tenant)
        windows = [self._window(named.model, pool) for pool in named.route.pools]
        known = [window for window in windows if window is not None]
        return max(known) if len(known) == len(windows) else None

    def _window(self, model: str, pool: str) -> int | None:
        """As configured, or as the facts have it of the model: told to callers, and not a limit of any request."""
        return self.pools[pool].context_window or self._facts(model, pool).context

    def replaced_routes(self, before: Runtime) -> frozenset[str]:
        """Names of routes of `before` whose held requests must be estimated and decided again: the route is gone or
        differs, or a pool of it has another tokenizer or other operations."""
        routes = {route.name: route for route in self.routes.all}
        known, found = (
            {pool: (settings, runtime.operations[pool]) for pool, settings in tokenizers(runtime.config).items()}
            for runtime in (before, self)
        )
        return frozenset(
            route.name
            for route in before.routes.all
            if routes.get(route.name) != route or any(known[pool] != found[pool] for pool in route.pools)
        )

    def with_stored_keys(self, stored: Iterable[Key]) -> Runtime:
        """Returns the same Runtime with stored keys beside the keys of the file."""
        known = tenants(self.config, stored)
        masked = masked_pools(self.config, self.routes, known)
        return replace(self, keys=Keys(known, closed=self.config.keyed), masked_pools=masked)


@dataclass(slots=True)
class RuntimeHolder:
    """The Runtime in force. A reload assigns `current`; running requests keep the previous Runtime."""

    current: Runtime


def routes_of(config: Config) -> Routes:
    models = {pool: PoolModels(route, config.pools[pool].models) for pool, route in config.model_routes.items()}
    return Routes(config.named_routes, config.passthrough_route, models)


def build_runtime(config: Config, before: Runtime | None = None) -> Runtime:
    """Reuses unchanged connections and backends of `before`."""
    routes = routes_of(config)
    backends = _backends(config, {} if before is None else before.backends)
    dialects = _dialects(config, backends)
    coalescer = WriteCoalescer() if before is None else before.coalescer
    known = {} if before is None else before.connections
    addresses = upstream_addresses(config)
    connections = {address: known.get(address) or _connections(address, coalescer) for address in addresses.values()}
    known_keys = tenants(config)
    operations = {name: catalog.kind(section.backend).dialect.native for name, section in config.pools.items()}
    cors = None if config.server.cors is None else Cors(config.server.cors.origins)
    by_endpoint = {endpoint: connections[address] for endpoint, address in addresses.items()}
    return Runtime(
        config=config,
        pools={pool.name: pool for pool in config.fleet()},
        routes=routes,
        keys=Keys(known_keys, closed=config.keyed),
        masked_pools=masked_pools(config, routes, known_keys),
        same_origin=None if config.keyed else SameOrigin(config.server.listen.loopback, config.server.hosts, cors),
        cors=cors,
        upstreams=_upstreams(config, by_endpoint, backends),
        wanted_headers=routes.wanted_headers(),
        backends=backends,
        dialects=dialects,
        operations=operations,
        makers={name: _maker(section, section.model) for name, section in config.pools.items()},
        attributed=frozenset(name for name, backend in dialects.items() if backend.reads_attribution),
        connections=connections,
        coalescer=coalescer,
    )


def build_warm_runtime(config: Config, before: Runtime) -> Runtime:
    """`build_runtime` with every tokenizer loaded. Slow: to be called in a thread."""
    for pool in config.pools.values():
        encoder(pool.tokenizer)
    return build_runtime(config, before)


def _backends(config: Config, known: Backends) -> Backends:
    found: dict[tuple[str, int | None, int | None], tuple[BackendConfig, Backend]] = {}
    for name, section in config.pools.items():
        for address in config.addresses_of(name).values():
            variant = name, address.dp_rank, address.key_number
            if variant not in found:
                wanted = section.backend_config(address.dp_rank, address.key_number)
                same = known.get(variant)
                found[variant] = same if same and same[0] == wanted else (wanted, catalog.build(wanted))
    return found


def _dialects(config: Config, backends: Backends) -> Mapping[str, Backend]:
    """A backend of each pool, also for pools whose addresses are not yet discovered."""
    found = {pool: backend for (pool, _, _), (_, backend) in backends.items()}
    return found | {
        name: catalog.build(section.backend_config()) for name, section in config.pools.items() if name not in found
    }


def _maker(section: PoolSection, model: str) -> str:
    """Several keys share an account. A server without a key is its own account."""
    keys = (section.api_key, *section.api_keys)
    account = next(filter(None, (key.get_secret_value() for key in keys)), "")
    return maker_of(f"{section.backend}\0{account or ' '.join(section.urls)}", model)


def upstream_addresses(config: Config) -> dict[str, UpstreamAddress]:
    """By endpoint id."""
    found: dict[str, UpstreamAddress] = {}
    for pool in config.fleet():
        section = config.pools[pool.name]
        tls, proxy = None if section.tls is None else section.tls.files, section.proxy_address
        for id, address in config.addresses_of(pool.name).items():
            found[id] = UpstreamAddress(address.url, address.ip, config.defaults.connect, tls, proxy)
    return found


def _connections(address: UpstreamAddress, coalescer: WriteCoalescer) -> ConnectionPool:
    return ConnectionPool(
        address.url,
        connect_to=address.at,
        connect_timeout=address.connect,
        idle_timeout=IDLE,
        receive_buffer=RECEIVE_BUFFER,
        coalescer=coalescer,
        tls=None if address.tls is None else address.tls.context(),
        proxy=address.proxy,
    )


def _upstreams(config: Config, connections: Mapping[str, ConnectionPool], backends: Backends) -> Mapping[str, Upstream]:
    publishing, found = config.kv_events(), {}
    for pool in config.fleet():
        section = config.pools[pool.name]
        for id, address in config.addresses_of(pool.name).items():
            found[id] = Upstream(
                connections[id],
                backends[pool.name, address.dp_rank, address.key_number][1],
                pool.model,
                pool.name,
                kv_events=id in publishing,
                priority=section.priority_scheduling,
                traced=config.telemetry.trace_apis or not section.kind.needs_key,
                price=pool.price,
            )
    return found


def tokenizers(config: Config) -> dict[str, TokenizerConfig]:
    return {name: TokenizerConfig(pool.tokenizer, media=family_of(pool.model)) for name, pool in config.pools.items()}


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
            key.weight,
        )
        for key in by_name.values()
    )


def masked_pools(config: Config, routes: Routes, tenants: Iterable[Tenant]) -> frozenset[str]:
    """Pools without salts in whose cache several cache groups meet.

    A server keeps a cache per model, and a provider per credential too: pools where these are equal share a cache. The
    passthrough route, the models of a pool, and a pool without a model may reach any model. A pool may keep
    groups apart, or mix those of any caller, by its credentials.
    """
    groups: dict[str | None, set[str]] = defaultdict(set)  # by route; None: every route
    for tenant in tenants:
        for name in (None,) if tenant.routes is None else tenant.routes:
            if len(groups[name]) < 2:
                groups[name].add(tenant.cache_group)
    uses: dict[object, list[tuple[str, str, set[str]]]] = defaultdict(list)  # by server and credential
    for route in routes.all:
        users = groups[None] | groups[route.name]
        for pool in {tier.pool for tier in route.tiers if users}:
            section = config.pools[pool]
            if section.keeps_groups_apart:
                continue
            model = "" if routes.takes_any_model(route) else section.model
            for credential in section.credentials:
                for url in section.urls:
                    uses[authority(url), credential].append((pool, model, users))
    shared = frozenset(name for name, one in config.pools.items() if one.mixes_groups)
    return shared | frozenset(
        pool
        for met in uses.values()
        for pool, model, _ in met
        if len(set().union(*(users for _, other, users in met if not model or not other or model == other))) > 1
    )


def redacted_config(config: Config) -> dict[str, Any]:
    """The configuration without secrets. The digest of a key is secret: a weak key could be guessed from the digest."""
    return config.model_dump(mode="json", exclude={"keys": {"__all__": {"sha256"}}})
