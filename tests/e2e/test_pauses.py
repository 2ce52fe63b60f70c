"""A pause of the gateway's own process (SIGSTOP, a frozen machine, a held event loop) tells nothing of an endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.app import Gateway
from lab.virtual_time import VirtualLoop
from policies.fleet.endpoint_state import EndpointStatistics
from tests.support.builders import CHAT, DONE, FINISH, calling, get, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Pause, Received, Script, ScriptedEngine, chunk, reply

pytestmark = pytest.mark.virtual_time

STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":20}}\n\n'
PAUSED = 12.0  # s, below the patience of callers of the same clock


def word(number: int) -> bytes:
    return chunk(b'data: {"choices":[{"index":0,"delta":{"content":"word %d "}}]}\n\n' % number)


def answer(before: float = 0.05) -> Script:
    """Twenty tokens, 20 ms apart."""
    words = [step for number in range(20) for step in (word(number), Pause(0.02))]
    return [Pause(before), STREAM_HEAD, *words, chunk(FINISH + USAGE + DONE) + LAST_CHUNK]


def pause() -> None:
    """The clock goes on, and nothing of this process does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.clock.now += PAUSED


async def streamed(gateway: Gateway, body: dict[str, Any] = STREAM) -> None:
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post(body))
        assert status == 200
        await caller.chunks()


def learned(gateway: Gateway) -> EndpointStatistics:
    loop = asyncio.get_running_loop()
    [endpoint] = gateway.monitor.loads()
    return gateway.fleet.view.statistics(endpoint, loop.time())


@pytest.mark.parametrize("after", [0.02, 0.3], ids=["before the first token", "in the middle of the answer"])
@pytest.mark.parametrize("backend", ["vllm", "openai"])
async def test_no_pace_and_no_time_is_learned_from_a_pause(backend: str, after: float) -> None:
    """Forecasts, error quantiles and the breaker are what they were; the answer itself is whole."""
    seen = list[Received]()
    async with ScriptedEngine(answer(), answered=seen) as engine:
        own: dict[str, Any] = {"base_url": engine.url, "endpoints": []} if backend == "openai" else {}
        pools = {"only": {**pool(engine.url, backend=backend), **own}}
        async with running(pools) as gateway:
            for _ in range(20):
                await streamed(gateway)
            before = learned(gateway)
            for _ in range(3):
                asking = asyncio.create_task(streamed(gateway))
                await asyncio.sleep(after)
                pause()
                await asking
            await eventually(lambda: len(gateway.recorder.recent) == 23)
            found, record = learned(gateway), last(gateway)
            page = (await get(gateway.admin_url, "/metrics"))[2].decode()
    assert found.error == pytest.approx(before.error, rel=0.3)
    assert found.tpot == pytest.approx(before.tpot, rel=0.3)
    assert found.breaker == "closed"
    assert found.why in ("", "its load is not known: its /metrics has no series of vllm")
    if after > 0.1:
        assert record.answer.tpot is not None
        assert record.answer.tpot < 0.2
        assert record.answer.gaps.longest is None or record.answer.gaps.longest < 5.0
        assert 'firsttoken_long_gaps_total{pool="only",route="chat"} ' not in page
    else:
        assert 'firsttoken_ttft_prediction_error_seconds_bucket{le="5.0",pool="only"} 20.0' in page
        assert 'firsttoken_ttft_prediction_error_seconds_bucket{le="+Inf",pool="only"} 20.0' in page


async def test_a_whole_answer_teaches_no_pace_either() -> None:
    body = {**CHAT, "max_tokens": 20}
    usage = {"prompt_tokens": 7, "completion_tokens": 20}
    whole = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage}
    script: Script = [Pause(0.4), reply(json.dumps(whole).encode(), "200 OK", "content-type: application/json")]
    async with ScriptedEngine(script, answered=[]) as engine:
        routes = {"chat": {"tiers": ["only"], "upstream_stream": "off", "total": {"budget": "60s"}}}
        async with running({"only": pool(engine.url, backend="vllm")}, routes) as gateway:

            async def ask() -> None:
                async with calling(gateway.url) as caller:
                    assert (await caller.whole(post(body)))[0] == 200

            for _ in range(10):
                await ask()
            before = learned(gateway)
            asking = asyncio.create_task(ask())
            await asyncio.sleep(0.1)
            pause()
            await asking
            await ask()
            record = last(gateway)
            found = learned(gateway)
    assert found.tpot == pytest.approx(before.tpot, rel=0.3)
    assert record.placed.total_p90 is None or record.placed.total_p90 < 5.0


async def test_an_engine_that_is_slow_without_a_pause_is_learned_as_slow() -> None:
    """The same seconds, with the event loop running."""
    async with ScriptedEngine(answer(), answered=[]) as engine, ScriptedEngine(answer(PAUSED), answered=[]) as slow:
        async with running({"only": pool(engine.url, backend="vllm")}) as gateway:
            for _ in range(12):
                await streamed(gateway)
            quick = learned(gateway)
        async with running({"only": pool(slow.url, backend="vllm")}) as gateway:
            for _ in range(12):
                await streamed(gateway)
            assert last(gateway).placed.ttft_p50 is not None
            assert (last(gateway).placed.ttft_p50 or 0.0) > 5.0
    assert quick.samples == 12
