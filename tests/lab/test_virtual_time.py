"""Virtual time: waits take no time, threads and sockets are waited for, and the clock is one for loop and product."""

from __future__ import annotations

import asyncio
import time
from time import monotonic

import pytest

from gateway import scheduler
from lab.virtual_time import VirtualLoop, stall

pytestmark = pytest.mark.virtual_time

DAY = 86_400.0


async def test_a_wait_of_a_day_is_over_at_once() -> None:
    """By the clock that the test, the product and the loop read; the real one has hardly moved."""
    began, real = scheduler.monotonic(), time.monotonic()
    await asyncio.sleep(DAY)
    assert began + DAY <= monotonic() < began + DAY + 1
    assert asyncio.get_running_loop().time() == scheduler.monotonic() == monotonic()
    assert time.monotonic() < real + DAY / 2


async def test_timers_fire_in_their_order() -> None:
    fired: list[float] = []
    loop = asyncio.get_running_loop()
    for delay in (3.0, 1.0, 2.0):
        loop.call_later(delay, fired.append, delay)
    await asyncio.sleep(4.0)
    assert fired == [1.0, 2.0, 3.0]


async def test_no_clock_overtakes_a_thread() -> None:
    """The result of a thread is there long before a time-out of a minute."""
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(lambda: time.sleep(0.05) or "done") == "done"


async def test_no_clock_overtakes_bytes_between_sockets() -> None:
    """A thousand round trips beside a timer that would end them."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for _ in range(1000):
            writer.write(b"x")
            assert await reader.read(1) == b"x"
        writer.close()


async def test_a_stall_makes_a_timer_late() -> None:
    """Only a stall: the clock stands still while anything else runs."""
    began, woken = monotonic(), list[float]()
    asyncio.get_running_loop().call_later(1.0, lambda: woken.append(monotonic() - began))
    stall(3.0)
    await asyncio.sleep(0.1)
    assert 3.0 <= woken[0] < 3.1


async def test_a_process_cannot_be_started_in_virtual_time() -> None:
    """It would be given up before it has begun."""
    with pytest.raises(RuntimeError, match="real_time"):
        await asyncio.create_subprocess_exec("true")


@pytest.mark.real_time
async def test_a_test_may_leave_the_virtual_time_of_its_module() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)
    assert scheduler.monotonic is time.monotonic
