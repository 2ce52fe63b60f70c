"""Purchases of whole answers from servers with odd streams: `python -m tests.programs.odd_answers [REQUESTS]`.

Each kind of stream is served by one pool, and by the first of two, of which the second is well. Columns: requests to
both servers, answers that were bought twice of one endpoint, and answers that are not right (no 200, or other words).
A stream that breaks off is a failure of its endpoint: another one is asked, until the breaker opens.
Exits with 1 where more than one answer of an endpoint and kind was bought twice, or one was not right.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.support.builders import CHAT, calling, post
from tests.support.gateways import running
from tests.support.odd_streams import CALLS, CUT, STREAMS, TEXT, OddServer

REQUESTS = 2_000
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def pool(url: str) -> dict[str, Any]:
    return {"backend": "openai", "model": "m", "api_key": "sk", "endpoints": [url]}


def is_right(kind: str, body: bytes) -> bool:
    message = json.loads(body)["choices"][0]["message"]
    return bool(message.get("tool_calls")) if kind in CALLS else bool(message["content"] == TEXT)


async def served(kind: str, pools: int, requests: int) -> tuple[int, int, int, int]:
    """Requests to the odd server, and to the other one; answers bought twice; answers that are not right."""
    wrong, body = 0, {**CHAT, "max_tokens": 50, **({"tools": TOOLS} if kind in CALLS else {})}
    async with OddServer(kind) as odd, OddServer("well") as well:
        both = {"a": pool(odd.url), "b": pool(well.url)}
        used = {name: both[name] for name in [*both][:pools]}
        routes = {"chat": {"tiers": [*used]}}
        async with running(used, routes) as gateway, calling(gateway.url) as caller:
            for _ in range(requests):
                status, _, answer = await caller.whole(post(body))
                wrong += not (status == 200 and is_right(kind, answer))
            twice = gateway.proxy.dispatcher.obstacles.bought_twice
        return sum(odd.asked.values()), sum(well.asked.values()), twice, wrong


async def main(requests: int) -> int:
    each = -(-requests // (2 * len(STREAMS)))
    print(f"{len(STREAMS)} kinds, one pool and two, {each} requests each: {2 * each * len(STREAMS)}")
    print(f"{'kind':<30}{'pools':>6}{'odd server':>12}{'other':>7}{'twice':>7}{'wrong':>7}")
    failed = 0
    for kind in STREAMS:
        for pools in (1, 2):
            odd, other, twice, wrong = await served(kind, pools, each)
            print(f"{kind:<30}{pools:>6}{odd:>12}{other:>7}{twice:>7}{wrong:>7}", flush=True)
            breaks = pools > 1 and STREAMS[kind][-1] == CUT
            failed += twice > 1 or wrong > 0 or (odd + other - each > 1 and not breaks)
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else REQUESTS)) > 0)
