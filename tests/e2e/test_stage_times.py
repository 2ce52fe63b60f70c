"""Stage times over real sockets: rate limits, and times that an engine reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from backends.server_profiles import PROFILES
from gateway.app import Gateway
from gateway.observe.record import Record, Stage
from gateway.observe.record_columns import RECORD
from gateway.tokenize.tokenizers import encoder
from lab.servers.simulated_server import SimulatedServer
from tests.support.builders import CHAT, STREAMED, calling, conversing, last, post
from tests.support.gateways import pool, running
from tests.support.simulated import engine_pool, engines, eventually
from tests.support.upstream import Upstream

pytestmark = pytest.mark.virtual_time

STREAM = {**CHAT, "stream": True}
LARGE = "word " * 2500  # 0.35 s of prefill
REFUSED = b"HTTP/1.1 429 x\r\nretry-after: %s\r\ncontent-length: 2\r\n\r\n{}"


def before_first_token(record: Record) -> float:
    return sum(seconds for stage, seconds in record.stages.items() if stage is not Stage.STREAM)


def stage_sum(gateway: Gateway, stage: str, route: str = "chat") -> float | None:
    labels = {"route": route, "stage": stage}
    return gateway.admin.registry.get_sample_value("firsttoken_stage_seconds_sum", labels)


async def test_a_providers_retry_after_is_the_stage_rate_limit() -> None:
    """An API that refuses for 0.5 s and then answers: in the Record, server-timing and the metrics."""
    async with conversing([REFUSED % b"0.5"], [STREAMED]) as (gateway, caller, _):
        status, headers = await caller.ask(post(STREAM))
        await caller.chunks()
        await eventually(lambda: gateway.recorder.recent)
        record = last(gateway)
        counted = stage_sum(gateway, "rate_limit")
    assert (status, len(record.attempts)) == (200, 2)
    assert 0.49 < record.stages[Stage.RATE_LIMIT] < 5.0
    assert max(record.stages[Stage.UPSTREAM], record.stages[Stage.FAILOVER]) < 0.49
    assert before_first_token(record) == pytest.approx(record.ttft, abs=1e-3)
    timing = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
    assert float(timing["rate_limit"]) == pytest.approx(record.stages[Stage.RATE_LIMIT] * 1e3, abs=0.02)
    assert counted == pytest.approx(record.stages[Stage.RATE_LIMIT])


async def test_queueing_due_to_an_apis_rate_limit_is_the_stage_rate_limit() -> None:
    """No endpoint could meet the deadline; without the limit the request would have been sent at once."""
    routes: Any = {
        "api": {"tiers": ["api"]},
        "chat": {"tiers": ["engines", "api"], "ttft": {"budget": "40ms"}, "tpot": "off"},
    }
    async with (
        engines(1, "8b-l4", speed=2.0) as one,
        Upstream([REFUSED % b"60"]) as api,
        running({"engines": engine_pool(*one), "api": pool(api.url)}, routes) as gateway,
    ):
        assert await ask(gateway, "x", "api") == 429
        first = asyncio.create_task(ask(gateway, "first " + LARGE))
        await eventually(lambda: gateway.queue.sequence == 2)
        assert await ask(gateway, "second " + LARGE) == 200
        assert await first == 200
        await eventually(lambda: len(gateway.recorder.recent) == 3)
        record = last(gateway)
    assert record.stages[Stage.RATE_LIMIT] > record.stages.get(Stage.QUEUE, 0.0)
    assert before_first_token(record) == pytest.approx(record.ttft, abs=1e-3)


async def test_engine_queue_and_engine_prefill_are_parts_of_upstream() -> None:
    """For a prompt behind another client's prompt: in the Record and the metrics; the rest of `upstream` is the
    network."""
    one_at_a_time = replace(PROFILES["8b-l4"], max_num_seqs=1)
    engine = SimulatedServer(one_at_a_time, model="served", encode=encoder("o200k_base").encode)
    await engine.start()
    async with running({"all": engine_pool(engine)}) as gateway:
        other = asyncio.create_task(direct(engine.url, "other " + LARGE))
        await eventually(lambda: engine.requests)
        assert await ask(gateway, "ours " + LARGE) == 200
        await other
        await eventually(lambda: gateway.recorder.recent)
        record = last(gateway)
        queue, prefill = (stage_sum(gateway, part) for part in ("engine_queue", "engine_prefill"))
    await engine.stop()
    assert record.answer.engine_queue is not None
    assert record.answer.engine_prefill is not None
    assert record.answer.engine_queue > 0.05
    assert record.answer.engine_prefill > 0.05
    inside = record.answer.engine_queue + record.answer.engine_prefill
    assert inside == record.answer.engine_ttft
    assert 0.0 < record.stages[Stage.UPSTREAM] - inside < 2.0
    assert (queue, prefill) == (record.answer.engine_queue, record.answer.engine_prefill)
    shown = RECORD.view(record)
    assert (shown["engine_queue_ms"], shown["engine_prefill_ms"]) == pytest.approx(
        (record.answer.engine_queue * 1e3, record.answer.engine_prefill * 1e3), abs=1e-3
    )
    assert "engine_queue" not in shown["stages_ms"]


async def ask(gateway: Gateway, content: str, route: str = "chat") -> int:
    """Reads an answer to the end; returns the status."""
    async with calling(gateway.url) as caller:
        body = {"model": route, "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
        status, _ = await caller.ask(post(body, "connection: close"))
        await caller.rest()
        return status


async def direct(url: str, content: str) -> None:
    body = {"model": "served", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as reply:
        await reply.read()
