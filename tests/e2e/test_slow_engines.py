"""A life story of an engine slower than the promised TPOT: served, reported, and reported again once fast enough."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import pytest

from gateway import lost_promises
from gateway.app import Gateway
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

ROUTE = {"tiers": ["slow"], "ttft": {"budget": "3s"}, "tpot": {"budget": "40ms"}}
TWICE_AS_SLOW, FAST = 1.4, 0.25  # times the engine's 60 ms per token


async def ask(gateway: Gateway, words: int, tokens: int) -> int:
    messages = [{"role": "user", "content": "word " * words}]
    body = {"model": "chat", "stream": True, "max_tokens": tokens, "messages": messages}
    url = f"{gateway.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        await reply.read()
        return reply.status


async def unattainable(gateway: Gateway) -> str:
    """The sample of the metric; empty: none yet."""
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.admin_url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return next((line for line in lines if line.startswith("firsttoken_tpot_unattainable{")), "")


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if " the tpot of route " in record.getMessage()]


async def test_an_engine_at_twice_the_promise_serves_everybody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside a long answer get first tokens at the engine's speed. One line, and a metric, when the promise is
    found to be lost; one more when the engine can keep it."""
    monkeypatch.setattr(lost_promises, "HOLD", 1.0)
    caplog.set_level(logging.WARNING, "firsttoken")
    async with (
        engines(1, "8b-l4") as (engine,),
        running({"slow": engine_pool(engine)}, {"chat": ROUTE}, defaults={"first_token": "30s"}) as gateway,
    ):
        engine.faults.slow = TWICE_AS_SLOW
        long = asyncio.create_task(ask(gateway, 200, 140))
        await asyncio.sleep(1.5)
        statuses = [await ask(gateway, 200 + turn, 8) for turn in range(6)]
        assert statuses == [200] * 6
        assert max(record.ttft for record in gateway.recorder.recent) < 10.0  # held for the whole limit: 30 s
        await eventually(lambda: lines_of(caplog), within=15.0)
        assert await unattainable(gateway) == 'firsttoken_tpot_unattainable{pool="slow",route="chat"} 1.0'
        assert await long == 200
        engine.faults.slow = FAST
        await answer_until_two_lines(gateway, caplog)
        assert await unattainable(gateway) == 'firsttoken_tpot_unattainable{pool="slow",route="chat"} 0.0'
        lost, kept = lines_of(caplog)
    assert lost.startswith("pool slow cannot keep the tpot of route chat: an answer alone takes ")
    assert kept.startswith("pool slow can keep the tpot of route chat again: an answer alone takes ")


async def answer_until_two_lines(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(60.0):
        while len(lines_of(caplog)) < 2:
            assert await ask(gateway, 200, 60) == 200
