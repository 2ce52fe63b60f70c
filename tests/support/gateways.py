"""A gateway in the test's own loop, on free ports, in front of the test's backends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from gateway.app import Gateway
from gateway.config.models import Config


def pool(*urls: str, **more: Any) -> dict[str, Any]:
    """A pool of OpenAI-compatible endpoints without probes."""
    return {"backend": "compatible", "model": "served", "endpoints": list(urls), "api_key": "sk-backend", **more}


def document(pools: Mapping[str, Any], routes: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A whole configuration; the default is a route `chat` over the pools in order."""
    return {
        "server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "pools": dict(pools),
        "routes": routes if routes is not None else {"chat": {"tiers": list(pools)}},
        "telemetry": {"access_log": "off"},
        **more,
    }


@asynccontextmanager
async def running(
    pools: Mapping[str, Any], routes: Mapping[str, Any] | None = None, **more: Any
) -> AsyncIterator[Gateway]:
    async with started(Gateway(Config.model_validate(document(pools, routes, **more)))) as gateway:
        yield gateway


@asynccontextmanager
async def started(gateway: Gateway) -> AsyncIterator[Gateway]:
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()
