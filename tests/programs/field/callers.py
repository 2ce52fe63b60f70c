"""A real gateway before the APIs of the field, and what a caller sends to it, over sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import aiohttp

from backends.interface import Operation
from tests.programs.field.providers import FURTHER, SPARE, Providers, plain_url
from tests.programs.field.rules import Target, targets
from tests.support.gateways import pool, running

CALLERS = ("sk-field-a-0123456789", "sk-field-b-0123456789")  # API keys
KEYS = [{"name": key[3:10], "sha256": sha256(key.encode()).hexdigest()} for key in CALLERS]
PATHS = {
    Operation.CHAT: "/v1/chat/completions",
    Operation.MESSAGES: "/v1/messages",
    Operation.RESPONSES: "/v1/responses",
}


@dataclass(frozen=True)
class Reply:
    """An answer as the caller gets it."""

    status: int
    headers: Mapping[str, str]
    data: bytes


@dataclass(frozen=True)
class Field:
    """The gateway's address and the APIs behind it."""

    url: str
    providers: Providers
    session: aiohttp.ClientSession

    async def send(
        self, route: str, operation: Operation, body: Mapping[str, Any], headers: Mapping[str, str], caller: int = 0
    ) -> Reply:
        """`caller`: number in CALLERS."""
        url, headers = self.url + PATHS[operation], {**headers, "x-firsttoken-key": CALLERS[caller]}
        async with self.session.post(url, json={**body, "model": route}, headers=headers) as answer:
            return Reply(answer.status, answer.headers, await answer.read())


@asynccontextmanager
async def field_of_apis(apis: Collection[str] = ()) -> AsyncIterator[Field]:
    """Before some APIs, or all. Routes for every target: one with its pool alone, so that a caller may know what it
    accepts, and one with another pool behind, which never answers. A third has one behind that always does."""
    known = [target for target in targets() if not apis or target.api in apis]
    async with Providers() as providers:
        pools = {target.pool: _pool(target, providers.url) for target in known}
        routes: dict[str, Any] = {alone(target): {"tiers": [target.pool]} for target in known}
        routes |= {with_spare(target): {"tiers": [target.pool, "spare"]} for target in known}
        routes |= {with_further(target): {"tiers": [target.pool, "further"]} for target in known}
        pools["spare"] = pool(SPARE, model="spare", proxy=providers.url)
        pools["further"] = pool(FURTHER, model="further", proxy=providers.url)
        async with running(pools, routes, keys=KEYS) as gateway, aiohttp.ClientSession() as session:
            yield Field(gateway.url, providers, session)


def alone(target: Target) -> str:
    """Name of a route."""
    return f"{target.pool}-alone"


def with_spare(target: Target) -> str:
    """Name of a route."""
    return f"{target.pool}-and-more"


def with_further(target: Target) -> str:
    """Name of a route."""
    return f"{target.pool}-and-further"


def _pool(target: Target, proxy: str) -> dict[str, Any]:
    kind, url = target.rules["backend"], plain_url(target)
    return {"backend": kind, "model": target.model, "api_key": "sk-field", "endpoints": [url], "proxy": proxy}
