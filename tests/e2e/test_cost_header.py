"""The cost of an answer: of all attempts, and never where it would tell what others have cached.

Of a whole answer it is in a header, of a stream in its usage, if the caller asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from backends.facts import refreshed
from backends.facts.fact_rows import APIS, shipped
from tests.support.builders import CHAT, calling, last, post
from tests.support.gateways import pool, running
from tests.support.upstream import CLOSE, LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

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


@pytest.mark.parametrize(("model", "usd"), [("gpt-6.1-sol", "0.00148000"), ("gpt-6.9-sol", None)])
async def test_a_pool_without_a_price_costs_what_its_model_costs_at_its_api(
    known_api: None, model: str, usd: str | None
) -> None:
    """Where that is known: 200 tokens at 2 USD, 800 cached ones at 0.1, 100 of the answer at 10."""
    async with Upstream(WHOLE) as api, running({"api": pool(api.url, model=model)}) as gateway:
        async with calling(gateway.url) as caller:
            _, headers = await caller.ask(post(CHAT))
        assert headers.get(HEADER) == usd
        assert last(gateway).cost_usd == pytest.approx(float(usd or 0))


@pytest.fixture
def known_api(tmp_path: Path) -> Iterator[None]:
    """Newer facts, by which the servers of a test are an API."""
    document = {**shipped(APIS), "read": shipped(APIS)["read"] + timedelta(1)}
    openai = document["apis"]["openai"]
    document["apis"] = {**document["apis"], "openai": {**openai, "hosts": [*openai["hosts"], "127.0.0.1"]}}
    assert not refreshed.use({APIS: yaml.safe_dump(document, sort_keys=False).encode()})
    yield
    refreshed.use({})


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


# --------------------------------------------------------------------------- in the usage of a stream

ASKING = {**CHAT, "stream": True, "usage": {"include": True}}
COUNTED = b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n"
STREAM = [
    STREAM_HEAD,
    chunk(EVENTS.partition(b"data: [DONE]")[0]),
    chunk(COUNTED),
    chunk(b"data: [DONE]\n\n"),
    LAST_CHUNK,
]


def usages(raw: bytes) -> list[dict[str, object]]:
    chunks = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return [each["usage"] for each in chunks if each.get("usage")]


async def test_a_stream_that_asks_has_its_cost_in_the_usage() -> None:
    """OpenRouter's way to ask, which no server gets to see; who does not ask gets the same bytes as ever."""
    async with Upstream(STREAM) as api, running({"api": pool(api.url, price=PRICE)}) as gateway:
        async with calling(gateway.url) as caller:
            await caller.ask(post(ASKING))
            assert usages(b"".join(await caller.chunks())) == [{"cost": pytest.approx(COST), **USAGE}]
        assert last(gateway).cost_usd == pytest.approx(COST)
        for plain in ({"usage": {"include": False}}, {"stream_options": {"include_usage": True}}):
            async with calling(gateway.url) as caller:
                await caller.ask(post({**CHAT, "stream": True, **plain}))
                assert b"cost" not in b"".join(await caller.chunks())
        sent = [json.loads(request.body) for request in api.requests]
        assert [("usage" in body, body["stream_options"]) for body in sent] == [(False, {"include_usage": True})] * 3


async def test_lost_attempts_are_part_of_a_streams_cost() -> None:
    """An answer that broke before the caller had any of it may be billed."""
    broken = [
        STREAM_HEAD,
        chunk(b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":0}}\n\n'),
        CLOSE,
    ]
    async with Upstream(broken, STREAM) as api, running({"api": pool(api.url, price=PRICE)}) as gateway:
        async with calling(gateway.url) as caller:
            await caller.ask(post(ASKING))
            (usage,) = usages(b"".join(await caller.chunks()))
        assert usage["cost"] == pytest.approx(last(gateway).cost_usd)
        assert len(last(gateway).attempts) == 2


async def test_a_stream_tells_no_cost_where_a_whole_answer_would_not() -> None:
    """The same two cases: a cache that tenants share, and a pool without a price."""
    keys = [{"name": name, "sha256": sha256(f"key-{name}".encode()).hexdigest()} for name in "ab"]
    for section, more in (({"price": PRICE}, {"keys": keys}), ({}, {})):
        async with (
            Upstream(STREAM) as api,
            running({"api": pool(api.url, **section)}, **more) as gateway,
            calling(gateway.url) as caller,
        ):
            status, _ = await caller.ask(post(ASKING, "authorization: Bearer key-a"))
            (usage,) = usages(b"".join(await caller.chunks()))
        assert (status, "cost" in usage) == (200, False)
