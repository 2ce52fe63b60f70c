"""Quotas: OpenAI's client, several gateways and workers with one quota, and Redis outages."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest
from openai import AsyncOpenAI, RateLimitError

from gateway.app import Gateway
from gateway.cluster.redis_client import TIMEOUT
from gateway.parts.quotas.quotas import DOUBTED, Admission
from gateway.parts.replicas.part import ReplicasPart
from gateway.tokenize.tokenizers import encoder
from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, USAGE, WHOLE, calling, post
from tests.support.gateways import pool, running
from tests.support.redis import RedisServer, TcpProxy, redis_server
from tests.support.served import serving
from tests.support.simulated import eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

WEB = "authorization: Bearer sk-web"
ASK: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
BACK = 30.0  # s
MINUTE = f"firsttoken:{{web}}:{hashlib.sha256(b'sk-web').hexdigest()[:8]}:minute"  # in Redis


def key(**limits: Any) -> list[dict[str, Any]]:
    return [{"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest(), **limits}]


@asynccontextmanager
async def sdk(url: str, retries: int = 2) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-web", max_retries=retries) as client:
        yield client


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as made:
        yield made


async def count_statuses(url: str, how_many: int, connections: int = 10) -> Counter[int]:
    """Sends `how_many` requests over so many connections; counts status codes."""

    async def some(count: int) -> list[int]:
        async with calling(url) as caller:
            return [(await caller.whole(post(CHAT, WEB)))[0] for _ in range(count)]

    seen = await asyncio.gather(*(some(how_many // connections) for _ in range(connections)))
    return Counter(chain.from_iterable(seen))


# --------------------------------------------------------------------------- OpenAI's client


async def test_the_sdk_retries_after_retry_after_ms_and_succeeds() -> None:
    """A second of `retry-after-ms`, within which the other request ends."""
    stream = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(TOKEN + FINISH + USAGE + DONE) + LAST_CHUNK]
    async with (
        Upstream(stream, [reply(WHOLE)]) as upstream,
        running({"only": pool(upstream.url)}, keys=key(concurrent_requests=1)) as gateway,
        sdk(gateway.url) as client,
    ):
        first = await client.chat.completions.create(**ASK, stream=True)
        second = asyncio.create_task(client.chat.completions.create(**ASK))
        await eventually(lambda: gateway.part(Admission).refused.of["web", "concurrent"].value == 1)
        upstream.proceed()
        assert [event async for event in first]
        assert (await second).choices


@pytest.mark.parametrize(
    ("limits", "code", "message"),
    [
        ({"monthly_cost_usd": 0.000001}, "rate_limit_exceeded", "too large: .* calendar month"),
        ({"tokens_per_minute": 5}, "rate_limit_exceeded", "too large"),
    ],
)
async def test_the_sdk_does_not_retry_refusals_that_waiting_cannot_fix(
    limits: dict[str, Any], code: str, message: str
) -> None:
    price = {"input": 1.0, "output": 1.0}
    async with (
        Upstream([reply(WHOLE)]) as upstream,
        running({"only": pool(upstream.url, price=price)}, keys=key(**limits)) as gateway,
        sdk(gateway.url) as client,
    ):
        with pytest.raises(RateLimitError, match=message) as refused:
            await client.chat.completions.create(**ASK)
        assert refused.value.code == code
        assert len(gateway.recorder.recent) == 1
        assert not upstream.requests


# --------------------------------------------------------------------------- several gateways


async def test_a_prompt_that_no_engine_reports_is_settled_by_its_count() -> None:
    """A caller who leaves before the usage pays for the prompt, not for an estimate of it."""
    first, second = (inspect.getsource(module) for module in (argparse, inspect))
    left = [STREAM_HEAD + chunk(TOKEN), GATE]
    async with (
        Upstream([STREAMED], left) as upstream,
        running({"only": pool(upstream.url)}, keys=key(tokens_per_minute=10**6)) as gateway,
    ):
        for text in (first, second):
            async with calling(gateway.url) as caller:
                messages = [{"role": "user", "content": text[:100_000]}]
                await caller.ask(post({**CHAT, "stream": True, "messages": messages}, WEB))
                await caller.reader.readuntil(TOKEN)
                await eventually(lambda: not gateway.proxy.decider.counts.bytes)
        await eventually(lambda: len(gateway.recorder.recent) == 2)
        settled = max(gateway.recorder.recent, key=lambda record: record.arrival)
        counted = encoder("o200k_base").count(second[:100_000])
        assert settled.placed.prompt_tokens != pytest.approx(counted, rel=0.0005)
        assert settled.attempts[0].tokens == pytest.approx(counted + 8, abs=3)  # template and answer


def prompt(words: Iterable[str], size: int = 20_000) -> dict[str, Any]:
    """A new prompt of at most `size` bytes, of one segment after another."""
    return {**CHAT, "stream": True, "max_tokens": 1, "messages": [{"role": "user", "content": " ".join(words)[:size]}]}


async def test_a_key_that_has_taught_the_estimate_wrong_gets_no_burst_beyond_its_tokens() -> None:
    """Counts of long common words teach that a token has 13 bytes; a burst of other words has one in two bytes. It got
    3.4 times the tokens of the key, as no prompt was counted before all were sent."""
    random, limit = Random(1), 200_000
    common = ["responsibility", "international", "organization", "administration", "understanding", "information"]
    burst = [prompt("".join(random.choices("qxzjkvwybfpmgh", k=15)) for _ in range(1250)) for _ in range(60)]
    held = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
    async with (
        Upstream(held) as upstream,
        running({"only": pool(upstream.url)}, keys=key(tokens_per_minute=limit)) as gateway,
    ):
        for _ in range(20):
            async with calling(gateway.url) as caller:
                taught = prompt(random.choices(common, k=1500))
                assert (await caller.whole(post(taught, WEB, path="/v1/messages/count_tokens")))[0] == 200
        async with AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(calling(gateway.url)) for _ in burst]
            asked = (caller.ask(post(each, WEB)) for caller, each in zip(callers, burst, strict=True))
            answers = await asyncio.gather(*asked)
            assert gateway.part(Admission).doubts.total() > 0
        sent = [each for each, (status, _) in zip(burst, answers, strict=True) if status == 200]
        tokens = sum(encoder("o200k_base").count(each["messages"][0]["content"]) for each in sent)
        assert 0.8 * limit < tokens <= (1 + DOUBTED) * limit
        await eventually(lambda: not gateway.recorder.live)
        assert not gateway.part(Admission).doubts


async def test_two_gateways_with_one_redis_have_one_quota() -> None:
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream([reply(WHOLE)]))
        server = await stack.enter_async_context(redis_server())
        pools, keys = {"only": pool(upstream.url)}, key(requests_per_minute=100)
        gateways = [
            await stack.enter_async_context(running(pools, keys=keys, state={"redis": server.url})) for _ in range(2)
        ]
        for gateway in gateways:
            await connected(gateway)
            gateway.part(ReplicasPart).client.timeout = 30.0  # a busy machine is no Redis that is down
        seen = sum(await asyncio.gather(*(count_statuses(gateway.url, 150) for gateway in gateways)), Counter())
    assert seen == {200: 100, 429: 200}


@pytest.mark.parametrize("state", ["memory", "redis"])
async def test_two_workers_have_one_quota(state: str, tmp_path: Path, server: RedisServer) -> None:
    """On any worker. In memory, simultaneous requests may exceed the quota by one."""
    async with Upstream([reply(WHOLE)]) as upstream:
        config = tmp_path / "f.yaml"
        config.write_text(
            "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
            f"pools: {{only: {{backend: compatible, model: served, endpoints: [{upstream.url}]}}}}\n"
            "routes: {chat: {tiers: [only]}}\ntelemetry: {access_log: off}\n"
            f"keys: [{{name: web, sha256: {key()[0]['sha256']}, requests_per_minute: 50}}]\n"
            + (f"state: {{redis: '{server.url}'}}\n" if state == "redis" else "")
        )
        async with serving(config, "--workers", "2") as served:
            if state == "redis":
                await members(server, 2)
            seen = await count_statuses(served.url, 120, connections=12)
    assert 50 <= seen[200] <= 51
    assert seen[200] + seen[429] == 120


async def members(server: RedisServer, count: int) -> None:
    """Waits until `count` processes have registered in Redis."""
    async with asyncio.timeout(BACK), server.client() as client:
        while await client.zcard("firsttoken:members") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# --------------------------------------------------------------------------- Redis outages


async def connected(gateway: Gateway) -> None:
    link = gateway.part(ReplicasPart).client
    await eventually(lambda: link.up, BACK)


class Caller:
    """Sends requests in sequence and collects statuses and durations."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: list[tuple[int, float]] = []
        self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        async with calling(self.url) as caller:
            while True:
                began = monotonic()
                status, _, _ = await caller.whole(post(CHAT, WEB))
                self.seen.append((status, monotonic() - began))
                await asyncio.sleep(0.01)

    async def more(self, count: int) -> None:
        before = len(self.seen)
        await eventually(lambda: len(self.seen) >= before + count or self._task.done(), BACK)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def shared(url: str, **limits: Any) -> AsyncIterator[tuple[Gateway, Caller]]:
    async with (
        Upstream([reply(WHOLE)]) as upstream,
        running({"only": pool(upstream.url)}, keys=key(**limits), state={"redis": url}) as gateway,
    ):
        caller = Caller(gateway.url)
        try:
            yield gateway, caller
        finally:
            await caller.stop()
            assert {status for status, _ in caller.seen} == {200}


@pytest.mark.parametrize("fault", ["killed", "frozen", "slow"])
async def test_no_request_fails_without_redis_and_few_wait(
    fault: str, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a line for each outage and a line for each recovery."""
    caplog.set_level(logging.INFO, "firsttoken")
    async with TcpProxy(server.port) as way, shared(way.url, requests_per_minute=10**6) as (gateway, caller):
        link = gateway.part(ReplicasPart).client
        await connected(gateway)
        await caller.more(20)
        waited = len(caller.seen)
        if fault == "killed":
            server.kill()
        elif fault == "frozen":
            server.freeze()
        else:
            way.delay = 0.1
        await eventually(lambda: not link.up)
        before = link.errors
        await caller.more(50)
        assert not link.up
        assert link.errors - before <= 3  # probes only: no request asks
        assert sum(took > TIMEOUT * 0.9 for _, took in caller.seen[waited:]) <= 25
        if fault == "killed":
            await server.start()
        elif fault == "frozen":
            server.thaw()
        way.delay = 0.0
        await eventually(lambda: link.up, BACK)
        await caller.more(20)
    messages = [record.getMessage() for record in caplog.records if "redis" in record.getMessage()]
    assert "connected" in messages[0]
    assert "reconnected" in messages[2]
    assert ["unavailable" in message for message in messages] == [number % 2 == 1 for number in range(len(messages))]
    assert not any(record.exc_info for record in caplog.records)


async def test_a_gateway_starts_without_redis_and_connects_later(server: RedisServer) -> None:
    server.kill()
    async with shared(server.url, requests_per_minute=10**6) as (gateway, caller):
        await caller.more(20)
        await server.start()
        await connected(gateway)
        await caller.more(20)
        async with server.client() as client:
            assert await client.hlen(MINUTE) > 0


async def test_without_redis_each_gateway_admits_its_share(server: RedisServer) -> None:
    """Two gateways see each other before the outage; earlier requests count, and use is reported after the recovery."""
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream([reply(WHOLE)]))
        pools, keys = {"only": pool(upstream.url)}, key(requests_per_minute=60)
        gateways = [
            await stack.enter_async_context(running(pools, keys=keys, state={"redis": server.url})) for _ in range(2)
        ]
        for gateway in gateways:
            await connected(gateway)
            quotas = gateway.part(ReplicasPart).quotas
            quotas._came_up.set()  # count members again
            await eventually(lambda quotas=quotas: quotas.members == 2, BACK)  # type: ignore[misc]
        await count_statuses(gateways[0].url, 10)
        server.freeze()
        for gateway in gateways:
            await eventually(lambda gateway=gateway: not gateway.part(ReplicasPart).client.up)  # type: ignore[misc, union-attr]
        seen = await asyncio.gather(*(count_statuses(gateway.url, 40) for gateway in gateways))
        assert [one[200] for one in seen] == [20, 30]
        server.thaw()
        for gateway in gateways:
            await connected(gateway)
        async with server.client() as client:

            async def reported_requests() -> int:
                found = await client.hgetall(MINUTE)
                return sum(int(count) for field, count in found.items() if field.startswith("r"))

            async with asyncio.timeout(BACK):
                while await reported_requests() < 60:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert (await count_statuses(gateways[0].url, 10))[200] == 0
