"""Tier choice by the TTFT budget, with simulated fleets over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from aiohttp import ClientSession

from gateway.observe.record import RequestOutcome, Stage
from policies.types import TRAINED_SAMPLES
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines

pytestmark = pytest.mark.virtual_time

LARGE_PROMPT = "word " * 9000  # 8b-l4 needs over two seconds for it, 8b-h100 a quarter of one


async def ask(gateway_url: str, content: str, model: str = "chat", **more: Any) -> None:
    """Reads a streamed answer to the end."""
    messages: Any = [{"role": "user", "content": content}]
    async with openai.AsyncOpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0) as client:
        async for _ in await client.chat.completions.create(
            model=model, messages=messages, max_tokens=2, stream=True, **more
        ):
            pass


async def explain(admin_url: str, content: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    body = {"model": "chat", "messages": [{"role": "user", "content": content}], "max_tokens": 2, "stream": True}
    async with ClientSession() as client, client.post(f"{admin_url}/explain", json=body, headers=headers) as reply:
        found: dict[str, Any] = await reply.json()
        return found


async def test_a_prompt_that_the_first_tier_cannot_prefill_in_time_goes_to_the_next() -> None:
    """A small prompt stays with the preferred tier; a large prompt goes to the tier that meets the budget."""
    routes = {"chat": {"tiers": ["slow", "fast"], "ttft": {"budget": "1200ms"}}}
    async with engines(1, "8b-l4") as slow, engines(1, "8b-h100") as fast:
        pools = {"slow": engine_pool(*slow), "fast": engine_pool(*fast)}
        async with running(pools, routes) as gateway:
            for i in range(12):  # answers teach the slow tier's speed
                await ask(gateway.url, f"{i} " + "hello " * 40 * (i + 1))
            seen = len(gateway.recorder.recent)
            await ask(gateway.url, "hi")
            await ask(gateway.url, LARGE_PROMPT)
            small, large = list(gateway.recorder.recent)[seen:]
    assert (small.endpoint.pool, large.endpoint.pool) == ("slow", "fast")
    assert large.ttft is not None
    assert large.ttft_met


async def train(url: str) -> None:
    """As many first tokens as a forecast needs: nothing is shed on a guess."""
    for _ in range(TRAINED_SAMPLES):
        await ask(url, "hello")


@pytest.mark.parametrize(("on_miss", "answered"), [("shed", False), ("best_effort", True)])
async def test_an_unattainable_budget_is_shed_or_answered_by_on_miss(on_miss: str, answered: bool) -> None:
    """`shed` refuses at once with Retry-After; `best_effort` answers late."""
    routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "20ms"}, "on_miss": on_miss}}
    async with engines(1, "8b-l4") as only, running({"only": engine_pool(*only)}, routes) as gateway:
        await train(gateway.url)
        sent, seen = len(only[0].requests), len(gateway.recorder.recent)
        if answered:
            await ask(gateway.url, LARGE_PROMPT)
        else:
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(gateway.url, LARGE_PROMPT)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert int(caught.value.response.headers["retry-after-ms"]) > 0
            assert len(only[0].requests) == sent
        (record,) = list(gateway.recorder.recent)[seen:]
    assert record.end is (RequestOutcome.COMPLETED if answered else RequestOutcome.SHED)
    assert record.ttft_met is False
    assert record.placed.prompt_tokens is not None  # what was turned away can be told, and replayed
    assert record.placed.prompt_tokens > 512
    assert record.prefix


async def test_a_caller_can_tighten_the_ttft_budget_by_header() -> None:
    """x-slo-ttft-ms: a request in time for the route's budget is shed under an unattainable budget."""
    routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "30s"}, "on_miss": "shed"}}
    async with engines(1, "8b-l4") as only, running({"only": engine_pool(*only)}, routes) as gateway:
        await train(gateway.url)
        with pytest.raises(openai.RateLimitError):
            await ask(gateway.url, LARGE_PROMPT, extra_headers={"x-slo-ttft-ms": "10"})


async def test_a_refusal_has_the_ttft_that_the_request_would_have_had() -> None:
    """p50 and p90 beside Retry-After: those of the candidate that `explain` shows first."""
    routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "30s"}, "on_miss": "shed"}}
    async with engines(1, "8b-l4") as only, running({"only": engine_pool(*only)}, routes) as gateway:
        await train(gateway.url)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(gateway.url, LARGE_PROMPT, extra_headers={"x-slo-ttft-ms": "1"})
        found = await explain(gateway.admin_url, LARGE_PROMPT, {"x-slo-ttft-ms": "1"})
    headers, best = caught.value.response.headers, found["candidates"][0]
    assert found["outcome"] == "shed"
    assert 0 < float(headers["x-firsttoken-ttft-p50-ms"]) <= float(headers["x-firsttoken-ttft-p90-ms"])
    assert float(headers["x-firsttoken-ttft-p50-ms"]) == pytest.approx(best["ttft_p50_ms"], rel=0.5)


async def test_a_prompt_beyond_every_context_window_is_400() -> None:
    """The error names the limit, before anything is sent."""
    async with engines(1) as only, running({"only": engine_pool(*only, context_window=1000)}) as gateway:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(gateway.url, LARGE_PROMPT)
    assert caught.value.code == "context_length_exceeded"
    assert "1000" in caught.value.message


async def test_a_repeated_prefix_returns_to_its_engine() -> None:
    """Engines are idle and equally fast: the cached prefix decides."""
    async with engines(3) as three, running({"all": engine_pool(*three)}) as gateway:
        for turn in range(3):
            for talk in range(6):
                text = f"conversation {talk} " * 400 + " ".join(f"turn {i}" for i in range(turn * 50))
                await ask(gateway.url, text)
        records = list(gateway.recorder.recent)
    homes = [record.endpoint.id for record in records[:6]] * 2
    returned = [record.endpoint.id == home for record, home in zip(records[6:], homes, strict=True)]
    cached = [(record.answer.cached_tokens or 0) > 500 for record in records[6:]]
    assert min(sum(returned), sum(cached)) >= 9  # all 12 at rest; a pause of the test machine makes an engine look slow


async def test_stages_sum_to_ttft() -> None:
    """Within a millisecond, for every request with a first token."""
    async with engines(2) as both, running({"all": engine_pool(*both)}) as gateway:
        for i in range(8):
            await ask(gateway.url, f"{i} hello " * 100)
    for record in gateway.recorder.recent:
        assert record.ttft is not None
        before = sum(seconds for stage, seconds in record.stages.items() if stage is not Stage.STREAM)
        assert before == pytest.approx(record.ttft, abs=1e-3)
        assert before + record.stages[Stage.STREAM] == pytest.approx(record.total, abs=1e-3)


async def test_each_request_on_a_kept_connection_has_its_own_arrival() -> None:
    """An idle pause is not charged to the next request; a body in a second segment is charged to `read`."""
    body = json.dumps({"model": "chat", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with engines(1) as one, running({"all": engine_pool(*one)}) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        for _ in range(2):
            writer.write(head)
            await asyncio.sleep(0.02)
            writer.write(body)
            reply = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(reply.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
            await asyncio.sleep(1.0)
        writer.close()
    for record in gateway.recorder.recent:
        assert 0.01 < record.stages[Stage.READ] < 1.0


GROWING = {"budget": "500ms", "per_1k_tokens": "700ms"}


async def test_a_long_prompt_is_not_hopeless_on_arrival_where_the_budget_grows() -> None:
    """The fixed budget refuses a prompt that no endpoint can prefill in time; the growing one serves it in time."""
    shared: dict[str, Any] = {"tiers": ["only"], "on_miss": "shed"}
    routes = {"chat": {**shared, "ttft": GROWING}, "fixed": {**shared, "ttft": {"budget": "500ms"}}}
    async with engines(1, "8b-l4") as only, running({"only": engine_pool(*only)}, routes) as gateway:
        for i in range(2 * TRAINED_SAMPLES):
            await ask(gateway.url, f"{i} " + "hello " * 40 * (i + 1))
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(gateway.url, LARGE_PROMPT, model="fixed")
        await ask(gateway.url, LARGE_PROMPT)
        served = gateway.recorder.recent[-1]
    assert refused.value.response.headers["x-firsttoken-ttft-budget-ms"] == "500"
    assert served.placed.prompt_tokens is not None
    assert served.budgets.ttft == pytest.approx(0.5 + 0.7e-3 * served.placed.prompt_tokens, rel=0.01)
    assert served.ttft is not None
    assert served.ttft > 1.0
    assert served.ttft_met


async def test_what_an_endpoint_holds_adds_nothing_to_the_budget() -> None:
    """One deadline for all endpoints, fixed at arrival by the longest prefix that any of them holds."""
    routes = {"chat": {"tiers": ["only"], "ttft": GROWING}}
    async with engines(2) as only, running({"only": engine_pool(*only)}, routes) as gateway:
        for _ in range(2):
            await ask(gateway.url, LARGE_PROMPT)
        await ask(gateway.url, LARGE_PROMPT, extra_headers={"x-slo-ttft-ms": "600"})
        cold, warm, asked = gateway.recorder.recent
        explained = await explain(gateway.admin_url, LARGE_PROMPT)
    assert cold.budgets.ttft is not None
    assert warm.budgets.ttft is not None
    assert cold.budgets.ttft > 6.0
    assert 0.5 < warm.budgets.ttft < 0.53
    assert asked.budgets.ttft == pytest.approx(warm.budgets.ttft)
    assert 0 < explained["uncached_tokens"] < 50
    assert explained["budget_left_ms"] < 530


async def test_a_late_request_that_would_wait_for_long_is_refused_at_once_with_the_time_to_come_back() -> None:
    """Not after a minute: the caller can tell its user, or ask elsewhere."""
    routes = {"chat": {"tiers": ["only"], "ttft": {"budget": "20ms"}, "on_miss": "queue"}}
    async with engines(1, "8b-l4") as only, running({"only": engine_pool(*only)}, routes) as gateway:
        await train(gateway.url)
        seen = len(gateway.recorder.recent)
        asked = [asyncio.create_task(ask(gateway.url, f"{number} {LARGE_PROMPT}")) for number in range(20)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        refused = [error for error in done if isinstance(error, openai.APIStatusError)]
        records = [one for one in list(gateway.recorder.recent)[seen:] if one.end is RequestOutcome.SHED]
    assert refused
    assert len(refused) < len(done), "the engine serves what it has time for"
    assert {error.status_code for error in refused} == {503}
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert len(records) == len(refused)
