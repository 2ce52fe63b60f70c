"""A conversation between two APIs, of which one costs a fifth less: it stays where its prompt is cached."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.app import Gateway
from tests.support.builders import calling, post
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream, reply

pytestmark = pytest.mark.virtual_time

JSON = "content-type: application/json"
KEEPS = {"caching": "implicit", "cache_ttl": 300, "cache_from": 1024}
DEAR = {"input": 1.0, "cached_input": 0.1, "output": 0.0}
CHEAP = {"input": 0.8, "cached_input": 0.08, "output": 0.0}
ROUTES = {"chat": {"tiers": ["a", "b"], "prefer": "cost", "ttft": "off"}}
TEXT = " ".join(str(i) for i in range(2_000))
DOWN = [reply(b'{"error": {"message": "no"}}', "503 Service Unavailable", JSON)]


def answered(tokens: int, cached: int) -> list[Any]:
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage}
    return [reply(json.dumps(answer).encode(), "200 OK", JSON)]


def turn(number: int) -> dict[str, Any]:
    talk = [{"role": "user", "content": TEXT}]
    for i in range(number):
        talk += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": f"go on, {i}"}]
    return {"model": "chat", "messages": talk}


async def ask(gateway: Gateway, number: int) -> None:
    async with calling(gateway.url) as caller:
        assert (await caller.whole(post(turn(number))))[0] == 200


async def prices(gateway: Gateway, number: int) -> dict[str, float]:
    """Expected USD of a turn by pool, in the order of the decision."""
    async with calling(gateway.admin_url) as caller:
        status, _, body = await caller.whole(post(turn(number), path="/explain"))
    assert status == 200, body
    return {each["pool"]: each["price_usd"] for each in json.loads(body)["candidates"]}


async def test_a_conversation_moves_once_its_prompt_is_cached_no_more() -> None:
    """The first turn goes to the dearer API, as the other is down. Once that is up it would be paid for the whole
    prompt. An answer that has read nothing from the cache ends the belief, and so does the lifetime."""
    answers = [answered(9_000, cached) for cached in (0, 8_900, 0)]
    async with Upstream(*answers) as dear, Upstream(DOWN, answered(9_000, 0)) as cheap:
        pools = {"a": pool(dear.url, price=DEAR, accepts=KEEPS), "b": pool(cheap.url, price=CHEAP, accepts=KEEPS)}
        async with running(pools, ROUTES) as gateway:
            await ask(gateway, 0)
            await asyncio.sleep(60)
            found = await prices(gateway, 1)
            assert list(found) == ["a", "b"]
            assert found["a"] < 0.2 * found["b"]
            await ask(gateway, 1)
            await ask(gateway, 2)  # reads nothing from the cache
            assert (len(dear.requests), len(cheap.requests)) == (3, 1)
            await ask(gateway, 3)
            assert (len(dear.requests), len(cheap.requests)) == (3, 2)
            whole = found["b"]
            assert (await prices(gateway, 4))["b"] < 0.2 * whole
            await asyncio.sleep(301)
            assert (await prices(gateway, 4))["b"] > 0.8 * whole  # what a token of the text is has been learned since
