"""Shared polls: a single worker polls each engine for all workers, until that worker dies or hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from tests.support.builders import get
from tests.support.served import Served, serving, write_config
from tests.support.upstream import Upstream, reply

PAGE = b"""vllm:num_requests_running{engine="0",model_name="served"} 3.0
vllm:num_requests_waiting{engine="0",model_name="served"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="served"} 0.25
process_start_time_seconds 1.7e9
"""


async def fleet(served: Served) -> Any:
    [shown] = json.loads((await get(served.admin, "/fleet"))[2])
    return shown


async def all_report(served: Served, health: str, within: float) -> None:
    """Wait until every worker shows this health."""
    async with asyncio.timeout(within):
        while {*(await fleet(served))["health_by_worker"].values()} != {health}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def poll_rate(engine: Upstream, seconds: float) -> float:
    """Polls a second."""
    before, began = len(engine.requests), monotonic()
    await asyncio.sleep(seconds)
    return (len(engine.requests) - before) / (monotonic() - began)


def workers_of(served: Served) -> list[int]:
    pid = served.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_an_engine_is_scraped_once_for_four_workers(tmp_path: Path) -> None:
    """Twice a second in total; every worker knows the load. Another worker steps in while a busy machine stalls one."""
    async with Upstream([reply(PAGE)]) as engine:
        config = write_config(tmp_path / "f.yaml", engine.url, "vllm")
        async with serving(config, "--workers", "4") as served:
            async with asyncio.timeout(60):
                while not 0.5 <= await poll_rate(engine, 3.0) <= 3.5:  # four times two if each asked
                    pass
            pages = [await get(served.admin, "/metrics") for _ in range(2)]
            assert b'firsttoken_endpoint_running{endpoint="only/' in pages[1][2]
            assert (await fleet(served))["load"]["running"] == 3


async def test_another_worker_polls_at_once_when_the_polling_worker_dies(tmp_path: Path) -> None:
    """For any worker, during the restart too: no gap above 1.2 s in which this machine ran, and no double polling."""
    async with Upstream([reply(PAGE)]) as engine:
        config = write_config(tmp_path / "f.yaml", engine.url, "vllm")
        async with serving(config, "--workers", "3") as served:
            polls: list[Poll] = []
            watching = asyncio.gather(_note(engine, polls, clock := RunningClock()), clock.run())
            await asyncio.sleep(1.0)
            for worker in workers_of(served)[:3]:
                os.kill(worker, signal.SIGKILL)
                await asyncio.sleep(1.5)
            watching.cancel()
            assert max(later.ran - earlier.ran for earlier, later in pairwise(polls)) < 1.2
            assert len(polls) < 2.5 * (polls[-1].at - polls[0].at) + 6  # plus an immediate poll at each takeover


async def test_other_workers_poll_while_the_polling_worker_hangs(tmp_path: Path) -> None:
    """Until the worker continues."""
    async with Upstream([reply(PAGE)]) as engine:
        config = write_config(tmp_path / "f.yaml", engine.url, "vllm")
        async with serving(config, "--workers", "2") as served:
            first = workers_of(served)[0]  # in charge of the only slot
            os.kill(first, signal.SIGSTOP)
            try:
                stopped = len(engine.requests)
                async with asyncio.timeout(60):
                    while len(engine.requests) < stopped + 3:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            finally:
                os.kill(first, signal.SIGCONT)


async def test_shared_polls_give_all_workers_the_health_of_an_engine(tmp_path: Path) -> None:
    """Failed and answered probes count in every worker."""
    async with Upstream([reply(PAGE)]) as engine:
        port = int(engine.url.rpartition(":")[2])
        config = write_config(tmp_path / "f.yaml", engine.url, "vllm")
        async with serving(config, "--workers", "3") as served:
            await all_report(served, "up", 30)
            engine._server.close()
            for task in engine._tasks:
                task.cancel()
            await all_report(served, "down", 30)
            async with Upstream([reply(PAGE)], port=port):
                await all_report(served, "probing", 30)


class Poll(NamedTuple):
    """Time of a poll, on both clocks."""

    at: float
    ran: float


class RunningClock:
    """Seconds in which the loop ran: while the machine stands still, or does other things, it does too."""

    TICK = 0.01  # s

    def __init__(self) -> None:
        self.now = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.TICK)
            self.now += self.TICK


async def _note(engine: Upstream, polls: list[Poll], clock: RunningClock) -> None:
    while True:
        known = len(polls)
        await engine.until(lambda seen, known=known: len(seen.requests) > known)
        polls += [Poll(monotonic(), clock.now)] * (len(engine.requests) - known)
