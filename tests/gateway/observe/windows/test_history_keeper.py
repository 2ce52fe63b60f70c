"""Windows of a gateway that runs."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.observe.metrics.scrape_collectors import RouteCounts, route_stats
from gateway.observe.windows.count_history import WINDOWS
from gateway.observe.windows.history_keeper import HistoryKeeper
from tests.support.builders import ANSWER, CHAT, calling, get, post
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ROUTES = {"chat": {"tiers": ["only"], "ttft": {"budget": "5s", "target": 0.9}}}
REPLY = [STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK]


async def windows(gateway: Gateway, query: str = "") -> Any:
    status, _, body = await get(gateway.admin_url, f"/windows{query}")
    return status, json.loads(body)


async def ask(gateway: Gateway, times: int) -> None:
    for _ in range(times):
        async with calling(gateway.url) as caller:
            await caller.ask(post({**CHAT, "stream": True}))
            await caller.chunks()


async def test_a_window_begins_with_the_process() -> None:
    async with Upstream(REPLY) as upstream:
        for _ in range(2):
            async with running({"only": pool(upstream.url)}, ROUTES) as gateway:
                await ask(gateway, 2)
                for window in ("now", "5m", "1h"):
                    status, found = await windows(gateway, f"?window={window}")
                    assert (status, found["window"]) == (200, window)
                    assert found["routes"][0]["requests"] == {"completed": 2}


async def test_viewers_of_all_windows_leave_now_its_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pages of each window cost what one costs, and fewer looks at the totals than `now` remembers."""
    looked = list[float]()

    def stats() -> dict[str, Any]:
        looked.append(monotonic())
        return route_stats(RouteCounts(), [], 0.0)

    monkeypatch.setattr("gateway.observe.windows.history_keeper.time", asyncio.get_running_loop().time)
    keeper = HistoryKeeper(stats)
    for poll in range(150):
        for window in WINDOWS:
            keeper.view(window)
        await asyncio.sleep(0.2)
        assert poll < 60 or json.loads(keeper.view("now"))["covered_s"] >= 10.0
    assert len(looked) < 45


async def test_an_unknown_window_is_refused_with_the_known_ones() -> None:
    async with running({"only": pool("http://127.0.0.1:9")}, ROUTES) as gateway:
        status, said = await windows(gateway, "?window=ever")
    assert (status, said["error"]["message"]) == (400, "window 'ever' is unknown; known: 1h, 5m, now.")
