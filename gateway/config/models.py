"""The validated configuration.

Rules:
- Every section is a frozen model that rejects unknown keys.
- A model validates its own values; `gateway.config.loading` checks across sections.
- Secrets appear in no repr and in no dump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from backends.kv_events import PublisherRank
from gateway.config import field_types as fields
from gateway.config.endpoint_section import Discovered, EndpointAddress, KubernetesSection, PodSource
from gateway.config.field_types import Positive, Section, written
from gateway.config.pool_section import PoolSection, SilenceLimits
from gateway.config.server_tls import ServerTlsSection
from gateway.config.yaml_source import with_preset
from policies import types as facts
from policies.quota.key_limits import NANO, KeyLimits
from policies.routes.levels import MOST_ATTEMPTS
from policies.routes.route import Duration, KeepAlive, Route, Share, Size, Workload

PASSTHROUGH = "passthrough"  # name of the route of all other models
MAX_WORKERS = 256
MAX_LABEL_KEYS = 50  # each is 20 metric series or more for each model and region
MAX_TAGS = 100  # each is three metric series or more
MAX_LIMIT = 10**12  # of any limit of a key


class Drain(Section):
    """Graceful shutdown."""

    wait: Annotated[Duration, Field(ge=0)] = written("0s")
    """Continue to serve, new connections included, while `/ready` returns 503: until load balancers have noticed."""
    grace: Annotated[Duration, Field(ge=0)] = written("30s")
    """Time for running requests to finish after that; then they are cut."""


class CorsSection(Section):
    origins: tuple[fields.Origin, ...] = Field(min_length=1)
    """Origins whose pages may read answers; `*`: every origin, where callers need keys."""


class ServerSection(Section):
    listen: fields.Listen = written("127.0.0.1:8080")
    """Data port, host:port."""
    admin: fields.Listen = written("127.0.0.1:9090")
    """Admin port: metrics, requests, explain. It requires no key, but for `/keys`: keep it private."""
    admin_key: fields.OwnSecret | None = None
    """Key of `/keys` on the admin port, which makes, limits and revokes callers' keys; absent: no such path."""
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Processes that share the listening port and their state of loads and caches."""
    open: bool = False
    """Serve callers without a key beyond loopback; for a gateway behind other authentication."""
    drain: Drain = Drain()
    hosts: tuple[fields.HostName, ...] = ()
    """Names under which callers without a key, and users of the admin port, may reach the ports, beside addresses and
    private names."""
    max_connections: int = Field(default=10_000, gt=0, le=1_000_000)
    """Maximum of callers' connections to one worker, and so of requests in progress; beyond: 503."""
    max_body_bytes: Annotated[Size, Field(gt=0)] = written("256MB")
    """Maximum of all request bodies in one worker's memory together; beyond: 503, except for bodies up to 64 KiB."""
    cors: CorsSection | None = None
    """Web pages of other origins; absent: none may read answers."""
    websockets: bool = True
    """Serve /v1/responses over WebSocket too; false: 426, after which clients go on with HTTP."""
    tls: ServerTlsSection | None = None
    """Certificate of the data port; absent: plain HTTP."""


API_FIRST_TOKEN, API_STREAM_IDLE = 300.0, 120.0  # s


class Defaults(Section):
    """Default values for all routes."""

    connect: Positive = written("2s")
    """Timeout of opening a connection to an endpoint."""
    stream_idle: Positive = written("30s")
    """Timeout between two chunks of a started answer; of APIs 120s, unless set."""
    first_token: Positive = written("60s")
    """Hard timeout of the first token, where no budget is lower; of APIs 300s, unless set."""
    max_attempts: int = Field(default=3, ge=1, le=MOST_ATTEMPTS)
    """Maximum of endpoints tried for one request."""
    keepalive: KeepAlive = "off"
    """Interval of comments in a stream before its first token."""
    max_body: Annotated[Size, Field(gt=0)] = written("32MB")
    """Maximum size of a request body."""
    scrape: Positive = written("500ms")
    """Interval between two scrapes of an engine's metrics."""

    @property
    def of_apis(self) -> SilenceLimits:
        """A model behind an API may think unseen, or wait for a tool of its provider; defaults of the file hold."""
        given = self.model_fields_set
        return SilenceLimits(
            None if "first_token" in given else API_FIRST_TOKEN, None if "stream_idle" in given else API_STREAM_IDLE
        )


class StateSection(Section):
    redis: fields.RedisSetting | None = None
    """Redis that replicas share; absent: all state is kept in this process."""
    dir: fields.Directory | None = None
    """Directory for what was learned of engines, kept over a restart; absent: in Redis, if configured."""
    cache_secret: fields.OwnSecret | None = None
    """Secret from which cache names are derived, the same for all replicas. Absent: the digests of `keys`."""
    keys: Literal["config", "redis", "dir"] = "config"
    """redis, dir: API keys are those of this file and those that `firsttoken keys` or the admin port stores there."""
    answers: Literal["memory", "redis"] = "memory"
    """Where answers of routes with a `cache` are kept: in each process, or in Redis, readable there."""
    answer_bytes: Annotated[Size, Field(ge=1 << 20)] = written("64MB")
    """Maximum of all kept answers, in each process or in Redis; beyond, the group with most gives up its oldest."""
    namespace: fields.Namespace = "firsttoken"
    """Replicas with the same namespace share their state; two fleets on one Redis need two."""


class Key(Section):
    """An API key, stored as a digest only."""

    name: fields.Name
    sha256: fields.Sha256
    """printf %s "$KEY" | sha256sum"""
    routes: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Allowed routes; absent: all."""
    requests_per_minute: int | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Limit in any 60 s."""
    tokens_per_minute: int | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Limit of prompt and output tokens in any 60 s."""
    concurrent_requests: int | None = Field(default=None, gt=0, le=MAX_LIMIT)
    """Limit of requests in progress."""
    monthly_cost_usd: float | None = Field(default=None, gt=0, le=1e6)
    """Limit per calendar month (UTC), by the prices of the pools."""
    cache_group: fields.Name | None = None
    """Keys of one group share prefix caches, and can detect each other's prompts by timing; absent: no sharing."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of engine time while requests of several keys wait: 2 gets twice the time of 1."""

    @property
    def limits(self) -> KeyLimits | None:
        """None: unlimited."""
        cost = self.monthly_cost_usd
        limits = KeyLimits(
            self.requests_per_minute,
            self.tokens_per_minute,
            self.concurrent_requests,
            None if cost is None else round(cost * NANO),
        )
        return limits if limits.any else None


class TelemetrySection(Section):
    otlp: fields.HttpUrl | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP, usually port 4318): receives traces and GenAI metrics."""
    traces: Share = Field(default=0.05, ge=0, le=1)
    """Sampled share of the traces that begin here; requests that missed a budget, failed or were retried always are."""
    trace_apis: bool = False
    """Send trace context to external APIs too; engines always receive it."""
    access_log: fields.AccessLog = "stdout"
    """stdout, stderr, off, or the path of a file: one JSON line per request."""
    tags: Annotated[tuple[fields.Name, ...], Field(max_length=MAX_TAGS)] = ()
    """Tags of requests to be recorded and counted; callers name them in `x-firsttoken-tags` or `metadata.tags`."""
    label_keys: Annotated[tuple[fields.Name, ...], Field(max_length=MAX_LABEL_KEYS)] = ()
    """Names of keys that firsttoken_served_total and firsttoken_served_ttft_seconds tell apart; all others are one."""
    prompts: Literal["never"] = "never"
    """Prompts and answers are never recorded."""


SMALLEST_FILE = 16_000_000  # bytes of the records of one worker


class RecordsSection(Section):
    """The latest Records of requests on disk, for `firsttoken why` and `firsttoken replay`."""

    dir: fields.Directory
    """Directory of a file for each worker; made if it does not exist."""
    size: Annotated[Size, Field(gt=0)] = written("256MB")
    """Maximum of the files of all workers together; beyond, the oldest Records go. At least 16MB for each worker."""


class PickSection(Section):
    """An endpoint picker for Envoy (ext_proc); needs firsttoken[pick]."""

    listen: fields.Listen = written("127.0.0.1:9002")
    """Port of the picker, host:port."""
    fallbacks: int = Field(default=0, ge=0, le=16)
    """Addresses named after the first, for data planes that try a list in order."""
    hold: Annotated[Duration, Field(ge=0.2, le=3600)] = written("200ms")
    """Longest wait of a request in the queue. More than 200ms needs a data plane with a longer max_message_timeout."""


class Config(Section):
    """firsttoken: pools are the available models, routes the model names and budgets offered to callers."""

    route: ClassVar[type[Route]] = Route  # with the keys of parts
    server: ServerSection = ServerSection()
    pools: Mapping[fields.PoolName, PoolSection] = {}
    """By name: interchangeable endpoints that serve one model."""
    defaults: Defaults = Defaults()
    routes: Mapping[fields.Name, Route] = {}
    """By the model name that callers request."""
    passthrough: str | None = None
    """A pool for requests whose model is no route; the model name is passed unchanged."""
    state: StateSection = StateSection()
    keys: tuple[Key, ...] = ()
    """API keys; absent: open to this machine."""
    telemetry: TelemetrySection = TelemetrySection()
    records: RecordsSection | None = None
    """The latest Records of requests on disk; absent: in memory alone."""
    pick: PickSection | None = None
    """An endpoint picker for Envoy (ext_proc)."""
    kubernetes: KubernetesSection = KubernetesSection()
    """The API server that is asked for endpoints."""
    _discovered: Discovered | None = None  # None: discovery has not begun
    _picks: bool = False  # a picker by command

    @field_validator("routes", mode="before")
    @classmethod
    def _with_presets(cls, routes: Any, info: ValidationInfo) -> Any:
        if not isinstance(routes, Mapping):
            return routes
        defaults = info.data.get("defaults", Defaults())
        return {name: _completed(name, raw, defaults.max_attempts) for name, raw in routes.items()}

    def with_workers(self, count: int) -> Config:
        """A copy with `server.workers: count`."""
        return self.model_copy(update={"server": self.server.model_copy(update={"workers": count})})

    def with_picker(self) -> Config:
        """A copy with a picker, by its defaults where the file has none, and no data port that is not asked for."""
        copied = self.model_copy(update={"pick": self.pick or PickSection()})
        copied._picks = True
        return copied

    @property
    def opens_data_port(self) -> bool:
        """Of a picker only where the file or the command line names its address: Envoy carries the requests."""
        return not self._picks or "listen" in self.server.model_fields_set

    def with_ports(self, data: int | None, admin: int | None) -> Config:
        """A copy with other ports, where given."""
        listen, other = self.server.listen, self.server.admin
        ports = {} if data is None else {"listen": replace(listen, port=data)}
        ports |= {} if admin is None else {"admin": replace(other, port=admin)}
        return self.model_copy(update={"server": self.server.model_copy(update=ports)})

    def resolved_hosts(self) -> Mapping[str, float]:
        """Host names with an endpoint per address, and their resolution intervals in seconds."""
        found: dict[str, float] = {}
        for pool in self.pools.values():
            for endpoint in pool.endpoints:
                if endpoint.resolve is not None:
                    found[endpoint.host] = min(endpoint.resolve, found.get(endpoint.host, endpoint.resolve))
        return found

    @property
    def is_dynamic(self) -> bool:
        """Some endpoints are found while the gateway runs."""
        return any(endpoint.is_dynamic for pool in self.pools.values() for endpoint in pool.endpoints)

    def pod_sources(self) -> frozenset[PodSource]:
        """Services and InferencePools whose pods are endpoints."""
        sections = (endpoint.kubernetes for pool in self.pools.values() for endpoint in pool.endpoints)
        return frozenset(section.source for section in sections if section is not None)

    def with_discovered(self, found: Discovered) -> Config:
        """A copy with the endpoints that discovery has found."""
        copied = self.model_copy()
        copied._discovered = found
        return copied

    @property
    def keyed(self) -> bool:
        """Callers need a key. With stored keys, none may exist yet."""
        return bool(self.keys) or self.state.keys != "config"

    def fleet(self) -> tuple[facts.Pool, ...]:
        """The pools, as values of the policies."""
        apis, workers = self.defaults.of_apis, self.server.workers
        return tuple(pool.to_pool(name, self._discovered, apis, workers) for name, pool in self.pools.items())

    def addresses_of(self, pool: str) -> Mapping[str, EndpointAddress]:
        """Of one pool, by endpoint id."""
        return self.pools[pool].addresses(pool, self._discovered)

    def addresses(self) -> Mapping[str, EndpointAddress]:
        """By endpoint id."""
        return {id: address for pool in self.pools for id, address in self.addresses_of(pool).items()}

    def urls(self) -> Mapping[str, str]:
        """Endpoint id -> base URL."""
        return {id: address.url for id, address in self.addresses().items()}

    def kv_events(self) -> Mapping[str, EndpointAddress]:
        """Endpoints with KV cache events, by id. Of a server whose ranks are listed from 0, the ranks are known."""
        found = {id: address for id, address in self.addresses().items() if address.kv_events is not None}
        ranks: dict[str, set[int]] = {}
        for address in found.values():
            if address.dp_rank is not None:
                ranks.setdefault(address.server, set()).add(address.dp_rank)
        counts = {server: len(known) for server, known in ranks.items() if known == {*range(len(known))}}
        return {
            id: address
            if address.dp_rank is None or address.server not in counts
            else replace(address, kv_rank=PublisherRank(address.dp_rank, counts[address.server]))
            for id, address in found.items()
        }

    def keep_warm(self) -> Mapping[str, float]:
        """Idle seconds after which an endpoint receives a request, by pool."""
        return {name: pool.keep_warm.idle for name, pool in self.pools.items() if pool.keep_warm is not None}

    @cached_property
    def first_token_is_meant(self) -> bool:
        """The file sets `defaults.first_token`."""
        return "first_token" in self.defaults.model_fields_set

    @cached_property
    def first_tokens_are_meant(self) -> bool:
        """A limit of first tokens is of the file, for all servers or for those of a pool."""
        return self.first_token_is_meant or any(pool.first_token is not None for pool in self.pools.values())

    @cached_property
    def passthrough_route(self) -> Route | None:
        """Route of all other model names. The fixed name keeps callers from creating metric labels."""
        if self.passthrough is None:
            return None
        raw = {"tiers": [self.passthrough]}
        return self.route.model_validate(_completed(PASSTHROUGH, raw, self.defaults.max_attempts))

    @cached_property
    def named_routes(self) -> Mapping[str, Route]:
        """Routes by name: routes of the file, and a route for each adapter without a route of the same name."""
        holders: dict[str, list[dict[str, str]]] = {}
        for pool, section in self.pools.items():
            for name in () if section.adapters is None else section.adapters.names:
                holders.setdefault(name, []).append({"pool": pool, "adapter": name})
        added = {
            name: self.route.model_validate(_completed(name, {"tiers": tiers}, self.defaults.max_attempts))
            for name, tiers in holders.items()
            if name not in self.routes
        }
        return {**self.routes, **added} if added else self.routes

    @cached_property
    def model_routes(self) -> Mapping[str, Route]:
        """Route of the models that callers ask a pool for, by pool: one for all, so that callers create no metric
        labels."""
        return {
            pool: self.route.model_validate(_completed(f"{pool}/*", {"tiers": [pool]}, self.defaults.max_attempts))
            for pool, section in self.pools.items()
            if section.models
        }

    @property
    def all_routes(self) -> tuple[Route, ...]:
        """Every route, those of models after the named ones, `passthrough_route` last."""
        passed = [self.passthrough_route] if self.passthrough_route else []
        return (*self.named_routes.values(), *self.model_routes.values(), *passed)


def _completed(name: str, raw: Any, max_attempts: int) -> Any:
    """Fills in the name, the preset of the workload and the defaults."""
    if not isinstance(raw, Mapping):
        return raw
    workload = raw.get("workload", "chat")
    if workload in get_args(Workload):
        raw = with_preset(workload, raw)
    return {"name": name, "max_attempts": max_attempts, **raw}
