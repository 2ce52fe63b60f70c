"""A fresh gateway in front of an API that hangs: it is left in time for the next tier to make the budget."""

from __future__ import annotations

import pytest

from tests.support.builders import CHAT, DONE, FINISH, TOKEN, WHOLE, calling, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Pause, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ANSWER = STREAM_HEAD + chunk(TOKEN + FINISH + DONE) + LAST_CHUNK


@pytest.mark.parametrize(
    ("model", "budget"), [("gpt-4.1-mini", 3.0), ("gpt-4.1-mini", 1.5), ("gpt-4.1", 3.0), ("gpt-4.1", 2.0)]
)
async def test_the_first_hang_of_a_cold_api_costs_no_budget(model: str, budget: float) -> None:
    """Nothing is known of either API but its name; the second answers in 0.5 s."""
    routes = {"chat": {"tiers": ["first", "second"], "ttft": {"budget": f"{budget}s", "target": 0.7}, "hedge": "off"}}
    async with (
        Upstream([Pause(60.0), ANSWER]) as first,
        Upstream([Pause(0.5), ANSWER]) as second,
        running({"first": pool(first.url, model=model), "second": pool(second.url)}, routes) as gateway,
        calling(gateway.url) as caller,
    ):
        await caller.ask(post({**CHAT, "stream": True}))
        await caller.chunks()
        await eventually(lambda: gateway.recorder.recent)
        record = last(gateway)
    assert [attempt.pool for attempt in record.attempts] == ["first", "second"]
    assert record.ttft is not None
    assert record.ttft < budget


@pytest.mark.parametrize(
    ("model", "ttft", "stream"),
    [
        ("gpt-5", 4.0, True),
        ("gpt-5", 60.0, True),
        ("gpt-5", 60.0, False),
        ("gpt-4.1", 4.0, True),
        ("gpt-4.1-mini", 60.0, True),
    ],
)
async def test_a_slow_api_before_a_quick_engine_breaks_no_budget(model: str, ttft: float, stream: bool) -> None:
    """From the first request on, whatever its guess; and what a few trials have shown costs no later request a wait."""
    routes = {"balanced": {"tiers": ["api", "engine"], "ttft": {"budget": "1s"}}}
    whole = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(WHOLE)}\r\n\r\n".encode()
    async with (
        Upstream([Pause(ttft), ANSWER]) as first,
        Upstream([Pause(0.1), ANSWER if stream else whole + WHOLE]) as second,
        running(
            {
                "api": {"backend": "openai", "model": model, "api_key": "sk-backend", "base_url": f"{first.url}/v1"},
                "engine": {"backend": "ollama", "model": "served", "endpoints": [second.url]},
            },
            routes,
        ) as gateway,
        calling(gateway.url) as caller,
    ):
        for _ in range(12):
            _, headers = await caller.ask(post({**CHAT, "model": "balanced", "stream": stream}))
            await (caller.chunks() if stream else caller.body(headers))
        await eventually(lambda: len(gateway.recorder.recent) == 12)
        found = [record.ttft for record in gateway.recorder.recent]
    assert all(ttft is not None and ttft < 1.0 for ttft in found), found
    assert all(ttft is not None and ttft < 0.3 for ttft in found[-4:]), found


@pytest.mark.parametrize("budget", [5.0, 2.0])
async def test_a_silent_api_is_left_by_a_whole_answer_too(budget: float) -> None:
    """Tokens of the API are seen, whether or not those of the next tier's server, which has another dialect, can be."""
    routes = {"best": {"tiers": ["api", "engine"], "ttft": {"budget": f"{budget}s"}}}
    whole = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(WHOLE)}\r\n\r\n".encode()
    async with (
        Upstream([Pause(900.0), ANSWER]) as silent,
        Upstream([Pause(0.1), whole + WHOLE]) as engine,
        running(
            {
                "api": {"backend": "openai", "model": "gpt-4.1", "api_key": "sk-b", "base_url": f"{silent.url}/v1"},
                "engine": {"backend": "ollama", "model": "served", "endpoints": [engine.url]},
            },
            routes,
        ) as gateway,
        calling(gateway.url) as caller,
    ):
        _, headers = await caller.ask(post({**CHAT, "model": "best"}))
        assert await caller.body(headers) == WHOLE
        await eventually(lambda: gateway.recorder.recent)
        record = last(gateway)
    assert [attempt.pool for attempt in record.attempts] == ["api", "engine"]
    assert record.ttft is not None
    assert record.ttft < budget


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("budget", [5.0, 1.0])
async def test_two_pools_of_a_silent_api_before_an_engine_break_no_budget(budget: float, stream: bool) -> None:
    """The tiers that `firsttoken up` writes beside an engine: the API's large model, its small one, the engine."""
    routes = {"chat": {"tiers": ["large", "small", "engine"], "ttft": {"budget": f"{budget}s"}}}
    whole = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(WHOLE)}\r\n\r\n".encode()
    async with (
        Upstream([Pause(900.0), ANSWER]) as silent,
        Upstream([Pause(0.1), ANSWER if stream else whole + WHOLE]) as engine,
    ):
        api = {"backend": "openai", "api_key": "sk-backend", "base_url": f"{silent.url}/v1"}
        pools = {
            "large": {**api, "model": "gpt-5"},
            "small": {**api, "model": "gpt-5-mini"},
            "engine": {"backend": "ollama", "model": "served", "endpoints": [engine.url]},
        }
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            for count in range(1, 6):
                _, headers = await caller.ask(post({**CHAT, "stream": stream}))
                await (caller.chunks() if stream else caller.body(headers))
                await eventually(lambda count=count: len(gateway.recorder.recent) == count)
            found = [record.ttft for record in gateway.recorder.recent]
    assert all(ttft is not None and ttft < budget for ttft in found), found
    assert found[-1] is not None
    assert found[-1] < 0.3
