"""A provider's rate limits and a pool's cap, as times: in the tier walk, in the queue and in failover."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.observe.record import Stage
from policies.types import Load
from tests.support.builders import ANSWER, CHAT, DONE, FINISH, STREAMED, TOKEN, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Pause, Received, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"


def streamed(**limits: str) -> Script:
    """A streamed answer with the headers of a rate limit, `remaining_requests="0"`."""
    head = STREAM_HEAD[:-2] + b"".join(
        f"x-ratelimit-{name.replace('_', '-')}: {value}\r\n".encode() for name, value in limits.items()
    )
    return [head + b"\r\n" + chunk(ANSWER) + LAST_CHUNK]


async def ask(gateway: Gateway, prompt: str = "hello", **more: Any) -> int:
    body = {**CHAT, "messages": [{"role": "user", "content": prompt}], "stream": True, **more}
    async with calling(gateway.url) as caller:
        status, _ = await caller.ask(post(body))
        if status == 200:
            await caller.chunks()
    return status


def tiers(*names: str, budget: str = "2s", **more: Any) -> dict[str, Any]:
    return {"chat": {"tiers": list(names), "ttft": {"budget": budget} if budget else "off", **more}}


async def test_an_exhausted_limit_is_waited_for_within_the_budget() -> None:
    """After a success, not a 429: the wait is the stage `rate_limit`, and the provider refuses nobody."""
    limited = streamed(remaining_requests="0", reset_requests="400ms")
    async with Upstream(limited, [STREAMED]) as api, running({"api": pool(api.url)}, tiers("api")) as gateway:
        assert await ask(gateway) == 200
        began = monotonic()
        assert await ask(gateway) == 200
        assert 0.3 < last(gateway).stages[Stage.RATE_LIMIT] < monotonic() - began < 4
        assert len(last(gateway).attempts) == 1


async def test_a_wait_beyond_the_budget_goes_to_the_next_tier_at_once() -> None:
    limited = streamed(remaining_requests="0", reset_requests="30s")
    async with Upstream(limited) as api, Upstream([STREAMED]) as other:
        pools = {"api": pool(api.url), "other": pool(other.url)}
        async with running(pools, tiers("api", "other")) as gateway:
            assert await ask(gateway) == 200
            assert await ask(gateway) == 200
            assert last(gateway).stages.get(Stage.RATE_LIMIT, 0.0) == 0.0
            assert last(gateway).endpoint.pool == "other"
            assert (len(api.requests), len(other.requests)) == (1, 1)


async def test_a_prompt_larger_than_the_tokens_left_goes_elsewhere_and_a_small_one_stays() -> None:
    limited = streamed(remaining_tokens="100", reset_tokens="60s", remaining_requests="50", reset_requests="1s")
    async with Upstream(limited) as api, Upstream([STREAMED]) as other:
        pools = {"api": pool(api.url), "other": pool(other.url)}
        async with running(pools, tiers("api", "other")) as gateway:
            assert await ask(gateway) == 200
            assert await ask(gateway, "word " * 1000) == 200
            assert last(gateway).endpoint.pool == "other"
            assert await ask(gateway) == 200
            assert last(gateway).endpoint.pool == "api"


async def test_each_key_has_its_own_limit() -> None:
    class Provider(Upstream):
        def script(self, received: Received) -> Script:
            one = received.headers["authorization"].endswith("one")
            return streamed(remaining_requests="0", reset_requests="30s") if one else [STREAMED]

    keyed = {key: value for key, value in pool("").items() if key not in ("api_key", "endpoints")}
    async with Provider([STREAMED]) as api:
        section = {**keyed, "endpoints": [api.url], "api_keys": ["sk-one", "sk-two"]}
        async with running({"api": section}, tiers("api")) as gateway:
            assert [await ask(gateway) for _ in range(12)] == [200] * 12
        keys = [request.headers["authorization"] for request in api.requests]
        assert keys.count("Bearer sk-one") == 1


async def test_without_a_budget_a_limit_is_waited_for_where_nothing_else_is_left() -> None:
    refused: Script = [reply(b"{}", "429 Too Many Requests", JSON, "retry-after: 1")]
    routes = tiers("api", budget="", max_attempts=1)
    async with Upstream(refused, [STREAMED]) as api, running({"api": pool(api.url)}, routes) as gateway:
        assert await ask(gateway) == 429
        began = monotonic()
        assert await asyncio.gather(*(ask(gateway) for _ in range(5))) == [200] * 5
        assert 0.5 < monotonic() - began < 10
        assert len(api.requests) == 6


def seen_by_caller(gateway: Gateway) -> Mapping[str, Load]:
    """Loads as the requests of this test meet with them: without keys, the address is the caller."""
    return gateway.fleet.snapshot_for("127.0.0.1", monotonic()).loads


@pytest.mark.parametrize(("budget", "statuses"), [("10s", [200] * 5), ("500ms", [429] * 5)])
async def test_after_a_429_further_requests_wait_or_hear_the_providers_time(budget: str, statuses: list[int]) -> None:
    """Within the budget they wait; beyond it they get a 429 at once, with what is left of the provider's time."""
    refused: Script = [reply(b"{}", "429 Too Many Requests", JSON, "retry-after: 1")]
    async with (
        Upstream(refused, [STREAMED]) as api,
        running({"api": pool(api.url)}, tiers("api", budget=budget)) as gateway,
    ):
        asking = asyncio.create_task(ask(gateway))
        await eventually(lambda: any(load.limits.refused_until > 0 for load in seen_by_caller(gateway).values()))
        began = monotonic()
        assert await asyncio.gather(*(ask(gateway) for _ in range(5))) == statuses
        assert statuses[0] == 429 or monotonic() - began > 0.3
        async with calling(gateway.url) as caller:
            status, headers = await caller.ask(post({**CHAT, "stream": True}))
            assert (status, headers.get("retry-after")) in ((200, None), (429, "1"))
        await asking


class Counting(Upstream):
    """Takes `seconds` for an answer, and counts requests in progress."""

    def __init__(self, seconds: float) -> None:
        super().__init__([STREAM_HEAD, Pause(seconds), chunk(ANSWER) + LAST_CHUNK])
        self.running = self.most = 0

    async def _play(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.running += bool(script)
        self.most = max(self.most, self.running)
        try:
            await super()._play(script, reader, writer)
        finally:
            self.running -= bool(script)


@pytest.mark.parametrize("budget", ["30s", ""])
@pytest.mark.parametrize("scorer", ["predicted", "round_robin"])
async def test_a_cap_holds_requests_back_and_loses_none(budget: str, scorer: str) -> None:
    """Forty callers at once at two endpoints of three requests each."""
    async with Counting(0.05) as one, Counting(0.05) as two:
        pools = {"api": pool(one.url, two.url, concurrent_requests=3)}
        async with running(pools, tiers("api", budget=budget, scorer=scorer)) as gateway:
            assert await asyncio.gather(*(ask(gateway) for _ in range(40))) == [200] * 40
            assert (one.most, two.most) == (3, 3)
            assert gateway.queue.depth() == {}
            await eventually(lambda: all(load.in_flight == 0 for load in gateway.monitor.loads().values()))


async def test_an_endpoint_at_its_cap_leaves_requests_to_the_next_tier() -> None:
    async with Counting(0.3) as api, Upstream([STREAMED]) as other:
        pools = {"api": pool(api.url, concurrent_requests=2), "other": pool(other.url)}
        async with running(pools, tiers("api", "other")) as gateway:
            assert await asyncio.gather(*(ask(gateway) for _ in range(10))) == [200] * 10
            assert (api.most, len(api.requests), len(other.requests)) == (2, 2, 8)


@pytest.mark.parametrize("budget", ["30s", ""])
async def test_a_failed_first_tier_does_not_break_the_cap_of_the_second(budget: str) -> None:
    """Fifty callers at once, decided before the fault is known: attempts wait for a place, too."""
    broken: Script = [reply(b"{}", "500 Internal Server Error", JSON)]
    async with Upstream(broken) as first, Counting(0.02) as second:
        pools = {"first": pool(first.url), "second": pool(second.url, concurrent_requests=4)}
        async with running(pools, tiers("first", "second", budget=budget)) as gateway:
            assert await asyncio.gather(*(ask(gateway) for _ in range(50))) == [200] * 50
            assert second.most <= 4


async def test_a_caller_that_leaves_a_full_queue_frees_its_place() -> None:
    async with Counting(0.2) as api, running({"api": pool(api.url, concurrent_requests=1)}) as gateway:
        asking = [asyncio.create_task(ask(gateway)) for _ in range(6)]
        await eventually(lambda: sum(gateway.queue.depth().values()) == 5)
        for task in asking[1:5]:
            task.cancel()
        await asyncio.gather(*asking[1:5], return_exceptions=True)
        assert await asyncio.gather(asking[0], asking[5]) == [200, 200]
        assert len(api.requests) == 2


async def test_a_new_caller_does_not_pass_those_that_wait_for_a_place() -> None:
    async with Counting(0.05) as api, running({"api": pool(api.url, concurrent_requests=1)}) as gateway:
        first = [asyncio.create_task(ask(gateway, f"number {i}")) for i in range(5)]
        await eventually(lambda: sum(gateway.queue.depth().values()) == 4)
        later = [asyncio.create_task(ask(gateway, f"later {i}")) for i in range(5)]
        assert await asyncio.gather(*first, *later) == [200] * 10
        said = [json.loads(request.body)["messages"][0]["content"][:5] for request in api.requests]
        assert said == ["numbe"] * 5 + ["later"] * 5


async def test_a_flood_at_a_limit_that_fills_slowly_is_paced_by_it() -> None:
    """Twenty a second, none left: thirty callers take about a second and a half, and each is asked once."""
    async with AsyncExitStack() as stack:
        limited = streamed(limit_requests="20", remaining_requests="0", reset_requests="1s")
        api = await stack.enter_async_context(Upstream(limited, [STREAMED]))
        gateway = await stack.enter_async_context(running({"api": pool(api.url)}, tiers("api", budget="10s")))
        assert await ask(gateway) == 200
        began = monotonic()
        assert await asyncio.gather(*(ask(gateway) for _ in range(30))) == [200] * 30
        assert 1.2 < monotonic() - began < 10


async def test_a_route_beyond_its_limit_for_apis_goes_to_the_next_tier_or_is_refused_at_once() -> None:
    """One request in two may use the API; where there is nothing else, the others get 429 with `retry-after`."""
    async with Upstream([STREAMED]) as api, Upstream([STREAMED]) as engine:
        pools = {"api": pool(api.url), "engine": pool(engine.url, backend="vllm")}
        half: dict[str, Any] = {"limits": {"external": "50%"}}
        async with running(pools, tiers("api", "engine", **half)) as gateway:
            assert [await ask(gateway) for _ in range(4)] == [200] * 4
            recent = gateway.recorder.recent
            told = [(each.endpoint.pool, "external_limit" in each.placed.rejected) for each in recent]
            assert told == [("engine", True), ("api", False)] * 2
        async with running(pools, tiers("api", **half)) as gateway:
            began = monotonic()
            assert [await ask(gateway) for _ in range(4)] == [429, 200, 429, 200]
            assert monotonic() - began < 2


# --------------------------------------------------------------------------- limits of the configuration


async def test_a_configured_limit_sends_requests_to_the_next_tier() -> None:
    """Two a minute at the first API: the third request goes elsewhere, and no provider refuses one."""
    async with Upstream([STREAMED]) as api, Upstream([STREAMED]) as other:
        pools = {"api": pool(api.url, requests_per_minute=2), "other": pool(other.url)}
        async with running(pools, tiers("api", "other")) as gateway:
            assert [await ask(gateway) for _ in range(4)] == [200] * 4
    assert (len(api.requests), len(other.requests)) == (2, 2)


async def test_a_configured_limit_is_of_each_key() -> None:
    async with Upstream([STREAMED]) as api, Upstream([STREAMED]) as other:
        keyed = {"backend": "openai", "model": "m", "base_url": api.url, "api_keys": ["sk-1", "sk-2"]}
        pools = {"api": {**keyed, "requests_per_minute": 1}, "other": pool(other.url)}
        async with running(pools, tiers("api", "other")) as gateway:
            assert [await ask(gateway) for _ in range(3)] == [200] * 3
    assert {received.headers["authorization"] for received in api.requests} == {"Bearer sk-1", "Bearer sk-2"}
    assert (len(api.requests), len(other.requests)) == (2, 1)


async def test_a_configured_limit_of_tokens_counts_a_long_prompt() -> None:
    """The first prompt leaves nothing for the second."""
    async with Upstream([STREAMED]) as api, Upstream([STREAMED]) as other:
        pools = {"api": pool(api.url, tokens_per_minute=100), "other": pool(other.url)}
        async with running(pools, tiers("api", "other")) as gateway:
            assert await ask(gateway, "word " * 95) == 200
            assert await ask(gateway, "word " * 95) == 200
    assert (len(api.requests), len(other.requests)) == (1, 1)


async def test_a_configured_limit_is_waited_for_within_the_budget() -> None:
    """50 tokens a second, after a prompt of all that a minute has."""
    limited = {"tokens_per_minute": 3000}
    async with Upstream([STREAMED]) as api, running({"api": pool(api.url, **limited)}, tiers("api")) as gateway:
        assert await ask(gateway, "word " * 3000) == 200
        assert await ask(gateway) == 200
        assert 0.05 < last(gateway).stages[Stage.RATE_LIMIT] < 2


async def test_a_configured_limit_of_tokens_counts_answers_whose_server_does_not() -> None:
    """A server without usage, or a caller that leaves before it, would make the limit one of prompts alone."""
    long: Script = [STREAM_HEAD + chunk(TOKEN) * 200 + chunk(FINISH + DONE) + LAST_CHUNK]
    async with Upstream(long) as api, Upstream([STREAMED]) as other:
        pools = {"api": pool(api.url, tokens_per_minute=150), "other": pool(other.url)}
        async with running(pools, tiers("api", "other")) as gateway:
            assert [await ask(gateway) for _ in range(2)] == [200] * 2
            assert last(gateway).endpoint.pool == "other"
    assert len(api.requests) == 1
