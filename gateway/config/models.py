"""The configuration: validated sections of the YAML, and the values built from them.

Rules:
- Every section is a frozen model that refuses unknown keys.
- A model checks its own fields; checks across sections are in `gateway.config.checks`.
- Secrets are neither printed nor dumped.
- Settings without effect in this version are listed in NOT_YET; `firsttoken check` reports their use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from backends.interface import BackendConfig
from gateway.config.addresses import HttpUrl, Listen
from gateway.config.pool_section import Addresses, PoolSection, Site
from gateway.config.sections import (
    AccessLog,
    CacheSecret,
    Name,
    Namespace,
    PoolName,
    Positive,
    RedisUrl,
    Section,
    Sha256,
    written,
)
from policies import types as facts
from policies.quota.key_limits import NANO, KeyLimits
from policies.routes import workloads
from policies.routes.route import Route, Workload
from policies.routes.units import Duration, Share, Size

PASSTHROUGH = "passthrough"  # the name of the route for models without a route

# Accepted and validated, without effect in this version: a path, and the value that has no effect (any but the default,
# if none is named).
NOT_YET = ("routes.*.rescue=on",)


MOST_WORKERS = 256
MOST = 10**12  # upper bound of every limit of a key


class Drain(Section):
    """Draining after SIGTERM."""

    wait: Annotated[Duration, Field(ge=0)] = written("0s")
    """Time to keep serving, new connections included, while `/ready` returns 503: until balancers have noticed."""
    grace: Annotated[Duration, Field(ge=0)] = written("30s")
    """Time for requests in progress after that; the rest is aborted."""


class ServerSection(Section):
    listen: Listen = written("127.0.0.1:8080")
    """Address for callers, host:port."""
    admin: Listen = written("127.0.0.1:9090")
    """Address for operators: metrics, requests, explain. No authentication: keep it private."""
    workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """Processes that share the listening port, their load and the prefix locations."""
    open: bool = False
    """Serve callers without a key beyond loopback; for a gateway behind its own authentication."""
    drain: Drain = Drain()


class Defaults(Section):
    """Defaults of every route and pool."""

    connect: Positive = written("2s")
    """To open a connection to an endpoint."""
    stream_idle: Positive = written("30s")
    """Between two chunks of a started answer."""
    first_token: Positive = written("60s")
    """Hard limit of silence before the first token, where no budget says less."""
    max_attempts: int = Field(default=3, ge=1, le=10)
    """Endpoints tried for one request."""
    max_body: Annotated[Size, Field(gt=0)] = written("32MB")
    """Of a request."""
    scrape: Positive = written("500ms")
    """Between two looks at an engine's own load."""


class StateSection(Section):
    redis: RedisUrl | None = None
    """State shared by replicas; absent: all state is in this process."""
    cache_secret: CacheSecret | None = None
    """Secret of the cache salts: the same for all replicas. Absent: the digests of `keys`."""
    keys: Literal["config", "redis"] = "config"
    """redis: API keys are those of this file and those added by `firsttoken keys`."""
    namespace: Namespace = "firsttoken"
    """Replicas of one namespace share their state; two fleets on one Redis need two namespaces."""


class Key(Section):
    """A caller: only the digest of its API key is stored."""

    name: Name
    sha256: Sha256
    """printf %s "$KEY" | sha256sum"""
    routes: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Routes that the key may use; absent: all."""
    requests_per_minute: int | None = Field(default=None, gt=0, le=MOST)
    """In any 60 s."""
    tokens_per_minute: int | None = Field(default=None, gt=0, le=MOST)
    """Of prompts and answers, in any 60 s."""
    concurrent_requests: int | None = Field(default=None, gt=0, le=MOST)
    """Answered at a time."""
    monthly_cost_usd: float | None = Field(default=None, gt=0, le=1e6)
    """By the prices of the pools, in a calendar month (UTC)."""
    cache_group: Name | None = None
    """Keys of one group share prefix caches, and can detect each other's prompts; absent: a group of its own."""

    @property
    def limits(self) -> KeyLimits | None:
        """None: no limits."""
        cost = self.monthly_cost_usd
        limits = KeyLimits(
            self.requests_per_minute,
            self.tokens_per_minute,
            self.concurrent_requests,
            None if cost is None else round(cost * NANO),
        )
        return limits if limits.any else None


class TelemetrySection(Section):
    otlp: HttpUrl | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP, usually port 4318): receives traces and GenAI metrics."""
    traces: Share = Field(default=0.05, ge=0, le=1)
    """Sampled share of the traces that begin here; requests that missed a budget, failed or were retried always are."""
    trace_apis: bool = False
    """Send trace context to external APIs too; engines always receive it."""
    access_log: AccessLog = "stdout"
    """stdout, stderr, off, or the path of a file: one JSON line per request."""
    prompts: Literal["never"] = "never"
    """Prompts and answers are not recorded anywhere."""


class Config(Section):
    """firsttoken: pools are the available servers, routes the models that callers ask for, with their objectives."""

    server: ServerSection = ServerSection()
    pools: Mapping[PoolName, PoolSection] = {}
    """By name: interchangeable endpoints serving one model."""
    defaults: Defaults = Defaults()
    routes: Mapping[Name, Route] = {}
    """By the model name that callers ask for."""
    passthrough: str | None = None
    """A pool: requests for a model without a route go there, with the model name unchanged."""
    state: StateSection = StateSection()
    keys: tuple[Key, ...] = ()
    """API keys; absent: anybody on this machine may call."""
    telemetry: TelemetrySection = TelemetrySection()
    _addresses: Addresses | None = None  # addresses of the names to resolve; None: not resolved yet

    @field_validator("routes", mode="before")
    @classmethod
    def _presets_beneath(cls, routes: Any, info: ValidationInfo) -> Any:
        if not isinstance(routes, Mapping):
            return routes
        defaults = info.data.get("defaults", Defaults())
        return {name: _completed(name, raw, defaults.max_attempts) for name, raw in routes.items()}

    def with_workers(self, count: int) -> Config:
        """The same with so many processes."""
        return self.model_copy(update={"server": self.server.model_copy(update={"workers": count})})

    def names(self) -> Mapping[str, float]:
        """Names whose addresses are endpoints of their own, with the interval of resolution in seconds."""
        found: dict[str, float] = {}
        for pool in self.pools.values():
            for endpoint in pool.endpoints:
                if endpoint.resolve is not None:
                    found[endpoint.host] = min(endpoint.resolve, found.get(endpoint.host, endpoint.resolve))
        return found

    def at(self, addresses: Addresses) -> Config:
        """The same configuration with these addresses."""
        copied = self.model_copy()
        copied._addresses = addresses
        return copied

    @property
    def keyed(self) -> bool:
        """Callers need a key, though there may be none yet."""
        return bool(self.keys) or self.state.keys == "redis"

    def fleet(self) -> tuple[facts.Pool, ...]:
        """The pools as values for decisions."""
        return tuple(pool.as_facts(name, self._addresses) for name, pool in self.pools.items())

    def sites(self) -> Mapping[str, Site]:
        """By endpoint id."""
        every = (pool.sites(name, self._addresses) for name, pool in self.pools.items())
        return {id: site for sites in every for id, site in sites.items()}

    def urls(self) -> Mapping[str, str]:
        """Endpoint id -> base URL."""
        return {id: server.url for id, server in self.sites().items()}

    def kv_events(self) -> Mapping[str, Site]:
        """The endpoints that publish cache events, by id."""
        return {id: server for id, server in self.sites().items() if server.kv_events is not None}

    def keep_warm(self) -> Mapping[str, float]:
        """By pool: seconds without a request after which an idle endpoint is sent one."""
        return {name: pool.keep_warm.idle for name, pool in self.pools.items() if pool.keep_warm is not None}

    def backend(self, name: str) -> BackendConfig:
        """Arguments for the catalog to build the backend of a pool."""
        pool = self.pools[name]
        headers = {header: value.get_secret_value() for header, value in pool.headers.items()}
        return BackendConfig(pool.backend, pool.model, pool.api_key.get_secret_value(), headers)

    @cached_property
    def passthrough_route(self) -> Route | None:
        """The route of every model name without a route; its own name is fixed, so that no caller creates a label."""
        if self.passthrough is None:
            return None
        raw = {"tiers": [self.passthrough]}
        return Route.model_validate(_completed(PASSTHROUGH, raw, self.defaults.max_attempts))

    def without_effect(self) -> list[str]:
        """Settings of this configuration without effect in this version."""
        found = []
        for entry in NOT_YET:
            pattern, _, asked = entry.partition("=")
            for path, value, default in _matches(self, pattern.split(".")):
                if value == asked if asked else value != default:
                    found.append(f"{path}: {asked}" if asked else path)
        return found


def _completed(name: str, raw: Any, max_attempts: int) -> Any:
    """A route as written, with its name, its workload's preset and the defaults."""
    if not isinstance(raw, Mapping):
        return raw
    workload = raw.get("workload", "chat")
    if workload in get_args(Workload):
        raw = workloads.apply(workload, dict(raw))
    return {"name": name, "max_attempts": max_attempts, **raw}


def _matches(node: Any, pattern: Sequence[str], path: str = "", default: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yields every value under `node` that a pattern names, with its path and default."""
    if not pattern:
        yield path, node, default
    elif pattern[0] != "*":
        default = type(node).model_fields[pattern[0]].default
        yield from _matches(getattr(node, pattern[0]), pattern[1:], f"{path}.{pattern[0]}".lstrip("."), default)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _matches(value, pattern[1:], f"{path}.{key}")
    else:
        for i, value in enumerate(node):
            yield from _matches(value, pattern[1:], f"{path}[{i}]")
