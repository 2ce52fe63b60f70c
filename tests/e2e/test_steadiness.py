"""On a route with `gap` and `rescue`, a stream that falls behind moves to a peer that is expected to be sooner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import openai
import pytest

from gateway.app import Gateway
from gateway.observe.record import Record, RequestOutcome
from lab.servers.simulated_server import SimulatedServer
from policies.fleet.caller_evidence import SLOW_FOR
from policies.types import Health
from tests.support.gateways import running
from tests.support.rescued_answers import (
    END,
    FINISH,
    RESCUE,
    Answer,
    Scripted,
    holder,
    last,
    read,
    same,
    scripted,
    scripted_pool,
    whole,
)
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import HANG, LAST_CHUNK, RESET, STREAM_HEAD, Pause, Script, chunk, reply

pytestmark = pytest.mark.virtual_time

MOVES = int(os.environ.get("MOVES", "12"))
STEADY: Mapping[str, Any] = {"gap": {"budget": "1s"}, "tpot": {"budget": "50ms"}}
LONG: Mapping[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
DRIP = 75.0  # times 6.7 ms a token: a tenth of the pace that the route promises


@asynccontextmanager
async def gateway_before(*servers: SimulatedServer, **route: Any) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    routes = {"chat": {**RESCUE["chat"], **STEADY, **route}}
    async with (
        running({"p": engine_pool(*servers)}, routes) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield gateway, client


def stall(server: SimulatedServer, after: int, seconds: float = 5.0) -> None:
    faults = server.faults
    faults.stall_share, faults.stall_after_tokens, faults.stall_seconds = 1.0, after, seconds


async def drip(servers: list[SimulatedServer], asked: asyncio.Task[Answer]) -> None:
    """Slow the engine of an answer down in the middle of it."""
    await eventually(lambda: any(server.engine.running for server in servers))
    faults = next(server for server in servers if server.engine.running).faults
    await asyncio.sleep(0.1)
    faults.slow = DRIP
    await asyncio.wait([asked])
    faults.slow = 1.0


def endings(record: Record) -> list[str]:
    return [f"{each.kind.value} {each.ending.value}" for each in record.attempts]


async def moved(
    gateway: Gateway, client: openai.AsyncOpenAI, servers: list[SimulatedServer], fault: str, after: int = 10
) -> tuple[Answer, Answer]:
    """The first answer that has moved, and the same without a fault. A peer may be asked first: then nothing moves."""
    await asyncio.sleep(2 * SLOW_FOR)  # since an engine was left last
    for number in range(20):
        uncut = await whole(client, f"tell me {number}", **LONG)
        server = holder(gateway, servers)
        if fault == "stall":
            stall(server, after)
        asked = asyncio.create_task(read(client, f"tell me {number}", **LONG))
        if fault == "drip":
            await drip(servers, asked)
        answer = await asked
        server.faults.stall_share = 0.0
        if last(gateway).rescue:
            return answer, uncut
    raise AssertionError("no answer has moved")


# --------------------------------------------------------------------------- moved


@pytest.mark.parametrize("fault", ["stall", "drip"])
async def test_a_stream_that_falls_behind_is_continued_by_a_peer(fault: str) -> None:
    """Whole and once, within the promise of the longest silence, and without blame: the engine that was slow is up."""
    async with engines(2) as servers, gateway_before(*servers) as (gateway, client):
        answer, uncut = await moved(gateway, client, servers, fault)
        assert same(answer, uncut)
        record = last(gateway)
        assert (record.rescue, record.end, record.gap_met) == ("moved", RequestOutcome.COMPLETED, True)
        assert endings(record) == ["primary outpaced", "rescue completed"]
        assert answer.longest_gap == pytest.approx(record.gaps.longest, abs=0.1)
        loads = gateway.fleet.snapshot_for(record.tenant, record.arrival + record.total).loads
        assert [load.health for load in loads.values()] == [Health.UP, Health.UP]
        assert gateway.proxy.dispatcher.retries.retrying == 0


async def test_an_answer_that_moves_anywhere_is_whole() -> None:
    """No token is lost or there twice, and usage is that of the whole."""
    random = Random(5)
    async with engines(2) as servers, gateway_before(*servers) as (gateway, client):
        for _ in range(MOVES):
            answer, uncut = await moved(gateway, client, servers, "stall", after=random.randrange(1, 60))
            assert same(answer, uncut)
            assert last(gateway).rescue == "moved"
            assert last(gateway).output_tokens == uncut.usage.completion_tokens


async def test_a_route_without_gap_leaves_a_silent_stream_as_before() -> None:
    """After 2 s, as broken; a slow stream stays."""
    async with engines(2) as servers, gateway_before(*servers, gap=None) as (gateway, client):
        answer, uncut = await moved(gateway, client, servers, "stall")
        assert same(answer, uncut)
        record = last(gateway)
        assert (record.rescue, record.gap_met) == ("rescued", None)
        assert endings(record) == ["primary broken", "rescue completed"]
        assert (record.gaps.longest or 0.0) > 1.9  # up to the first token of the peer


# --------------------------------------------------------------------------- nothing moves


@pytest.mark.parametrize("fault", ["stall", "drip"])
async def test_where_all_engines_are_slow_nothing_moves(fault: str) -> None:
    """Several answers at a time: each shows that the peer of the other is no sooner."""
    async with engines(2) as servers, gateway_before(*servers) as (gateway, client):
        prompts = [f"tell me {number}" for number in range(8)]
        uncut = await asyncio.gather(*(whole(client, each, **LONG) for each in prompts))
        seen = len(gateway.recorder.recent)
        asked = [asyncio.create_task(read(client, each, **LONG)) for each in prompts]
        await eventually(lambda: all(server.engine.running > 1 for server in servers))
        await asyncio.sleep(0.1)
        for server in servers:
            server.faults.slow = DRIP if fault == "drip" else 1e3
        if fault == "stall":
            await asyncio.sleep(5.0)
            for server in servers:
                server.faults.slow = 1.0
        answers = await asyncio.gather(*asked)
        assert all(same(answer, before) for answer, before in zip(answers, uncut, strict=True))
        records = [*gateway.recorder.recent][seen:]
        assert [(record.rescue, len(record.attempts)) for record in records] == [("", 1)] * len(prompts)


async def test_without_rescue_a_gap_is_measured_alone() -> None:
    async with engines(2) as servers, gateway_before(*servers, rescue="off") as (gateway, client):
        for server in servers:
            stall(server, after=10)
        answer = await whole(client, "hello", max_tokens=60)
        record = last(gateway)
        assert (record.rescue, record.gap_met, endings(record)) == ("", False, ["primary completed"])
        assert answer.longest_gap == pytest.approx(5.0, abs=0.1)
        assert record.gaps.longest == pytest.approx(5.0, abs=0.1)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


async def test_with_tools_on_offer_silence_is_no_evidence() -> None:
    """A parser of tool calls holds tokens back."""
    async with engines(2) as servers, gateway_before(*servers) as (gateway, client):
        for server in servers:
            stall(server, after=10)
        await whole(client, "hello", max_tokens=60, tools=[TOOL])
        assert (last(gateway).rescue, endings(last(gateway))) == ("", ["primary completed"])


async def test_the_last_attempt_is_kept_for_a_break() -> None:
    async with engines(2) as servers, gateway_before(*servers, max_attempts=2) as (gateway, client):
        stall(servers[0], after=10, seconds=1.5)
        stall(servers[1], after=10, seconds=1.5)
        await whole(client, "hello", max_tokens=60)
        assert endings(last(gateway)) == ["primary completed"]


# --------------------------------------------------------------------------- the stream goes on

WORDS = ("one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")
BEGUN = scripted({"role": "assistant", "content": ""}, *({"content": each} for each in WORDS))
REST = (chunk(scripted({"content": " eleven"}) + FINISH.replace(b'"2"', b'"1"') + b"data: [DONE]\n\n"), LAST_CHUNK)
STALLED: Script = [STREAM_HEAD + chunk(BEGUN), Pause(4.0), *REST]
PEERS: Mapping[str, Script] = {
    "refuses to continue": [reply(b'{"error": {"message": "no"}}', "400 Bad Request")],
    "fails": [reply(b'{"error": {"message": "oh"}}', "500 Internal Server Error")],
    "dies": [RESET],
    "is silent": [HANG],
    "begins anew in other words": [
        STREAM_HEAD + chunk(scripted(*({"content": each} for each in (*WORDS[:5], " 6")))),
        HANG,
    ],
    "begins anew and stops": [STREAM_HEAD + chunk(scripted(*({"content": each} for each in WORDS[:5]))), HANG],
    "sends an error event": [STREAM_HEAD + chunk(b'data: {"error": {"message": "x"}}\n\n'), HANG],
}


@pytest.mark.parametrize("case", PEERS)
async def test_a_stream_goes_on_where_the_peer_does_not_continue_it(case: str) -> None:
    """A slow answer is never lost to a peer."""
    async with steady_pool(STALLED, PEERS[case]) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert (answer.text, answer.finish_reasons, answer.error) == ("".join((*WORDS, " eleven")), ["stop"], "")
        assert (len(answer.ids), answer.roles) == (1, 1)
        record = last(pool.gateway)
        assert (record.rescue, record.end, record.gap_met) == ("stayed", RequestOutcome.COMPLETED, False)
        assert record.attempts[-1].kind.value == "primary"
        assert pool.gateway.proxy.dispatcher.retries.retrying == 0


async def test_an_event_that_was_torn_when_the_stream_was_held_is_whole() -> None:
    """The rest of it comes once the stream goes on."""
    event = scripted({"content": " eleven"})
    torn: Script = [STREAM_HEAD + chunk(BEGUN + event[:20]), Pause(4.0), chunk(event[20:]), *END]
    async with steady_pool(torn, PEERS["dies"]) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert (answer.text, answer.error) == ("".join((*WORDS, " eleven")), "")
        assert last(pool.gateway).rescue == "stayed"


async def test_a_peer_that_begins_anew_in_the_same_words_is_waited_for_up_to_the_first_new_word() -> None:
    """What the caller has read is skipped."""
    again = [STREAM_HEAD + chunk(BEGUN), Pause(0.1), chunk(scripted({"content": " 11"})), *END]
    async with steady_pool(STALLED, again) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert (answer.text, answer.error) == ("".join((*WORDS, " 11")), "")
        assert last(pool.gateway).rescue == "moved"


async def test_a_caller_that_leaves_while_a_peer_is_asked_cancels_both() -> None:
    async with steady_pool(STALLED, PEERS["is silent"]) as pool:
        task = asyncio.create_task(read(pool.client, "hello"))
        await eventually(lambda: len(pool.answered) == 2)
        task.cancel()
        await eventually(lambda: pool.gateway.recorder.recent)
        assert last(pool.gateway).end is RequestOutcome.CLIENT_GONE
        assert sorted(endings(last(pool.gateway))) == ["primary cancelled", "rescue cancelled"]
        await eventually(lambda: sum(engine.hangups for engine in pool.engines) == 2)


async def test_the_silence_before_a_break_is_a_gap() -> None:
    """Though no token has ended it."""
    broken: Script = [STREAM_HEAD + chunk(BEGUN), HANG]
    async with scripted_pool(broken, idle="1500ms", **{**STEADY, "rescue": "off"}) as pool:
        answer = await read(pool.client, "hello", max_tokens=60)
        assert answer.error
        record = last(pool.gateway)
        assert (record.end, record.gap_met) == (RequestOutcome.UPSTREAM_BROKE, False)
        assert record.gaps.longest == pytest.approx(1.5, abs=0.1)


@asynccontextmanager
async def steady_pool(*scripts: Script) -> AsyncIterator[Scripted]:
    async with scripted_pool(*scripts, idle="30s", **STEADY) as pool:
        yield pool
