"""An engine's own limit of requests (vLLM's --max-num-queued-reqs, SGLang's --max-queued-requests) is a cap."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from backends.error_body import read_error
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, calling, get, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import (
    GATE,
    LAST_CHUNK,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedEngine,
    Upstream,
    chunk,
    reply,
)

pytestmark = pytest.mark.virtual_time

STREAM = {**CHAT, "stream": True}
JSON = "content-type: application/json"
HELD: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]


def refusal(status: str, message: str, kind: str) -> Script:
    body = {"error": {"message": message, "type": kind, "param": None, "code": int(status[:3])}}
    return [reply(json.dumps(body).encode(), status, JSON)]


VLLM_429 = refusal("429 Too Many Requests", "Too many requests are waiting or running", "TooManyRequestsError")
VLLM_503 = refusal("503 Service Unavailable", "The queue is full: 1 requests are unfinished", "ServiceUnavailableError")
SGLANG = refusal("503 Service Unavailable", "The request queue is full.", "SERVICE_UNAVAILABLE")
SGLANG_EVENT = b'data: {"error":{"message":"The request queue is full.","type":"ServiceUnavailable","code":503}}\n\n'
REFUSALS = {
    "vllm 429": ("vllm", VLLM_429),
    "vllm 503": ("vllm", VLLM_503),
    "sglang": ("sglang", SGLANG),
    "sglang, in a stream": ("sglang", [STREAM_HEAD + chunk(SGLANG_EVENT) + LAST_CHUNK]),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_beside_running_requests_teaches_a_cap(name: str) -> None:
    """The next request goes to the next tier at once, though the engine is the first choice; `why` says it."""
    backend, refused = REFUSALS[name]
    seen = list[Received]()
    async with ScriptedEngine(HELD, refused, [STREAMED], answered=seen) as engine, Upstream([STREAMED]) as api:
        pools = {"own": pool(engine.url, backend=backend), "api": pool(api.url)}
        async with (
            running(pools, {"chat": {"tiers": ["own", "api"]}}) as gateway,
            calling(gateway.url) as first,
            calling(gateway.url) as second,
        ):
            await first.ask(post(STREAM))
            pools_used = []
            for _ in range(3):
                _, head = await second.ask(post(STREAM))
                pools_used.append((head["x-firsttoken-pool"], head["x-firsttoken-attempts"]))
                await second.chunks()
            assert pools_used == [("api", "2"), ("api", "1"), ("api", "1")]
            assert len(seen) == 2
            fleet = (await get(gateway.admin_url, "/fleet"))[2].decode()
            assert "the engine refused more, by its own limit" in fleet
            engine.proceed()
            await first.chunks()
            _, head = await second.ask(post(STREAM))
            assert head["x-firsttoken-pool"] == "own"
            await second.chunks()


@pytest.mark.parametrize("name", REFUSALS)
async def test_alone_it_is_told_with_the_forecast(name: str) -> None:
    """No account has a rate limit there."""
    backend, refused = REFUSALS[name]
    async with ScriptedEngine(refused, answered=[]) as engine:
        route = {"tiers": ["own"], "max_attempts": 1}
        pools = {"own": pool(engine.url, backend=backend)}
        async with running(pools, {"chat": route}) as gateway, calling(gateway.url) as caller:
            status, head, raw = await caller.whole(post(STREAM))
    said = read_error(json.loads(raw))
    assert (status, said.message.startswith("The engine is at the limit of its own queue: ")) == (503, True)
    assert "rate limit" not in said.message
    assert float(head["retry-after"]) > 0
    assert int(head["x-firsttoken-ttft-p90-ms"]) >= int(head["x-firsttoken-ttft-p50-ms"]) >= 0


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({"n": 64}, VLLM_429),
        ({}, refusal("429 Too Many Requests", "Too many prompt tokens are queued", "TooManyRequestsError")),
    ],
)
async def test_what_depends_on_the_request_teaches_no_cap(more: dict[str, Any], refused: Script) -> None:
    """One caller's 64 answers, or long prompt, take nothing from others: a minute of a cap that is none."""
    seen = list[Received]()
    async with ScriptedEngine(HELD, refused, [STREAMED], answered=seen) as engine, Upstream([STREAMED]) as api:
        pools = {"own": pool(engine.url, backend="vllm"), "api": pool(api.url)}
        async with (
            running(pools, {"chat": {"tiers": ["own", "api"]}}) as gateway,
            calling(gateway.url) as first,
            calling(gateway.url) as second,
        ):
            await first.ask(post(STREAM))
            _, head = await second.ask(post({**STREAM, **more}))
            assert head["x-firsttoken-pool"] == "api"
            await second.chunks()
            await asyncio.sleep(5.0)  # virtual: busy for its caller meanwhile
            _, head = await second.ask(post(STREAM))
            assert head["x-firsttoken-pool"] == "own"
            engine.proceed()


LISTED = {"model": "chat", "input": ["a text"] * 64}


@pytest.mark.parametrize("first", [post({**STREAM, "n": 64}), post(LISTED, path="/v1/embeddings")], ids=["n", "texts"])
async def test_a_refusal_beside_a_request_that_counts_as_many_teaches_no_cap(first: bytes) -> None:
    """The engine is full of one caller's answers; one request there is no cap for all."""
    seen = list[Received]()
    async with ScriptedEngine(HELD, VLLM_429, [STREAMED], answered=seen) as engine, Upstream([STREAMED]) as api:
        pools = {"own": pool(engine.url, backend="vllm"), "api": pool(api.url)}
        async with (
            running(pools, {"chat": {"tiers": ["own", "api"]}}) as gateway,
            calling(gateway.url) as many,
            calling(gateway.url) as single,
        ):
            many.writer.write(first)
            await eventually(lambda: seen)
            _, head = await single.ask(post(STREAM))
            assert head["x-firsttoken-pool"] == "api"
            await single.chunks()
            await asyncio.sleep(5.0)  # virtual: busy for its caller meanwhile
            _, head = await single.ask(post(STREAM))
            assert head["x-firsttoken-pool"] == "own"
            engine.proceed()


KEYS = [{"name": name, "sha256": sha256(name.encode()).hexdigest()} for name in "abc"]


@pytest.mark.parametrize(("refused", "third"), [("a", "own"), ("ab", "api")], ids=["one caller", "two callers"])
async def test_a_cap_counts_for_all_once_two_callers_have_met_with_it(refused: str, third: str) -> None:
    """What one caller's request has brought back takes nothing from another."""
    seen, scripts = list[Received](), [HELD, *[VLLM_429] * len(refused), [STREAMED]]
    async with (
        ScriptedEngine(*scripts, answered=seen) as engine,
        Upstream([STREAMED]) as api,
        AsyncExitStack() as stack,
    ):
        pools = {"own": pool(engine.url, backend="vllm"), "api": pool(api.url)}
        routes = {"chat": {"tiers": ["own", "api"]}}
        gateway = await stack.enter_async_context(running(pools, routes, keys=KEYS))
        used = []
        for key in ("a", *refused, "c", "a"):
            caller = await stack.enter_async_context(calling(gateway.url))
            _, head = await caller.ask(post(STREAM, f"authorization: Bearer {key}"))
            used.append(head["x-firsttoken-pool"])
            if len(used) > 1:
                await caller.chunks()
        assert used == ["own", *["api"] * len(refused), third, "api"]
        [own, _] = json.loads((await get(gateway.admin_url, "/fleet"))[2])
        assert {(each["what"], each["callers"]) for each in own["believed"]} >= {("cap of 1 requests", len(refused))}
        engine.proceed()


async def test_many_callers_of_a_capped_engine_are_all_answered() -> None:
    """Behind a real limit, whole answers and streams: those above it wait in the gateway's own queue."""
    async with engines(1) as servers:
        servers[0].engine.profile = replace(servers[0].profile, max_queued_requests=3)
        pools = {"only": engine_pool(*servers)}
        routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "120s"}}}
        async with running(pools, routes) as gateway:

            async def one(i: int) -> int:
                await asyncio.sleep(i * 0.2)
                async with calling(gateway.url) as caller:
                    status, head = await caller.ask(post({**STREAM, "max_tokens": 60}))
                    if status == 200:
                        await caller.chunks()
                    else:
                        await caller.body(head)
                return status

            found = await asyncio.gather(*map(one, range(24)))
            await eventually(lambda: len(gateway.recorder.recent) == 24)
    refused = sum(len(record.attempts) - 1 for record in gateway.recorder.recent)
    assert (found.count(200), refused <= 6) == (24, True)
