"""Canary secrets, and the places where no canary may appear.

A new sink is one line in PLACES: the sink's content as text while the gateway runs (in AFTER_STOP: after the stop).
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.admission.key_store import PATIENCE
from gateway.admission.redis_keys import RedisKeys, one_connection
from gateway.app import Gateway
from gateway.config.field_types import parse_redis_url
from gateway.config.models import Key
from gateway.observe.logs import Formatter
from gateway.parts.replicas.part import ReplicasPart
from tests.support.builders import calling, get, post
from tests.support.collector import Collector
from tests.support.gateways import pool, running
from tests.support.redis import RedisMonitor, RedisServer, redis_server
from tests.support.simulated import eventually
from tests.support.upstream import Script, Upstream

CALLER, UNKNOWN, BACKEND = "wombatcallerkey", "numbatunknownkey", "quokkabackendkey"
HEADER, POOL_HEADER, COOKIE = "narwhalheader", "platypuspoolheader", "possumcookie"
PROMPT, ANSWER, TOOL = "zanzibarprompt", "ocelotanswer", "tapirtool"
REDIS, CACHE = "axolotlredispassword", "pangolincachesecret"
OTHER = "sk-other"
OWN_KEY = "sk-ant-oat01-bilbycallerskey"  # the caller's own, for a provider

CANARIES = (CALLER, UNKNOWN, BACKEND, HEADER, POOL_HEADER, COOKIE, PROMPT, ANSWER, TOOL, REDIS, CACHE, OWN_KEY)
ABSENT = f"redis://:{REDIS}@127.0.0.1:1/0"
LIMITS = {
    "requests_per_minute": 10_000,
    "tokens_per_minute": 10**9,
    "concurrent_requests": 100,
    "monthly_cost_usd": 1e3,
}
PRICE = {"input": 1.0, "output": 1.0}
BACKENDS = (BACKEND, POOL_HEADER)  # configuration which a backend receives
OWN = (PROMPT, ANSWER, TOOL, HEADER)  # a backend's error about a request may reach the request's caller

TOOLS = [{"type": "function", "function": {"name": "f", "description": TOOL, "parameters": {"type": "object"}}}]
BODY = {"model": "chat", "messages": [{"role": "user", "content": f"tell me about {PROMPT}"}], "tools": TOOLS}
HEADERS = (
    f"authorization: Bearer {CALLER}",
    f"cookie: {COOKIE}={COOKIE}",
    f"x-secret: {HEADER}",
    f"user-agent: {HEADER}",
    f"x-session-id: {HEADER}",
    f"x-cache-salt: {HEADER}",
    f"referer: http://{HEADER}/",
)


def canary_request(headers: tuple[str, ...] = HEADERS, **more: Any) -> bytes:
    return post({**BODY, **more}, *headers)


@dataclass
class CanaryGateway:
    """A gateway in which every secret is a canary."""

    gateway: Gateway
    upstream: Upstream
    collector: Collector
    redis: RedisMonitor
    folder: Path
    logged: io.StringIO = field(default_factory=io.StringIO)

    @property
    def sent(self) -> str:
        """All text sent to backends."""
        return "\n".join(f"{r.method} {r.target} {r.headers} {r.body!r}" for r in self.upstream.requests)


async def _page(canary: CanaryGateway, path: str) -> str:
    status, headers, body = await get(canary.gateway.admin_url, path)
    assert status == 200
    return f"{headers} {body.decode()}"


async def _replies_to_other_callers(canary: CanaryGateway) -> str:
    """All replies to other callers, right or wrong."""
    replies = ""
    for raw in (
        post(b"{", f"authorization: Bearer {OTHER}"),
        post(b"{}", "authorization: Bearer x"),
        post({"model": "nope", "messages": [{"role": "user", "content": "x"}]}, f"authorization: Bearer {OTHER}"),
    ):
        async with calling(canary.gateway.url) as caller:
            replies += str(await caller.whole(raw))
    for path in ("/v1/models", "/ready", "/nowhere"):
        replies += str(await get(canary.gateway.url, path, f"authorization: Bearer {OTHER}"))
    return replies


async def _explain_replies(canary: CanaryGateway) -> str:
    """Replies to /explain for another caller's request."""
    replies = ""
    for raw in (post({**BODY, "messages": [{"role": "user", "content": "x"}], "tools": []}), post(b"{")):
        async with calling(canary.gateway.admin_url) as caller:
            replies += str(await caller.whole(raw.replace(b"/v1/chat/completions", b"/explain", 1)))
    return replies


PLACES: Mapping[str, Callable[[CanaryGateway], Awaitable[str]]] = {
    "/metrics": lambda canary: _page(canary, "/metrics"),
    "/requests": lambda canary: _page(canary, "/requests"),
    "/routes": lambda canary: _page(canary, "/routes"),
    "/fleet": lambda canary: _page(canary, "/fleet"),
    "/config": lambda canary: _page(canary, "/config"),
    "/explain": _explain_replies,
    "replies to other callers": _replies_to_other_callers,
}
AFTER_STOP: Mapping[str, Callable[[CanaryGateway], str]] = {
    "log lines": lambda canary: canary.logged.getvalue(),
    "the collector": lambda canary: f"{canary.collector.spans} {canary.collector.metrics} {canary.collector.resources}",
    "the access log": lambda canary: (canary.folder / "access.jsonl").read_text(),
}


def key(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), **LIMITS}


def canary_config(folder: Path, otlp: str = "", redis: str = ABSENT, **more: Any) -> dict[str, Any]:
    """All sections but pools and routes. A running Redis stores the caller's key."""
    keys_in_redis = redis != ABSENT
    keys = [key("other", OTHER)] if keys_in_redis else [key("caller", CALLER), key("other", OTHER)]
    given = {
        "keys": keys,
        "state": {"redis": redis, "keys": "redis" if keys_in_redis else "config", "cache_secret": CACHE},
        "telemetry": {"access_log": str(folder / "access.jsonl"), **({"otlp": otlp, "traces": "100%"} if otlp else {})},
    }
    return {**given, **more}


@asynccontextmanager
async def monitored_redis(**limits: Any) -> AsyncIterator[tuple[RedisServer, RedisMonitor]]:
    """A real Redis with a password, which stores the caller's key."""
    async with redis_server("--requirepass", REDIS) as server:
        url = server.url.replace("redis://", f"redis://:{REDIS}@")
        async with RedisMonitor(url) as redis_monitor:
            store = RedisKeys(one_connection(parse_redis_url(url)), parse_redis_url(url), PATIENCE, "firsttoken")
            assert await store.add(Key.model_validate({**key("caller", CALLER), **limits}))
            yield server, redis_monitor


async def await_redis_keys(gateway: Gateway) -> None:
    """Wait until Redis is connected and the stored key is in force."""
    await eventually(lambda: gateway.part(ReplicasPart).client.up)
    await eventually(lambda: gateway.runtime.current.keys.owner(CALLER) is not None)


@asynccontextmanager
async def gateway_with_canaries(
    folder: Path, *scripts: Script, found: list[str], **more: Any
) -> AsyncIterator[CanaryGateway]:
    """A gateway in front of a scripted backend. `found`: the canaries by place, set at the end."""
    secrets = {"api_key": BACKEND, "headers": {"x-pool-secret": POOL_HEADER}}
    routes = more.pop("routes", None)
    root, logged = logging.getLogger(), io.StringIO()
    handler = logging.StreamHandler(logged)
    handler.setFormatter(Formatter())
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        async with Upstream(*scripts) as upstream, Collector() as collector, monitored_redis() as (_, redis):
            pools = {"only": pool(upstream.url, price=PRICE, **secrets), **more.pop("pools", {})}
            async with running(pools, routes, **canary_config(folder, collector.url, redis.url, **more)) as gateway:
                canary = CanaryGateway(gateway, upstream, collector, redis, folder, logged)
                await await_redis_keys(gateway)
                yield canary
                for place, look in PLACES.items():
                    found += leaks_in(place, await look(canary))
            found += leaks_in("requests to the backend", canary.sent, set(CANARIES) - {PROMPT, TOOL, *BACKENDS})
            for place, read in AFTER_STOP.items():
                found += leaks_in(place, read(canary))
            found += leaks_in("commands to Redis", await redis.commands()) + leaks_in("Redis", await redis.contents())
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def leaks_in(place: str, text: str, canaries: Any = CANARIES) -> list[str]:
    return [
        f"{canary} in {place}: {text[max(text.find(canary) - 200, 0) :][:400]}" for canary in canaries if canary in text
    ]
