"""The history over a restart of the gateway, and of several workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.observe.metrics.scrape_collectors import RouteCounts, route_stats
from gateway.observe.windows.count_history import WINDOWS
from gateway.observe.windows.history_keeper import FILE, HistoryKeeper
from tests.support.builders import ANSWER, CHAT, calling, get, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

pytestmark = pytest.mark.virtual_time

ROUTES = {"chat": {"tiers": ["only"], "ttft": {"budget": "5s", "target": 0.9}}}
REPLY = [STREAM_HEAD + chunk(ANSWER) + LAST_CHUNK]


async def windows(gateway: Gateway, query: str = "") -> Any:
    status, _, body = await get(gateway.admin_url, f"/windows{query}")
    return status, json.loads(body)


async def restored(gateway: Gateway) -> None:
    keeper = gateway.history
    assert keeper is not None
    await eventually(lambda: keeper.restored)


async def ask(gateway: Gateway, times: int) -> None:
    for _ in range(times):
        async with calling(gateway.url) as caller:
            await caller.ask(post({**CHAT, "stream": True}))
            await caller.chunks()


async def test_windows_survive_a_restart_with_a_state_dir(tmp_path: Path) -> None:
    """Three requests before, one after; the error budget is that of the day."""
    async with Upstream(REPLY) as upstream:
        for times, expected in ((3, 3), (1, 4)):
            async with running({"only": pool(upstream.url)}, ROUTES, state={"dir": str(tmp_path)}) as gateway:
                await restored(gateway)
                await ask(gateway, times)
                for window in ("5m", "1h", "24h"):
                    status, found = await windows(gateway, f"?window={window}")
                    (chat,) = found["routes"]
                    assert (status, found["window"], chat["requests"]) == (200, window, {"completed": expected})
                    assert chat["error_budget_left"] == 1.0
                    assert chat["points"][-1][2] >= 1 or sum(p[2] for p in chat["points"] if p) == expected


async def test_a_gateway_that_is_stopped_at_once_keeps_what_was_saved(tmp_path: Path) -> None:
    """Before the file is read, nothing replaces it."""
    saved = '{"version": 1, "saved_at": 1, "counts": [["chat", "requests", "completed"]], "rings": {}}'
    (tmp_path / FILE).write_text(saved)
    keeper = HistoryKeeper(lambda: route_stats(RouteCounts(), [], 0.0), str(tmp_path))
    keeper.start()
    await keeper.close()
    assert (tmp_path / FILE).read_text() == saved


async def test_without_a_state_dir_a_window_begins_with_the_process(tmp_path: Path) -> None:
    async with Upstream(REPLY) as upstream:
        for _ in range(2):
            async with running({"only": pool(upstream.url)}, ROUTES) as gateway:
                await ask(gateway, 2)
                assert (await windows(gateway))[1]["routes"][0]["requests"] == {"completed": 2}


async def test_viewers_of_all_windows_leave_now_its_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pages of each window cost what one costs, and fewer looks at the totals than `now` remembers."""
    looked = list[float]()

    def stats() -> dict[str, Any]:
        looked.append(monotonic())
        return route_stats(RouteCounts(), [], 0.0)

    monkeypatch.setattr("gateway.observe.windows.history_keeper.time", asyncio.get_running_loop().time)
    keeper = HistoryKeeper(stats, None)
    for poll in range(150):
        for window in WINDOWS:
            keeper.view(window)
        await asyncio.sleep(0.2)
        assert poll < 60 or json.loads(keeper.view("now"))["covered_s"] >= 10.0
    assert len(looked) < 45


SAVED = '{"version": 1, "saved_at": 1, %s}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ('{"version": 2, "saved_at": 1, "counts": [], "rings": {}}', "of version 2"),
        ('{"version": 1, "saved_at": 9e12, "counts": [], "rings": {}}', "in the future"),
        (SAVED % '"counts": [["chat", "requests", "shed"]], "rings": {"5m": [[1, [5], [1]]]}', "no history"),
        (SAVED % '"counts": [], "rings": {"5m": [[-1%s, [], []]]}' % ("0" * 400), "no history"),
        (SAVED % '"counts": [["chat"]], "rings": {}', "no route"),
        (SAVED % '"counts": [["chat", "slo", "ttft"]], "rings": {}', "no route"),
        (SAVED % '"counts": [["chat", "ttft_ms", "fast"]], "rings": {}', "no route"),
        (SAVED % ('"x": ' + "[" * 100_000), "recursion"),
    ],
)
async def test_a_history_that_cannot_be_read_is_ignored(
    text: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log; the gateway serves, and keeps a new history."""
    (tmp_path / FILE).write_text(text)
    state = {"dir": str(tmp_path)}
    async with Upstream(REPLY) as upstream, running({"only": pool(upstream.url)}, ROUTES, state=state) as gateway:
        await restored(gateway)
        await ask(gateway, 1)
        assert (await windows(gateway))[1]["routes"][0]["requests"] == {"completed": 1}
    assert [why in message for message in caplog.messages if "history in" in message] == [True]
    assert json.loads((tmp_path / FILE).read_text())["version"] == 1


async def test_an_unknown_window_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    async with running({"only": pool("http://127.0.0.1:9")}, ROUTES) as gateway:
        status, said = await windows(gateway, "?window=ever")
    assert (status, said["error"]["message"]) == (400, "window 'ever' is unknown; known: 1h, 24h, 5m, now.")
