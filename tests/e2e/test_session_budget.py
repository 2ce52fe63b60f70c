"""The time of a session over real sockets: as agents name it, in Records and metrics."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from gateway.app import Gateway
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Pause, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ANSWER = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
SLOW = [STREAM_HEAD, Pause(2.0), chunk(ANSWER) + LAST_CHUNK]  # 2 s before the answer


async def step(gateway: Gateway, session: str) -> None:
    body = {"model": "agent", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    headers = {"x-claude-code-session-id": session} if session else {}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        await reply.read()
        assert reply.status == 200


async def metric(gateway: Gateway, met: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(f"{gateway.admin_url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    found = [line for line in lines if line.startswith("firsttoken_slo_total{") and 'objective="session"' in line]
    return next((line.split()[-1] for line in found if f'met="{met}"' in line), "0")


async def test_the_steps_of_a_session_spend_its_time() -> None:
    """Parallel ones together; another session, and a request that names none, have nothing to do with it."""
    routes = {"agent": {"tiers": ["only"], "session": {"total": "5s"}}}
    async with Upstream(*[SLOW] * 6) as upstream, running({"only": pool(upstream.url)}, routes) as gateway:
        await step(gateway, "one")
        await asyncio.gather(step(gateway, "one"), step(gateway, "one"))
        await step(gateway, "one")
        await step(gateway, "two")
        await step(gateway, "")
        left = [record.session_left for record in gateway.recorder.recent]
        counted = [await metric(gateway, met) for met in ("true", "false")]
    assert left == [pytest.approx(each, abs=0.5) for each in (3.0, 1.0, 1.0, -1.0, 3.0)] + [None]
    assert counted == ["4.0", "1.0"]
