"""Canary secrets, and the places where they must not appear.

A new sink is one line in PLACES: its content, as text, while the gateway runs (in LEFT: after the stop).
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

from gateway.admission import key_store as keyring
from gateway.app import Gateway
from gateway.config.models import Key
from gateway.observe.log_format import Formatter
from tests.gateway.builders import calling, get, post
from tests.support.collector import Collector
from tests.support.gateways import pool, running
from tests.support.redis import Overheard, RedisServer, redis_server
from tests.support.simulated import eventually
from tests.support.upstream import Script, Upstream

CALLER, UNKNOWN, BACKEND = "wombatcallerkey", "numbatunknownkey", "quokkabackendkey"
HEADER, POOL_HEADER, COOKIE = "narwhalheader", "platypuspoolheader", "possumcookie"
PROMPT, ANSWER, TOOL = "zanzibarprompt", "ocelotanswer", "tapirtool"
REDIS, CACHE = "axolotlredispassword", "pangolincachesecret"
OTHER = "sk-other"

CANARIES = (CALLER, UNKNOWN, BACKEND, HEADER, POOL_HEADER, COOKIE, PROMPT, ANSWER, TOOL, REDIS, CACHE)
ABSENT = f"redis://:{REDIS}@127.0.0.1:1/0"
LIMITS = {
    "requests_per_minute": 10_000,
    "tokens_per_minute": 10**9,
    "concurrent_requests": 100,
    "monthly_cost_usd": 1e3,
}
PRICE = {"input": 1.0, "output": 1.0}
BACKENDS = (BACKEND, POOL_HEADER)  # configuration which a backend receives
OWN = (PROMPT, ANSWER, TOOL, HEADER)  # a backend's error about a request may reach its caller

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


def asking(headers: tuple[str, ...] = HEADERS, **more: Any) -> bytes:
    return post({**BODY, **more}, *headers)


@dataclass
class World:
    """A gateway in which every secret is a canary."""

    gateway: Gateway
    upstream: Upstream
    collector: Collector
    redis: Overheard
    folder: Path
    logged: io.StringIO = field(default_factory=io.StringIO)

    @property
    def sent(self) -> str:
        """All text sent to backends."""
        return "\n".join(f"{r.method} {r.target} {r.headers} {r.body!r}" for r in self.upstream.requests)


async def _page(world: World, path: str) -> str:
    status, headers, body = await get(world.gateway.admin_url, path)
    assert status == 200
    return f"{headers} {body.decode()}"


async def _others(world: World) -> str:
    """All replies to other callers, right or wrong."""
    told = ""
    for raw in (
        post(b"{", f"authorization: Bearer {OTHER}"),
        post(b"{}", "authorization: Bearer x"),
        post({"model": "nope", "messages": [{"role": "user", "content": "x"}]}, f"authorization: Bearer {OTHER}"),
    ):
        async with calling(world.gateway.url) as caller:
            told += str(await caller.whole(raw))
    for path in ("/v1/models", "/ready", "/nowhere"):
        told += str(await get(world.gateway.url, path, f"authorization: Bearer {OTHER}"))
    return told


async def _explained(world: World) -> str:
    """Of another caller's request."""
    told = ""
    for raw in (post({**BODY, "messages": [{"role": "user", "content": "x"}], "tools": []}), post(b"{")):
        async with calling(world.gateway.admin_url) as caller:
            told += str(await caller.whole(raw.replace(b"/v1/chat/completions", b"/explain", 1)))
    return told


PLACES: Mapping[str, Callable[[World], Awaitable[str]]] = {
    "/metrics": lambda world: _page(world, "/metrics"),
    "/requests": lambda world: _page(world, "/requests"),
    "/routes": lambda world: _page(world, "/routes"),
    "/fleet": lambda world: _page(world, "/fleet"),
    "/config": lambda world: _page(world, "/config"),
    "/explain": _explained,
    "what other callers are told": _others,
}
LEFT: Mapping[str, Callable[[World], str]] = {
    "log lines": lambda world: world.logged.getvalue(),
    "the collector": lambda world: f"{world.collector.spans} {world.collector.metrics} {world.collector.resources}",
    "the access log": lambda world: (world.folder / "access.jsonl").read_text(),
}


def key(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), **LIMITS}


def configured(folder: Path, otlp: str = "", redis: str = ABSENT, **more: Any) -> dict[str, Any]:
    """All sections but pools and routes. A running Redis stores the caller's key."""
    kept = redis != ABSENT
    keys = [key("other", OTHER)] if kept else [key("caller", CALLER), key("other", OTHER)]
    given = {
        "keys": keys,
        "state": {"redis": redis, "keys": "redis" if kept else "config", "cache_secret": CACHE},
        "telemetry": {"access_log": str(folder / "access.jsonl"), **({"otlp": otlp} if otlp else {})},
    }
    return {**given, **more}


@asynccontextmanager
async def overheard(**limits: Any) -> AsyncIterator[tuple[RedisServer, Overheard]]:
    """A real Redis with a password, which stores the caller's key."""
    async with redis_server("--requirepass", REDIS) as server:
        url = server.url.replace("redis://", f"redis://:{REDIS}@")
        async with Overheard(url) as ear:
            assert await keyring.add(ear.client, Key.model_validate({**key("caller", CALLER), **limits}))
            yield server, ear


async def acquainted(gateway: Gateway) -> None:
    """Connected to Redis, with the stored key loaded."""
    await eventually(lambda: gateway.redis is not None and gateway.redis.up)
    await eventually(lambda: gateway.keyring is not None and gateway.keyring.known)


@asynccontextmanager
async def watched(folder: Path, *scripts: Script, found: list[str], **more: Any) -> AsyncIterator[World]:
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
        async with Upstream(*scripts) as upstream, Collector() as collector, overheard() as (_, redis):
            pools = {"only": pool(upstream.url, price=PRICE, **secrets)}
            async with running(pools, routes, **configured(folder, collector.url, redis.url, **more)) as gateway:
                world = World(gateway, upstream, collector, redis, folder, logged)
                await acquainted(gateway)
                yield world
                for place, look in PLACES.items():
                    found += seen(place, await look(world))
            found += seen("what the backend was sent", world.sent, set(CANARIES) - {PROMPT, TOOL, *BACKENDS})
            for place, read in LEFT.items():
                found += seen(place, read(world))
            found += seen("commands to Redis", await redis.commands()) + seen("Redis", await redis.contents())
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def seen(place: str, text: str, canaries: Any = CANARIES) -> list[str]:
    return [
        f"{canary} in {place}: {text[max(text.find(canary) - 200, 0) :][:400]}" for canary in canaries if canary in text
    ]
