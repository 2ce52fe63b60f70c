"""The endpoint picker behind the real Envoy, with the configuration of deploy/envoy: `make envoy`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.parts.picker.part import PickerPart
from lab.servers.simulated_server import SimulatedServer
from scripts.envoy_setup import VERSIONS
from tests.support.envoy import envoy
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

ROUTES = {"served": {"tiers": ["only"]}}
CHAT: dict[str, Any] = {"model": "served", "stream": True, "max_tokens": 5}
BOTH_MODES = pytest.mark.parametrize("duplex", [False, True], ids=["buffered", "duplex"])
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)


def chat(text: str) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": text}]}


async def ask(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, bytes]:
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        return reply.status, await reply.read()


@asynccontextmanager
async def picked(
    folder: Path, version: str, *, duplex: bool = False, **pick: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, list[SimulatedServer], Gateway]]:
    """Envoy over three engines, with a picker in this process."""
    settings = {"listen": "127.0.0.1:0", **pick}
    async with (
        engines(3) as servers,
        running({"only": engine_pool(*servers)}, ROUTES, pick=settings) as gateway,
        aiohttp.ClientSession() as session,
    ):
        urls = [server.url for server in servers]
        async with envoy(folder, version, gateway.part(PickerPart).url, urls, duplex=duplex) as url:
            yield url, session, servers, gateway


@EVERY_VERSION
@BOTH_MODES
async def test_prompts_go_back_to_the_engine_that_holds_their_prefix(
    tmp_path: Path, version: str, duplex: bool
) -> None:
    """Answers arrive whole, and what was seen of them is learned."""
    async with picked(tmp_path, version, duplex=duplex) as (url, session, servers, gateway):
        for turn in range(4):
            for talk in range(5):
                body = chat(f"{talk} " * 800 + f"turn {turn}")
                status, answer = await ask(session, url, body)
                assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
        found = [{each.body["messages"][0]["content"][0] for each in server.requests} for server in servers]
        assert sum(map(len, found)) == 5  # each talk on one engine
        await eventually(lambda: len(gateway.recorder.recent) == 20)
        later = [record for record in gateway.recorder.recent if (record.placed.cached_tokens or 0) > 700]
        assert len(later) >= 15
        assert all(record.ttft is not None for record in gateway.recorder.recent)


@EVERY_VERSION
@BOTH_MODES
async def test_a_body_of_two_megabytes_passes(tmp_path: Path, version: str, duplex: bool) -> None:
    async with picked(tmp_path, version, duplex=duplex) as (url, session, servers, _):
        body = {**chat("hello"), "metadata": {"note": "x" * 2_000_000}}
        assert (await ask(session, url, body))[0] == 200
        (received,) = [each for server in servers for each in server.requests]
        assert received.body == body


@EVERY_VERSION
async def test_a_refusal_of_ours_reaches_the_caller(tmp_path: Path, version: str) -> None:
    async with picked(tmp_path, version) as (url, session, servers, gateway):
        for server in servers:
            await server.stop()
        await eventually(lambda: not gateway.decider.any_usable(monotonic()))
        status, answer = await ask(session, url, chat("hello"))
        assert (status, json.loads(answer)["error"]["code"]) == (503, "unavailable")


@EVERY_VERSION
async def test_a_dead_first_address_costs_no_request(tmp_path: Path, version: str) -> None:
    """Envoy goes on to the next address of the list, or to one of its own."""
    async with picked(tmp_path, version, fallbacks=2) as (url, session, servers, _):
        assert (await ask(session, url, chat("a " * 800)))[0] == 200
        (holder,) = [server for server in servers if server.requests]
        await holder.stop()
        assert (await ask(session, url, chat("a " * 800)))[0] == 200
