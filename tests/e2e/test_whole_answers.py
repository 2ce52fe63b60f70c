"""Whole answers that are asked for as streams: where that is of use, of odd servers, and at whose expense."""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from typing import Any

import pytest

from gateway.parts.quotas.quotas import tokens_of
from policies.types import AttemptKind, AttemptOutcome
from tests.support.builders import CHAT, calling, get, last, post
from tests.support.gateways import running
from tests.support.odd_streams import ARGUMENTS, CALLS, STREAMS, TAKEN, TEXT, OddServer
from tests.support.upstream import HANG, Upstream

pytestmark = pytest.mark.virtual_time

PRICE = {"input": 1000.0, "output": 4000.0}  # USD per million tokens: 20 and 10 tokens are 0.06 USD
ONCE = 0.06
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def api(url: str, **more: Any) -> dict[str, Any]:
    return {"backend": "openai", "model": "m", "api_key": "sk", "endpoints": [url], "price": PRICE, **more}


def asked(kind: str) -> dict[str, Any]:
    return {**CHAT, "max_tokens": 50, **({"tools": TOOLS} if kind in CALLS else {})}


def is_right(kind: str, body: bytes) -> bool:
    message = json.loads(body)["choices"][0]["message"]
    if kind not in CALLS:
        return bool(message["content"] == TEXT)
    (call,) = message["tool_calls"]
    return bool(call["function"] == {"name": "weather", "arguments": ARGUMENTS} and call["id"] == "call_1")


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_whole_answer_is_bought_once(kind: str) -> None:
    """The words of an odd stream are used; where they are not known, the endpoint is asked again, once for ever."""
    async with OddServer(kind) as server, running({"a": api(server.url)}) as gateway:
        async with calling(gateway.url) as caller:
            for number in range(5):
                status, headers, body = await caller.whole(post(asked(kind)))
                assert (status, is_right(kind, body)) == (200, True)
                assert 0.02 < float(headers["x-firsttoken-cost-usd"]) < 1.5 * ONCE
                assert json.loads(body)["usage"]["completion_tokens"] > 2
                if number or kind not in ("no usage", "half a usage"):
                    assert float(headers["x-firsttoken-cost-usd"]) == pytest.approx(ONCE)
        asked_again = 0 if kind in TAKEN else 1
        assert sum(server.asked.values()) == 5 + asked_again
        assert server.asked[True] == (5 if kind == "well" else 1)
        assert gateway.proxy.dispatcher.obstacles.bought_twice == asked_again


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("hedge", ["off", {"max_extra": 1.0}])
async def test_an_odd_stream_is_no_502_while_somebody_answers(kind: str, hedge: Any) -> None:
    """The endpoint itself is asked again, outside of `max_attempts`; another one hangs."""
    route = {"tiers": ["a", "b"], "max_attempts": 1, "hedge": hedge}
    async with (
        OddServer(kind) as server,
        Upstream([HANG]) as hung,
        running({"a": api(server.url), "b": api(hung.url)}, {"chat": route}) as gateway,
        calling(gateway.url) as caller,
    ):
        for _ in range(3):
            status, _, body = await caller.whole(post(asked(kind)))
            assert (status, is_right(kind, body)) == (200, True)
        assert last(gateway).endpoint.pool == "a"
    assert not hung.requests


async def test_the_next_pool_answers_where_the_whole_answer_fails() -> None:
    routes = {"chat": {"tiers": ["a", "b"], "max_attempts": 2}}
    async with (
        OddServer("no end", whole_fails=True) as odd,
        OddServer("well") as well,
        running({"a": api(odd.url), "b": api(well.url)}, routes) as gateway,
        calling(gateway.url) as caller,
    ):
        status, headers, body = await caller.whole(post(CHAT))
        assert (status, headers["x-firsttoken-pool"], is_right("well", body)) == (200, "b", True)


async def test_the_second_purchase_is_told_and_nobody_pays_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """In the header, the Record and the quota of the key; the operator's metrics have both."""
    caplog.set_level(logging.INFO, "firsttoken")
    keys = [{"name": "dev", "sha256": sha256(b"sk-dev-0123456789").hexdigest(), "tokens_per_minute": 1000}]
    async with OddServer("no end") as server, running({"a": api(server.url)}, keys=keys) as gateway:
        async with calling(gateway.url) as caller:
            sent = post(CHAT, "authorization: Bearer sk-dev-0123456789")
            _, headers, _ = await caller.whole(sent)
            record = last(gateway)
            first, second = record.attempts
            assert float(headers["x-firsttoken-cost-usd"]) == pytest.approx(ONCE)
            assert record.cost_usd == pytest.approx(ONCE)
            assert tokens_of(record) == 30
            assert (first.kind, second.kind) == (AttemptKind.PRIMARY, AttemptKind.WHOLE)
            assert "finish_reason" in first.cause
            assert (second.ending, second.cause) == (AttemptOutcome.COMPLETED, "")
            assert first.cost_usd == pytest.approx(ONCE)
            _, headers, _ = await caller.whole(sent)
        page = ""
        while 'kind="whole"' not in page:  # Records are counted soon after the end
            page = (await get(gateway.admin_url, "/metrics"))[2].decode()
    (line,) = [line for line in caplog.messages if "cannot be put together" in line]
    assert "a/" in line
    assert 'kind="whole",outcome="completed",pool="a",region=""} 1.0' in page
    cost = page.partition('firsttoken_cost_usd_total{pool="a",route="chat"} ')[2].partition("\n")[0]
    assert float(cost) == pytest.approx(3 * ONCE)


async def test_one_callers_odd_stream_is_anothers_once_it_has_met_with_it_too() -> None:
    """Two callers are witnesses: the third is asked for a whole answer at once."""
    names = ("one", "two", "three")
    keys = [{"name": name, "sha256": sha256(f"sk-{name}-0123456789".encode()).hexdigest()} for name in names]
    async with (
        OddServer("no end") as server,
        running({"a": api(server.url)}, keys=keys) as gateway,
        calling(gateway.url) as caller,
    ):
        for name in names * 2:
            assert (await caller.whole(post(CHAT, f"authorization: Bearer sk-{name}-0123456789")))[0] == 200
    assert (server.asked[True], server.asked[False]) == (2, 6)


async def test_an_odd_tool_call_concerns_requests_with_tools_alone() -> None:
    async with (
        OddServer("calls mixed") as server,
        running({"a": api(server.url)}) as gateway,
        calling(gateway.url) as caller,
    ):
        await caller.whole(post(asked(server.kind)))
        server.kind = "well"
        for _ in range(3):
            await caller.whole(post(CHAT))
        assert (server.asked[True], server.asked[False]) == (4, 1)
        server.kind = "calls mixed"
        await caller.whole(post(asked(server.kind)))
    assert (server.asked[True], server.asked[False]) == (4, 2)


# --------------------------------------------------------------------------- where a stream is of use


@pytest.mark.parametrize(
    ("route", "endpoints", "streams"),
    [
        ({}, 1, True),
        ({"ttft": "off"}, 1, False),
        ({"ttft": "off"}, 2, True),
        ({"ttft": "off", "max_attempts": 1}, 2, False),
        ({"ttft": "off", "total": {"budget": "9s"}}, 1, True),
        ({"workload": "batch"}, 1, False),
        ({"workload": "batch"}, 2, False),
        ({"workload": "batch", "ttft": {"budget": "2s"}}, 2, True),
        ({"ttft": "off", "by": "1h"}, 2, False),
        ({"upstream_stream": "off"}, 2, False),
    ],
)
async def test_a_stream_is_asked_for_where_it_buys_something(route: Any, endpoints: int, streams: bool) -> None:
    """A promise, or another endpoint to go to; for work that can wait, a promise alone."""
    async with OddServer("well") as one, OddServer("well") as two:
        urls = [one.url, two.url][:endpoints]
        pools = {"a": {**api(one.url), "endpoints": urls}}
        async with running(pools, {"chat": {"tiers": ["a"], **route}}) as gateway, calling(gateway.url) as caller:
            assert (await caller.whole(post(CHAT)))[0] == 200
    assert (one.asked + two.asked) == {streams: 1}


async def test_a_callers_own_promise_is_one_too() -> None:
    routes = {"chat": {"tiers": ["a"], "ttft": "off"}}
    async with (
        OddServer("well") as one,
        running({"a": api(one.url)}, routes) as gateway,
        calling(gateway.url) as caller,
    ):
        await caller.whole(post(CHAT, "x-slo-ttft-ms: 800"))
        await caller.whole(post(CHAT))
    assert one.asked == {True: 1, False: 1}
