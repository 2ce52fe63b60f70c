"""Endpoints that refuse, die or stay silent: requests move on in time, and the endpoint is avoided."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from policies.types import AttemptKind, AttemptOutcome
from tests.backends.test_failures import WRAPPED
from tests.support.builders import CHAT, calling, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import HANG, LAST_CHUNK, STREAM_HEAD, Pause, Upstream, chunk

pytestmark = pytest.mark.virtual_time

BUDGET = 1.5  # s
ROUTE = {"chat": {"tiers": ["both"], "ttft": {"budget": "1500ms"}}}


def client(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def stream(gateway: Gateway, **more: Any) -> str:
    """Text of a streamed answer."""
    options = {"model": "chat", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], **more}
    async with client(gateway) as sdk:
        chunks = await sdk.chat.completions.create(stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


FAULTS = {
    "accepts and never answers": {"silent": True},
    "sends headers and no token": {"headers_then_silence": True},
    "answers 503": {"status": 503},
    "answers 500": {"status": 500},
    "answers 429": {"status": 429, "retry_after": 5.0},
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_endpoint_fails_no_request_and_is_avoided(fault: str) -> None:
    """The other endpoint answers every request within the budget; the faulty endpoint receives few requests."""
    async with engines(2) as (good, bad), running({"both": engine_pool(good, bad)}, ROUTE) as gateway:
        for name, value in FAULTS[fault].items():
            setattr(bad.faults, name, value)
        for i in range(12):
            assert await stream(gateway, messages=[{"role": "user", "content": f"{i} hello"}])
        records = list(gateway.recorder.recent)
        assert [r.end for r in records] == [RequestOutcome.COMPLETED] * 12
        assert all(r.ttft is not None and r.ttft <= 10 * BUDGET for r in records)
        assert len(bad.requests) <= 6


async def test_a_closed_port_fails_no_request() -> None:
    """A refused connection moves the request to the next candidate at once."""
    async with engines(2) as (good, dead), running({"both": engine_pool(good, dead)}, ROUTE) as gateway:
        await dead.stop()
        for i in range(6):
            assert await stream(gateway, messages=[{"role": "user", "content": f"{i} hello"}])
        assert {r.end for r in gateway.recorder.recent} == {RequestOutcome.COMPLETED}


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    """Without [DONE], and not silently: the SDK raises."""
    async with engines(1) as (engine,), running({"both": engine_pool(engine)}, ROUTE) as gateway:
        engine.faults.cut_after_tokens = 3
        with pytest.raises(openai.APIError):
            await stream(gateway, max_tokens=50)
        (record,) = gateway.recorder.recent
        assert record.end is RequestOutcome.UPSTREAM_BROKE
        assert record.ttft is not None
        assert record.attempts[-1].ending is AttemptOutcome.BROKEN


async def test_nothing_is_retried_after_the_first_token() -> None:
    """A second answer would contradict the tokens already read by the caller."""
    async with engines(2) as (one, two), running({"both": engine_pool(one, two)}, ROUTE) as gateway:
        one.faults.cut_after_tokens = two.faults.cut_after_tokens = 2
        with pytest.raises(openai.APIError):
            await stream(gateway, max_tokens=50)
        assert len(one.requests) + len(two.requests) == 1


async def test_when_every_endpoint_fails_the_error_is_5xx_without_retry() -> None:
    """In the OpenAI envelope; x-should-retry is false, because all endpoints were tried."""
    async with engines(2) as (one, two), running({"both": engine_pool(one, two)}, ROUTE) as gateway:
        one.faults.status = two.faults.status = 500
        with pytest.raises(openai.InternalServerError) as caught:
            await stream(gateway)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert [r.end for r in gateway.recorder.recent] == [RequestOutcome.FAILED]


async def test_a_400_of_an_engine_is_not_retried() -> None:
    """The caller receives the engine's error, and the endpoint stays up."""
    async with engines(2) as (one, two), running({"both": engine_pool(one, two)}, ROUTE) as gateway:
        one.faults.status = two.faults.status = 400
        with pytest.raises(openai.BadRequestError):
            await stream(gateway)
        assert len(one.requests) + len(two.requests) == 1
        assert [r.end for r in gateway.recorder.recent] == [RequestOutcome.REFUSED]
        assert {load.health.value for load in gateway.monitor.loads().values()} == {"up"}


async def test_a_refusal_inside_a_stream_of_messages_is_the_callers_and_the_engine_stays_up() -> None:
    """vLLM 0.32 answers 200 and `internal_error` to streamed Messages that its chat refuses, such as a budget for
    thinking where none is configured: as a failure of the engine it would shut all callers out."""
    event = {"type": "error", "error": {"type": "internal_error", "message": WRAPPED % 400}}
    refusal = b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
    async with (
        Upstream([STREAM_HEAD + chunk(refusal) + LAST_CHUNK]) as engine,
        running({"only": {**pool(engine.url), "backend": "vllm"}}) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as sdk,
    ):
        for _ in range(8):
            with pytest.raises(anthropic.BadRequestError):
                async with sdk.messages.stream(
                    model="chat", max_tokens=5, messages=[{"role": "user", "content": "hello"}]
                ) as events:
                    await events.get_final_message()
        assert {record.end for record in gateway.recorder.recent} == {RequestOutcome.REFUSED}
        assert {load.health.value for load in gateway.monitor.loads().values()} == {"up"}


async def test_a_recovered_endpoint_is_used_again() -> None:
    """A successful probe admits a request; a successful request closes the circuit breaker."""
    async with (
        engines(1) as (engine,),
        running({"both": engine_pool(engine)}, ROUTE, defaults={"scrape": "50ms"}) as gateway,
    ):
        engine.faults.status = 500
        for _ in range(6):
            with pytest.raises(openai.APIStatusError):
                await stream(gateway)
        assert json.dumps([load.health.value for load in gateway.monitor.loads().values()]) != '["up"]'
        engine.faults.status = None
        await eventually(lambda: gateway.decider.any_usable(monotonic()) and _usable(gateway), within=12)
        assert await stream(gateway)


def _usable(gateway: Gateway) -> bool:
    return all(load.health.value != "down" for load in gateway.monitor.loads().values())


async def test_an_error_event_ends_the_stream_without_done() -> None:
    """vLLM sends 200, an error event and [DONE] when its engine dies: the caller receives the event only."""
    token = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    dying = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\ndata: [DONE]\n\n'
    dies = Upstream([STREAM_HEAD + chunk(token), Pause(0.05), chunk(dying) + LAST_CHUNK])
    async with dies as upstream, running({"only": pool(upstream.url)}) as gateway:
        with pytest.raises(openai.APIError, match="EngineCore died"):
            await stream(gateway)
        body = await _raw(gateway)
    assert body == token + dying.partition(b"data: [DONE]")[0]
    assert {record.end for record in gateway.recorder.recent} == {RequestOutcome.UPSTREAM_BROKE}


async def test_an_error_event_before_the_first_token_is_retried() -> None:
    """Another endpoint answers."""
    dying = b'data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}\n\ndata: [DONE]\n\n'
    async with engines(1) as (good,), Upstream([STREAM_HEAD + chunk(dying) + LAST_CHUNK]) as bad:
        pools = {"bad": pool(bad.url), "good": engine_pool(good)}
        async with running(pools) as gateway:
            assert await stream(gateway)
    (record,) = gateway.recorder.recent
    assert [attempt.pool for attempt in record.attempts] == ["bad", "good"]


async def _raw(gateway: Gateway) -> bytes:
    body = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    url = f"{gateway.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        return await reply.read()


async def test_a_hedge_races_a_silent_attempt_and_the_loser_is_aborted() -> None:
    """The first content wins; the losing engine is aborted at once."""
    route = {"chat": {"tiers": ["both"], "ttft": {"budget": "1500ms"}, "hedge": {"max_extra": "100%"}}}
    async with engines(2) as (one, two), running({"both": engine_pool(one, two)}, route) as gateway:
        for i in range(6):  # both have learned predictions
            assert await stream(gateway, messages=[{"role": "user", "content": f"{i} hello"}])
        for engine in (one, two):
            engine.faults.stall_share, engine.faults.stall_seconds = 1.0, 30.0
        before = len(one.requests)
        asking = asyncio.create_task(stream(gateway))
        await eventually(lambda: len(one.requests) + len(two.requests) == 7)
        primary, other = (one, two) if len(one.requests) > before else (two, one)
        other.faults.stall_share = 0.0
        assert await asking
        await eventually(lambda: primary.aborts == 1)
    record = gateway.recorder.recent[-1]
    assert [(attempt.kind, attempt.ending) for attempt in record.attempts] == [
        (AttemptKind.PRIMARY, AttemptOutcome.CANCELLED),
        (AttemptKind.HEDGE, AttemptOutcome.COMPLETED),
    ]
    assert record.ttft_met


LESSONS = 24  # streams


@pytest.mark.parametrize("answers_later", [True, False])
async def test_a_whole_answer_that_an_engine_has_lost_is_asked_of_another(
    answers_later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers what was sent later. Without that, silence says nothing of an answer that is not streamed."""
    monkeypatch.setattr("policies.attempts.patience.LEAST_OVERTAKEN", 0.4)
    async with engines(2) as both, running({"both": engine_pool(*both)}, ROUTE) as gateway:
        for i in range(LESSONS):  # both have a forecast that is no guess
            await stream(gateway, messages=[{"role": "user", "content": f"{i} hello"}])
        for engine in both:
            engine.faults.silent = True
        lost = [asyncio.create_task(whole(gateway, i)) for i in range(4)]
        await eventually(lambda: sum(len(engine.requests) for engine in both) == LESSONS + len(lost))
        for engine in both:
            engine.faults.silent = not answers_later
        ends = monotonic() + (30 if answers_later else 1.5)
        while monotonic() < ends and not all(task.done() for task in lost):
            if answers_later:
                await stream(gateway, messages=[{"role": "user", "content": f"{monotonic()} bye"}])
            await asyncio.sleep(0.02)
        assert [task.done() for task in lost] == [answers_later] * len(lost)
        assert sum(len(engine.requests) for engine in both) >= LESSONS + 2 * len(lost) * answers_later
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)


async def whole(gateway: Gateway, number: int) -> str | None:
    async with client(gateway) as sdk:
        reply = await sdk.chat.completions.create(
            model="chat", max_tokens=5, messages=[{"role": "user", "content": f"{number} tell me"}]
        )
    return reply.choices[0].message.content


async def test_an_error_reply_without_end_is_an_error_at_once() -> None:
    head = b"HTTP/1.1 500 X\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    async with (
        Upstream([head + chunk(b"no " * 50_000), HANG]) as upstream,
        running({"only": pool(upstream.url)}) as gateway,
        calling(gateway.url) as caller,
    ):
        assert (await caller.whole(post(CHAT)))[0] == 502
