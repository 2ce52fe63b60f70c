"""GET /prefixes: which engine holds which of the hottest prefixes."""

from __future__ import annotations

import json

import pytest

from tests.support.builders import CHAT, calling, get, post
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time

SECRET = "the merger with Initech"


async def test_the_map_names_holders_and_no_text() -> None:
    """A prompt that one engine has computed twice is held there alone, up to its last whole block."""
    prompt = {**CHAT, "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": f"{SECRET} " * 200}]}
    async with engines(2) as two, running({"small": engine_pool(*two)}, {"chat": {"tiers": ["small"]}}) as gateway:
        for _ in range(3):
            async with calling(gateway.url) as caller:
                await caller.ask(post(prompt))
                await caller.chunks()
        await eventually(lambda: gateway.recorder.live == 0)
        status, _, body = await get(gateway.admin_url, "/prefixes")
        holder = gateway.recorder.recent[-1].endpoint.id
    found = json.loads(body)
    assert status == 200
    assert found
    assert {each["pool"] for each in found} == {"small"}
    assert all([*each["held"]] == [holder] and 0 < each["held"][holder] <= each["tokens"] for each in found)
    assert SECRET.encode() not in body
