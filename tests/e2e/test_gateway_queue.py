"""The gateway's queue before an overloaded small fleet: order, time limits, and no lost request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.observe.record import Record, RequestOutcome, Stage
from gateway.observe.record_columns import RECORD
from lab.servers.simulated_server import SimulatedServer
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

LARGE = "word " * 2500  # 0.35 s of prefill
SMALL = "word " * 100
ROUTES: Mapping[str, Any] = {
    "loose": {"tiers": ["all"], "ttft": {"budget": "5s"}, "tpot": "off"},
    "tight": {"tiers": ["all"], "ttft": {"budget": "1500ms"}, "tpot": "off"},
    "unattainable": {"tiers": ["all"], "ttft": {"budget": "40ms"}, "tpot": "off"},
}
KEYS = [{"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest()} for name in ("flood", "other")]


class Callers:
    """Requests to a gateway, by name."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.asking: dict[str, asyncio.Task[tuple[int, Mapping[str, str]]]] = {}

    async def _ask(self, name: str, route: str, text: str, key: str) -> tuple[int, Mapping[str, str]]:
        messages = [{"role": "user", "content": f"{name} {text}"}]
        body = {"model": route, "stream": True, "max_tokens": 2, "messages": messages}
        headers = {"x-request-id": name, "authorization": f"Bearer {key}"}
        url = f"{self.gateway.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
            await reply.read()
            return reply.status, reply.headers

    async def send(self, name: str, route: str = "loose", text: str = LARGE, key: str = "none") -> None:
        """Sends a further request and waits until the decision or the queueing."""
        before = self.gateway.queue.sequence
        self.asking[name] = asyncio.create_task(self._ask(name, route, text, key))
        await eventually(lambda: self.gateway.queue.sequence > before)

    async def answers(self) -> dict[str, int]:
        """Statuses by name."""
        found = await asyncio.gather(*self.asking.values(), return_exceptions=True)
        await eventually(lambda: self.gateway.recorder.live == 0)
        return {name: one[0] for name, one in zip(self.asking, found, strict=True) if isinstance(one, tuple)}

    @property
    def records(self) -> dict[str, Record]:
        return {record.request_id: record for record in self.gateway.recorder.recent}

    @property
    def order(self) -> list[str]:
        """Names in the order of sending to an engine."""
        sent = {name: r.arrival + r.attempts[-1].opened for name, r in self.records.items() if name in self.asking}
        return sorted(sent, key=sent.__getitem__)

    @property
    def queued(self) -> int:
        return sum(self.gateway.queue.depth().values())


@asynccontextmanager
async def small_fleet(count: int = 1, **more: Any) -> AsyncIterator[tuple[Callers, list[SimulatedServer]]]:
    """Slow engines with learned speed."""
    async with (
        engines(count, "8b-l4", speed=2.0) as servers,
        running({"all": engine_pool(*servers)}, ROUTES, **more) as gateway,
    ):
        key = "sk-other"
        for i in range(5):
            await Callers(gateway)._ask(f"warm-{i}", "loose", SMALL * (2 * i + 1), key)
        yield Callers(gateway), servers


async def test_queueing_time_counts_against_the_deadline() -> None:
    """Queueing time is a stage, stages sum to TTFT, and TTFT is compared with the budget."""
    async with small_fleet() as (callers, _):
        for name in ("first", "second", "third"):
            await callers.send(name)
        assert callers.gateway.queue.depth() == {"loose": 2}
        assert await callers.answers() == {"first": 200, "second": 200, "third": 200}
        records, headers = callers.records, callers.asking["third"].result()[1]
    first, second, third = (records[name].stages[Stage.QUEUE] for name in ("first", "second", "third"))
    assert first < second < third
    assert second > 0.1
    for record in records.values():
        before = sum(seconds for stage, seconds in record.stages.items() if stage is not Stage.STREAM)
        assert before == pytest.approx(record.ttft, abs=1e-3)
        assert record.budgets.ttft == pytest.approx(5.0)
    timing = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
    assert float(timing["queue"]) == pytest.approx(records["third"].stages[Stage.QUEUE] * 1e3, abs=0.02)


async def test_requests_leave_the_queue_by_deadline_and_late_ones_last() -> None:
    """Deadline order, not arrival order; late requests must not make others late."""
    async with small_fleet() as (callers, _):
        await callers.send("running")
        await callers.send("late", "unattainable")
        await callers.send("loose")
        await callers.send("tight", "tight", SMALL)
        assert callers.queued == 3
        assert set((await callers.answers()).values()) == {200}
        assert callers.order == ["running", "tight", "loose", "late"]
        met = {name: callers.records[name].ttft_met for name in callers.order}
    assert met == {"running": True, "tight": True, "loose": True, "late": False}


async def test_a_disconnected_caller_leaves_the_queue() -> None:
    """No engine receives the request; its Record is CLIENT_GONE, and tells which rules had held the request."""
    async with small_fleet() as (callers, (engine,)):
        await callers.send("running")
        await callers.send("gone")
        await callers.send("next")
        reached = len(engine.requests)
        callers.asking["gone"].cancel()
        await eventually(lambda: callers.queued == 1)
        assert await callers.answers() == {"running": 200, "next": 200}
        assert len(engine.requests) == reached + 1
        record = callers.records["gone"]
    assert (record.end, record.attempts) == (RequestOutcome.CLIENT_GONE, [])
    assert sum(RECORD.view(record)["held_ms"].values()) > 0


async def test_no_request_is_lost_when_an_engine_with_a_queue_dies() -> None:
    """Running and queued requests move to the other engine."""
    async with small_fleet(2) as (callers, (dying, _)):
        for i in range(7):
            await callers.send(f"r{i}")
        assert callers.queued >= 4
        await dying.kill()
        assert set((await callers.answers()).values()) == {200}
        ends = {record.end for record in callers.records.values()}
        await dying.start()
    assert ends == {RequestOutcome.COMPLETED}


async def test_the_rule_that_holds_a_request_is_named_everywhere() -> None:
    """For each endpoint with what frees it; of a request that is asked about; and in the Record, with its time."""
    async with small_fleet() as (callers, [server]):
        for name in ("first", "second", "third"):
            await callers.send(name)
        body = {"model": "loose", "messages": [{"role": "user", "content": LARGE}]}
        async with aiohttp.ClientSession(callers.gateway.admin_url) as session:
            async with session.get("/fleet") as reply:
                [shown] = await reply.json()
            async with session.post("/explain", json=body) as reply:
                asked = (await reply.json())["held_by"]
        await callers.answers()
        waited = RECORD.view(callers.records["third"])
    held = {each["rule"]: each for each in shown["held"]}
    assert {rule: each["requests"] for rule, each in held.items()} == {"prefill": 1, "turn": 1}
    assert all(each["longest_s"] >= 0 for each in held.values())
    assert asked["freed_by"] == held[asked["rule"]]["freed_by"]
    assert server.url.endswith(asked["endpoint"].partition("/")[2])
    assert {"turn", "prefill"} == {*waited["held_ms"]}
    assert sum(waited["held_ms"].values()) == pytest.approx(waited["stages_ms"]["queue"], abs=5.0)


async def test_a_draining_gateway_serves_its_queue() -> None:
    """Queued requests were accepted."""
    async with small_fleet() as (callers, _):
        for name in ("first", "second", "third"):
            await callers.send(name)
        assert callers.queued == 2
        await callers.gateway.stop(20.0)
        assert await callers.answers() == {"first": 200, "second": 200, "third": 200}


async def test_a_stopping_gateway_answers_queued_requests_with_503() -> None:
    """With Retry-After, instead of a broken connection."""
    async with small_fleet() as (callers, _):
        await callers.send("running")
        await callers.send("queued")
        await callers.gateway.stop(0.0)
        assert (await callers.answers())["queued"] == 503
        assert callers.asking["queued"].result()[1]["retry-after"] == "1"
        record = callers.records["queued"]
    assert (record.end, record.status, record.attempts) == (RequestOutcome.SHED, 503, [])
    assert record.stages[Stage.QUEUE] > 0


async def test_queueing_ends_with_503_after_the_first_token_limit() -> None:
    """503 with Retry-After after `defaults.first_token`."""
    async with small_fleet(defaults={"first_token": "1s"}) as (callers, _):
        for i in range(12):
            await callers.send(f"r{i}")
        assert (await callers.answers())["r11"] == 503
        record, headers = callers.records["r11"], callers.asking["r11"].result()[1]
    assert int(headers["retry-after"]) >= 1
    assert (record.end, record.ttft_met) == (RequestOutcome.SHED, False)
    assert 0.99 < record.stages[Stage.QUEUE] < 10.0  # a busy machine is late, and never early


async def test_a_flooding_tenant_does_not_starve_another() -> None:
    """The flood's late requests stay queued; another tenant's small request is released before them."""
    async with small_fleet(keys=KEYS) as (callers, _):
        for i in range(9):
            await callers.send(f"flood-{i}", "tight", LARGE, "sk-flood")
        await callers.send("small", "tight", SMALL, "sk-other")
        assert set((await callers.answers()).values()) == {200}
        assert callers.order.index("small") < 7
        assert callers.records["small"].ttft_met
