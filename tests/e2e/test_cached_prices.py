"""Costs in Records follow the cached tokens that a provider reports."""

from __future__ import annotations

import json

import pytest

from tests.support.builders import CHAT, calling, last, post
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

pytestmark = pytest.mark.virtual_time

PRICE = {"input": 2.0, "cached_input": 0.5, "output": 8.0}


def answered(**usage: object) -> Script:
    events = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
    reported = {"prompt_tokens": 1_000_000, "completion_tokens": 1000, **usage}
    events += b"data: " + json.dumps({"choices": [], "usage": reported}).encode() + b"\n\ndata: [DONE]\n\n"
    return [STREAM_HEAD + chunk(events) + LAST_CHUNK]


@pytest.mark.parametrize(
    ("usage", "usd"),
    [
        ({}, 2.008),
        ({"prompt_tokens_details": {"cached_tokens": 800_000}}, 0.4 + 0.4 + 0.008),  # OpenAI
        ({"prompt_cache_hit_tokens": 800_000, "prompt_cache_miss_tokens": 200_000}, 0.4 + 0.4 + 0.008),  # DeepSeek
        ({"prompt_tokens_details": {"cached_tokens": "all"}}, 2.008),
    ],
)
async def test_cached_input_costs_its_own_price(usage: dict[str, object], usd: float) -> None:
    async with Upstream(answered(**usage)) as api, running({"api": pool(api.url, price=PRICE)}) as gateway:
        async with calling(gateway.url) as caller:
            status, _ = await caller.ask(post({**CHAT, "stream": True}))
            assert status == 200
            await caller.chunks()
        assert last(gateway).cost_usd == pytest.approx(usd)
