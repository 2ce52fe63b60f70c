"""The longest silence within a stream: promised by `gap`, measured, and moving nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.app import Gateway
from gateway.observe import part_notes
from gateway.observe.record import Record, RequestOutcome
from lab.servers.simulated_server import SimulatedServer
from tests.support.gateways import running
from tests.support.rescued_answers import RESCUE, last, read, same, scripted, scripted_pool, whole
from tests.support.simulated import engine_pool, engines
from tests.support.upstream import HANG, STREAM_HEAD, Script, chunk

pytestmark = pytest.mark.virtual_time

STEADY: Mapping[str, Any] = {"gap": {"budget": "1s"}, "tpot": {"budget": "50ms"}}
BEGUN = scripted({"role": "assistant", "content": ""}, {"content": "one"}, {"content": " two"})


@asynccontextmanager
async def gateway_before(*servers: SimulatedServer, **route: Any) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    routes = {"chat": {**RESCUE["chat"], **STEADY, **route}}
    async with (
        running({"p": engine_pool(*servers)}, routes) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield gateway, client


def stall(server: SimulatedServer, seconds: float) -> None:
    faults = server.faults
    faults.stall_share, faults.stall_after_tokens, faults.stall_seconds = 1.0, 10, seconds


def endings(record: Record) -> list[str]:
    return [f"{each.kind.value} {each.ending.value}" for each in record.attempts]


@pytest.mark.parametrize(("rescue", "seconds"), [("off", 5.0), ("on", 1.5)])
async def test_a_standstill_misses_the_budget_and_moves_nothing(rescue: str, seconds: float) -> None:
    """With rescue, a silence shorter than 2 s is no break."""
    async with engines(2) as servers, gateway_before(*servers, rescue=rescue) as (gateway, client):
        for server in servers:
            stall(server, seconds)
        answer = await whole(client, "hello", max_tokens=60)
        record = last(gateway)
        assert (part_notes.RESCUE.of(record), record.gap_met, endings(record)) == ("", False, ["primary completed"])
        assert answer.longest_gap == pytest.approx(seconds, abs=0.1)
        assert record.answer.gaps.longest == pytest.approx(seconds, abs=0.1)


async def test_a_stream_that_stalls_for_longer_is_rescued_as_broken() -> None:
    """After 2 s; the silence up to the first token of the peer is a gap."""
    async with engines(2) as servers, gateway_before(*servers) as (gateway, client):
        uncut = await whole(client, "hello", max_tokens=60)
        server = next(each for each in servers if each.url.endswith(last(gateway).endpoint.id[2:]))
        stall(server, 5.0)
        answer = await read(client, "hello", max_tokens=60)
        assert same(answer, uncut)
        record = last(gateway)
        assert (part_notes.RESCUE.of(record), record.gap_met) == ("rescued", False)
        assert endings(record) == ["primary broken", "rescue completed"]
        assert 1.9 < (record.answer.gaps.longest or 0.0) < 3.0


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


async def test_with_tools_on_offer_silence_is_no_evidence() -> None:
    """A parser of tool calls holds tokens back."""
    async with engines(2) as servers, gateway_before(*servers) as (gateway, client):
        for server in servers:
            stall(server, 5.0)
        await whole(client, "hello", max_tokens=60, tools=[TOOL])
        assert (part_notes.RESCUE.of(last(gateway)), endings(last(gateway))) == ("", ["primary completed"])


async def test_the_silence_before_a_break_is_a_gap() -> None:
    """Though no token has ended it."""
    broken: Script = [STREAM_HEAD + chunk(BEGUN), HANG]
    async with scripted_pool(broken, idle="1500ms", **{**STEADY, "rescue": "off"}) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert answer.error
        record = last(pool.gateway)
        assert (record.end, record.gap_met) == (RequestOutcome.UPSTREAM_BROKE, False)
        assert record.answer.gaps.longest == pytest.approx(1.5, abs=0.1)
