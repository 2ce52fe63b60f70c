"""The cost of a whole answer in a header: of all attempts, and never where it would tell what others have cached."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from tests.support.builders import CHAT, calling, last, post
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

PRICE = {"input": 2.0, "cached_input": 0.5, "output": 8.0}
JSON = "content-type: application/json"
HEADER = "x-firsttoken-cost-usd"
USAGE = {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 800}}
BODY = json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": USAGE}).encode()
WHOLE = [reply(BODY, "200 OK", JSON)]
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
COST = 0.0004 + 0.0004 + 0.0008


async def test_a_whole_answer_tells_its_cost() -> None:
    """As in the Record, in plain decimals."""
    async with Upstream(WHOLE) as api, running({"api": pool(api.url, price=PRICE)}) as gateway:
        async with calling(gateway.url) as caller:
            status, headers = await caller.ask(post(CHAT))
        assert (status, headers[HEADER]) == (200, "0.00160000")
        assert float(headers[HEADER]) == pytest.approx(last(gateway).cost_usd)


async def test_streams_and_pools_without_a_price_have_no_cost() -> None:
    """A stream's cost is not known when its head is sent."""
    async with Upstream([STREAM_HEAD + chunk(EVENTS) + LAST_CHUNK], WHOLE) as api:
        async with running({"api": pool(api.url, price=PRICE)}) as gateway, calling(gateway.url) as caller:
            assert HEADER not in (await caller.ask(post({**CHAT, "stream": True})))[1]
            await caller.chunks()
        async with running({"api": pool(api.url)}) as gateway, calling(gateway.url) as caller:
            assert HEADER not in (await caller.ask(post(CHAT)))[1]


async def test_lost_attempts_are_part_of_the_cost() -> None:
    """A first answer that was cut at its limit is billed too."""
    cut = BODY.replace(b'"stop"', b'"length"')
    async with Upstream([reply(cut, "200 OK", JSON)]) as small, Upstream(WHOLE) as large:
        pools = {"small": pool(small.url, price=PRICE), "large": pool(large.url, price=PRICE)}
        routes = {"chat": {"tiers": ["small", "large"], "escalate": ["length"], "ttft": "off"}}
        async with running(pools, routes) as gateway, calling(gateway.url) as caller:
            _, headers = await caller.ask(post(CHAT))
            assert headers["x-firsttoken-pool"] == "large"
            assert float(headers[HEADER]) == pytest.approx(2 * COST) == pytest.approx(last(gateway).cost_usd)


async def test_no_cost_where_it_would_tell_what_another_tenant_has_cached() -> None:
    """Two keys share the cache of one account: counts of cached tokens are masked, and so is their price."""
    keys = [{"name": name, "sha256": sha256(f"key-{name}".encode()).hexdigest()} for name in "ab"]
    async with Upstream(WHOLE) as api, running({"api": pool(api.url, price=PRICE)}, keys=keys) as gateway:
        async with calling(gateway.url) as caller:
            status, headers = await caller.ask(post(CHAT, "authorization: Bearer key-a"))
        assert (status, HEADER in headers) == (200, False)
        assert last(gateway).cost_usd == pytest.approx(COST)
