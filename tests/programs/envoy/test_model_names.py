"""Models that engines know by other names than callers, before the real Envoy: `make envoy`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.parts.picker.part import PickerPart
from lab.servers.simulated_server import SimulatedServer
from tests.programs.envoy.test_envoy import BOTH_MODES, EVERY_VERSION, chat
from tests.support.envoy import envoy
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines

ROUTES = {"assistant": {"tiers": ["only"], "aliases": ["gpt-*"]}}


@asynccontextmanager
async def picked(
    folder: Path, version: str, *, duplex: bool
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, SimulatedServer]]:
    """The route `assistant` over one engine, which knows its model as `served`."""
    async with (
        engines(1) as (server,),
        running({"only": engine_pool(server)}, ROUTES, pick={"listen": "127.0.0.1:0"}) as gateway,
        aiohttp.ClientSession() as session,
        envoy(folder, version, gateway.part(PickerPart).url, [server.url], duplex=duplex) as url,
    ):
        yield url, session, server


@EVERY_VERSION
@BOTH_MODES
@pytest.mark.parametrize("size", [10, 2_000_000])
async def test_the_engine_gets_its_own_name_and_nothing_else_changed(
    tmp_path: Path, version: str, duplex: bool, size: int
) -> None:
    """By longer and shorter names, on one connection. No route has the name `served`: its body goes on as it is."""
    async with picked(tmp_path, version, duplex=duplex) as (url, session, server):
        for name in ("assistant", "gpt-x", "served"):
            sent = {**chat("hello"), "metadata": {"note": "é" + "x" * size}, "temperature": 1.0}
            async with session.post(f"{url}/v1/chat/completions", json={**sent, "model": name}) as reply:
                assert (reply.status, (await reply.read()).endswith(b"data: [DONE]\n\n")) == (200, True)
            assert server.requests[-1].body == {**sent, "model": "served"}


@EVERY_VERSION
@BOTH_MODES
async def test_a_body_without_a_length_is_renamed_too(tmp_path: Path, version: str, duplex: bool) -> None:
    """`transfer-encoding: chunked`."""

    async def pieces(body: Any) -> AsyncIterator[bytes]:
        raw = json.dumps(body).encode()
        for at in range(0, len(raw), 50):
            yield raw[at : at + 50]
            await asyncio.sleep(0)

    async with picked(tmp_path, version, duplex=duplex) as (url, session, server):
        body = {**chat("hello"), "model": "assistant"}
        async with session.post(f"{url}/v1/chat/completions", data=pieces(body)) as reply:
            assert (reply.status, (await reply.read()).endswith(b"data: [DONE]\n\n")) == (200, True)
        assert server.requests[-1].body == {**body, "model": "served"}
