"""The configuration: what the YAML may say, validated, and the values that the rest is built from.

Rules:
- Every section is its own model, frozen, and refuses unknown keys.
- A model checks what it can see of itself; what spans sections is in `gateway.config.checks`.
- Secrets do not print, and are not in a dump.
- What is accepted but not acted on yet is listed in NOT_YET, and `firsttoken check` says so.
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

PASSTHROUGH = "passthrough"  # the name of the route that takes what is no route's

# Accepted, validated, without effect in this version: a path, and the value that asks for it (any but the default,
# if none is named).
NOT_YET = ("routes.*.rescue=on",)


MOST_WORKERS = 256
MOST = 10**12  # of anything that a key may use


class Drain(Section):
    """How a gateway that is told to stop does so."""

    wait: Annotated[Duration, Field(ge=0)] = written("0s")
    """Serve on, new connections too, while `/ready` says 503: as long as a balancer needs to hear of it."""
    grace: Annotated[Duration, Field(ge=0)] = written("30s")
    """For what still runs after that; then it is cut."""


class ServerSection(Section):
    listen: Listen = written("127.0.0.1:8080")
    """Where callers connect, host:port."""
    admin: Listen = written("127.0.0.1:9090")
    """Where operators connect: metrics, requests, explain. It asks for no key: keep it private."""
    workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """Processes that share the listening port, and what they know of load and caches."""
    open: bool = False
    """Serve callers without a key beyond loopback; for a gateway behind its own authentication."""
    drain: Drain = Drain()


class Defaults(Section):
    """What holds for every route that does not say otherwise."""

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
    """What replicas share; absent: everything is kept in this process."""
    cache_secret: CacheSecret | None = None
    """What the names of caches are made with: the same for all replicas. Absent: the digests of `keys`."""
    keys: Literal["config", "redis"] = "config"
    """redis: callers' keys are those of this file and those that `firsttoken keys` keeps there."""
    namespace: Namespace = "firsttoken"
    """Replicas of one namespace share what they know; two fleets on one Redis need two."""


class Key(Section):
    """A caller: its key is stored as a digest only."""

    name: Name
    sha256: Sha256
    """printf %s "$KEY" | sha256sum"""
    routes: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Which it may ask for; absent: all."""
    requests_per_minute: int | None = Field(default=None, gt=0, le=MOST)
    """In any 60 s."""
    tokens_per_minute: int | None = Field(default=None, gt=0, le=MOST)
    """Of prompts and answers, in any 60 s."""
    concurrent_requests: int | None = Field(default=None, gt=0, le=MOST)
    """Answered at a time."""
    monthly_cost_usd: float | None = Field(default=None, gt=0, le=1e6)
    """By the prices of the pools, in a calendar month (UTC)."""
    cache_group: Name | None = None
    """Keys of one group share prefix caches, and can tell what the others asked; absent: the key has its own."""

    @property
    def limits(self) -> KeyLimits | None:
        """None: it may use what it likes."""
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
    """Tell external APIs, too, which trace their request belongs to; engines are told."""
    access_log: AccessLog = "stdout"
    """stdout, stderr, off, or the path of a file: one JSON line per request."""
    prompts: Literal["never"] = "never"
    """Prompts and answers are not recorded anywhere."""


class Config(Section):
    """firsttoken: pools are what there is, routes are what callers ask for and what they were promised."""

    server: ServerSection = ServerSection()
    pools: Mapping[PoolName, PoolSection] = {}
    """By name: interchangeable endpoints serving one model."""
    defaults: Defaults = Defaults()
    routes: Mapping[Name, Route] = {}
    """By the model name that callers ask for."""
    passthrough: str | None = None
    """A pool: requests for a model that is no route go there, the model name unchanged."""
    state: StateSection = StateSection()
    keys: tuple[Key, ...] = ()
    """Who may call; absent: anybody on this machine."""
    telemetry: TelemetrySection = TelemetrySection()
    _addresses: Addresses | None = None  # of names that are to be resolved; None: nobody has asked yet

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
        """Those whose addresses are endpoints of their own, and how often to ask for them, in seconds."""
        found: dict[str, float] = {}
        for pool in self.pools.values():
            for endpoint in pool.endpoints:
                if endpoint.resolve is not None:
                    found[endpoint.host] = min(endpoint.resolve, found.get(endpoint.host, endpoint.resolve))
        return found

    def at(self, addresses: Addresses) -> Config:
        """The same, in which those names have these addresses."""
        copied = self.model_copy()
        copied._addresses = addresses
        return copied

    @property
    def keyed(self) -> bool:
        """Callers need a key, though there may be none yet."""
        return bool(self.keys) or self.state.keys == "redis"

    def fleet(self) -> tuple[facts.Pool, ...]:
        """The pools as decisions see them."""
        return tuple(pool.as_facts(name, self._addresses) for name, pool in self.pools.items())

    def sites(self) -> Mapping[str, Site]:
        """By endpoint id."""
        every = (pool.sites(name, self._addresses) for name, pool in self.pools.items())
        return {id: site for sites in every for id, site in sites.items()}

    def urls(self) -> Mapping[str, str]:
        """Endpoint id -> base URL."""
        return {id: server.url for id, server in self.sites().items()}

    def kv_events(self) -> Mapping[str, Site]:
        """The endpoints that publish their cache events, by id."""
        return {id: server for id, server in self.sites().items() if server.kv_events is not None}

    def keep_warm(self) -> Mapping[str, float]:
        """Seconds without a request, by pool, after which an endpoint is sent one."""
        return {name: pool.keep_warm.idle for name, pool in self.pools.items() if pool.keep_warm is not None}

    def backend(self, name: str) -> BackendConfig:
        """What the catalog needs to build the backend of a pool."""
        pool = self.pools[name]
        headers = {header: value.get_secret_value() for header, value in pool.headers.items()}
        return BackendConfig(pool.backend, pool.model, pool.api_key.get_secret_value(), headers)

    @cached_property
    def passthrough_route(self) -> Route | None:
        """The route of every model name that is not one; its own name is fixed, so that no caller mints a label."""
        if self.passthrough is None:
            return None
        raw = {"tiers": [self.passthrough]}
        return Route.model_validate(_completed(PASSTHROUGH, raw, self.defaults.max_attempts))

    def without_effect(self) -> list[str]:
        """What this configuration asks for that this version accepts and does not do."""
        found = []
        for entry in NOT_YET:
            pattern, _, asked = entry.partition("=")
            for path, value, default in _matches(self, pattern.split(".")):
                if value == asked if asked else value != default:
                    found.append(f"{path}: {asked}" if asked else path)
        return found


def _completed(name: str, raw: Any, max_attempts: int) -> Any:
    """A route as written, with its name, its workload's preset and the defaults beneath."""
    if not isinstance(raw, Mapping):
        return raw
    workload = raw.get("workload", "chat")
    if workload in get_args(Workload):
        raw = workloads.apply(workload, dict(raw))
    return {"name": name, "max_attempts": max_attempts, **raw}


def _matches(node: Any, pattern: Sequence[str], path: str = "", default: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Every value under `node` that a pattern names, with its path and its default."""
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
