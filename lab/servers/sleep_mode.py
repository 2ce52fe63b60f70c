"""Sleep mode of a simulated engine, as vLLM 0.33 with --enable-sleep-mode: requests wait in silence until it is woken,
/health stays 200, and the page of metrics tells the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from aiohttp import web

STATES = ("awake", "weights_offloaded", "discard_all")  # by level: 0 is awake


class SleepMode:
    """`wake_s`: seconds that a waking takes. `on_sleep`: empties the cache. `woken`: number of requests to wake it."""

    def __init__(self, wake_s: float = 0.0, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.wake_s = wake_s
        self._on_sleep = on_sleep
        self.level = 0
        self.woken = 0
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def asleep(self) -> bool:
        return self.level > 0

    def sleep(self, level: int = 1) -> None:
        self.level = level
        self._on_sleep()
        self._awake.clear()

    async def wake(self) -> None:
        self.woken += 1
        await asyncio.sleep(self.wake_s)
        self.level = 0
        self._awake.set()

    async def until_awake(self) -> None:
        await self._awake.wait()

    def lines(self, labels: str) -> Iterator[str]:
        """Of the page of metrics."""
        yield "# TYPE vllm:engine_sleep_state gauge"
        for level, state in enumerate(STATES):
            yield f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {float(level == self.level)}'

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/is_sleeping", self._is_sleeping),
        ]

    async def _sleep(self, http: web.Request) -> web.Response:
        self.sleep(int(http.query.get("level", "1")))
        return web.Response()

    async def _wake_up(self, http: web.Request) -> web.Response:
        await self.wake()
        return web.Response()

    async def _is_sleeping(self, http: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})
