"""What an operator reads first when something is wrong: GET /incidents, `firsttoken top` and `firsttoken why`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession

from gateway.app import Gateway
from gateway.cli.main import main
from gateway.observe.record_columns import RECORD
from tests.support.builders import CHAT, STREAMED, calling, post
from tests.support.gateways import pool, running
from tests.support.ports import closed_port
from tests.support.simulated import eventually
from tests.support.upstream import HANG, Pause, Upstream

STREAM = {**CHAT, "stream": True}
LATE = {"budget": "1us"}


async def ask(gateway: Gateway, model: str, times: int = 1) -> None:
    for _ in range(times):
        async with calling(gateway.url) as caller:
            status, _ = await caller.ask(post({**STREAM, "model": model}, "x-request-id: asked"))
            if status == 200:
                await caller.chunks()


async def incidents(gateway: Gateway) -> list[dict[str, Any]]:
    await eventually(lambda: gateway.recorder.live == 0)
    async with ClientSession() as client, client.get(f"{gateway.admin_url}/incidents?minutes=5") as reply:
        found: list[dict[str, Any]] = (await reply.json())["incidents"]
        return found


async def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert await asyncio.to_thread(main, [*command]) == 0
    return capsys.readouterr().out


@asynccontextmanager
async def outage_beside_a_slow_route() -> AsyncIterator[Gateway]:
    """`down` has a lone engine that refuses; `slowish` is late each time."""
    dead = f"http://127.0.0.1:{closed_port()}"
    routes = {"down": {"tiers": ["dead"]}, "slowish": {"tiers": ["alive"], "ttft": LATE}}
    async with (
        Upstream([STREAMED]) as alive,
        running({"dead": pool(dead), "alive": pool(alive.url)}, routes) as gateway,
    ):
        await ask(gateway, "slowish", 12)
        await ask(gateway, "down", 20)
        yield gateway


async def test_an_outage_is_told_before_a_slow_route(capsys: pytest.CaptureFixture[str]) -> None:
    """All 20 of the route in one row that names the engine, also those that no attempt was made for."""
    async with outage_beside_a_slow_route() as gateway:
        first, *others = await incidents(gateway)
        top = await said(capsys, "top", "--once", "--admin", gateway.admin_url)
        why = await said(capsys, "why", "--route", "down", "--last", "5m", "--admin", gateway.admin_url)
    assert first["headline"].startswith("20 failed of 20 requests: dead/127.0.0.1:")
    assert (first["cause"], first["route"]) == ("connection", "down")
    assert {each["route"] for each in others} == {"slowish"}
    assert sum(each["late"] for each in others) == 12
    lines = [line.strip() for line in top.splitlines() if "requests: " in line and "•" not in line]
    assert lines[0].startswith("20 failed of 20 requests: dead/")
    assert f"mend: {first['mend'][:30]}" in top
    assert "20 failed of 20 requests: dead/" in why.split("cause ")[0]


async def test_the_verdict_names_route_cause_and_mend_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The same words at the admin port and in the terminal, the worst route first."""
    async with outage_beside_a_slow_route() as gateway:
        (first, *_) = await incidents(gateway)
        async with ClientSession() as client, client.get(f"{gateway.admin_url}/verdicts?window=now") as reply:
            said_of = await reply.json()
        top = await said(capsys, "top", "--once", "--admin", gateway.admin_url)
    down, slowish, *others = said_of["routes"]
    assert down["text"].startswith("down fails 20 of 20 requests: no connection (dead/127.0.0.1:")
    assert (down["state"], down["mend"]) == ("fails", first["mend"])
    assert slowish["text"].startswith("slowish late: 0% within ")
    assert [each["state"] for each in others] in (["idle"], [])
    assert said_of["summary"] == "2 routes with trouble, 0 fine."
    assert said_of["window"] == "5m"
    lines = [line.strip() for line in top.splitlines()]
    assert lines.index(said_of["summary"]) < lines.index(next(line for line in lines if line.startswith("incident")))
    assert any(line.startswith(f"• {down['text'][:60]}") for line in lines)


async def test_failures_are_the_first_of_the_worst_requests() -> None:
    """Whatever the time over: that of a refusal is its own millisecond."""
    async with outage_beside_a_slow_route() as gateway:
        await incidents(gateway)
        async with ClientSession() as client, client.get(f"{gateway.admin_url}/requests?worst=32") as reply:
            ends = [record["end"] for record in await reply.json()]
    assert len(ends) == 32
    assert "completed" not in ends[:20]
    assert set(ends[20:]) == {"completed"}


async def test_the_time_of_failed_attempts_is_in_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """A 504 after two silent attempts: `why` shows where the seconds went."""
    route = {"tiers": ["mute"], "ttft": "off", "hedge": "off"}
    async with (
        Upstream([HANG]) as one,
        Upstream([HANG]) as other,
        running({"mute": pool(one.url, other.url, first_token="1s")}, {"chat": route}) as gateway,
    ):
        await ask(gateway, "chat")
        (found,) = await incidents(gateway)
        (record,) = gateway.recorder.recent
        why = await said(capsys, "why", "asked", "--admin", gateway.admin_url)
    stages = RECORD.view(record)["stages_ms"]
    assert record.status == 504
    assert stages["failover"] > 900
    assert sum(stages.values()) == pytest.approx(record.total * 1e3, rel=0.05)
    assert "failover" in why
    assert "failed after" in why
    assert found["failed"] == 1
    assert found["culprit"].startswith("mute/")


async def test_a_caller_that_leaves_a_silent_engine_shows_its_wait_upstream() -> None:
    async with Upstream([Pause(0.0), HANG]) as mute, running({"mute": pool(mute.url)}) as gateway:
        async with calling(gateway.url) as caller:
            caller.writer.write(post(STREAM))
            await mute.until(lambda seen: len(seen.requests) == 1)
            await asyncio.sleep(0.1)
        await eventually(lambda: len(gateway.recorder.recent) == 1)
        (record,) = gateway.recorder.recent
    assert RECORD.view(record)["stages_ms"]["upstream"] > 90


@pytest.mark.parametrize("query", ["", "?minutes=0", "?minutes=61", "?minutes=x"])
async def test_a_wrong_window_is_refused(query: str) -> None:
    async with (
        running({"dead": pool("http://127.0.0.1:9")}) as gateway,
        ClientSession() as client,
        client.get(f"{gateway.admin_url}/incidents{query}") as reply,
    ):
        assert reply.status == 400
        assert "minutes must be a whole number" in await reply.text()
