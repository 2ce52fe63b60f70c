"""Batch work by a deadline, over real sockets: callers that wait for hours, leave, or name a time of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import time
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ROUTES: Mapping[str, Any] = {
    "chat": {"tiers": ["all"], "ttft": {"budget": "30s"}, "tpot": "off"},
    "nightly": {"workload": "batch", "tiers": ["all"], "by": "6h"},
}
LONG = "word " * 20_000
ANSWER = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


async def ask(gateway: Gateway, route: str, text: str = "hi", **headers: str) -> tuple[int, str]:
    body = {"model": route, "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=named) as reply,
    ):
        return reply.status, await reply.text()


async def test_a_deadline_is_the_budget_of_the_whole_answer_and_stays_in_the_gateway() -> None:
    """It is counted as the objective `total`, and no engine reads the header."""
    async with Upstream([STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK] * 2) as upstream:
        routes = {"nightly": {"workload": "batch", "tiers": ["only"], "by": "6h"}}
        async with running({"only": pool(upstream.url)}, routes) as gateway:
            assert (await ask(gateway, "nightly"))[0] == 200
            assert (await ask(gateway, "nightly", x_slo_deadline=f"{time() + 600:.0f}"))[0] == 200
            by_route, by_caller = gateway.recorder.recent
        assert by_route.budgets.total == 6 * 3600.0
        assert by_caller.budgets.total == pytest.approx(600.0, abs=5.0)
        assert by_route.total_met
        assert all("x-slo-deadline" not in sent.headers for sent in upstream.requests)


@pytest.mark.parametrize(("text", "reason"), [("6h", "must be a Unix time"), ("1700000000", "is over")])
async def test_a_deadline_that_cannot_be_meant_is_refused(text: str, reason: str) -> None:
    async with engines() as servers, running({"all": engine_pool(*servers)}, ROUTES) as gateway:
        status, told = await ask(gateway, "nightly", x_slo_deadline=text)
    assert status == 400
    assert reason in told


async def test_a_caller_that_leaves_takes_its_batch_work_along() -> None:
    """The engine never sees it."""
    async with engines(1, "8b-l4") as servers, running({"all": engine_pool(*servers)}, ROUTES) as gateway:
        first = asyncio.create_task(ask(gateway, "chat", LONG))
        await eventually(lambda: len(servers[0].requests) == 1)
        held = asyncio.create_task(ask(gateway, "nightly"))
        await eventually(lambda: gateway.queue.depth().get("nightly") == 1)
        held.cancel()
        await eventually(lambda: not gateway.queue.depth())
        assert (await first)[0] == 200
        await eventually(lambda: len(gateway.recorder.recent) == 2)
        ends = {record.route.name: record.end for record in gateway.recorder.recent}
        assert len(servers[0].requests) == 1
    assert ends == {"chat": RequestOutcome.COMPLETED, "nightly": RequestOutcome.CLIENT_GONE}


async def test_work_without_a_place_by_its_deadline_is_refused_and_missed() -> None:
    """The answer would come too late."""
    async with engines(1, "8b-l4") as servers, running({"all": engine_pool(*servers)}, ROUTES) as gateway:
        first = asyncio.create_task(ask(gateway, "chat", LONG))
        await eventually(lambda: len(servers[0].requests) == 1)
        status, told = await ask(gateway, "nightly", x_slo_deadline=f"{time() + 1:.3f}")
        assert (await first)[0] == 200
        record = next(record for record in gateway.recorder.recent if record.route.name == "nightly")
    assert (status, record.end, record.total_met) == (503, RequestOutcome.SHED, False)
    assert "No server had time" in told
