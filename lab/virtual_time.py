"""Virtual time for a gateway, engines and callers that share one event loop.

Sockets are real. The clock stands still while anything runs, so that no result depends on the speed or the load of the
machine, and jumps to the next timer where the loop has nothing else to wait for. While a thread of an executor works,
the clock of a `VirtualLoop` runs like the real one; a `SerialLoop` has no such threads. What other processes do takes
no virtual time. Tests run in it with `pytest.mark.virtual_time`; those with processes, and those of a thread of their
own, need the real clock.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from selectors import DefaultSelector, SelectorKey
from time import monotonic
from typing import Any, TypeVar, TypeVarTuple

PACKAGES = (
    "backends.",
    "gateway.",
    "lab.",
    "benchmarks.",
    "tests.",
)  # their modules read the clock by `from time import monotonic`
TURN = 1e-6  # s that a turn of the loop takes, so that who polls gets on
IN_FLIGHT = 0.001  # s of real time to wait for bytes between two sockets before a jump ...
LONG_JUMP = 0.02  # ... of more than so many s
THREAD_TICK = 0.01  # s of real time in one wait for a thread

Events = list[tuple[SelectorKey, int]]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualSelector(DefaultSelector):
    """Waits for sockets alone; a wait for a timer moves `now` instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = monotonic()
        self.threads = 0  # at work in executors

    def select(self, timeout: float | None = None) -> Events:
        ready = super().select(0)
        self.now += TURN
        if ready or timeout == 0:
            return ready
        if timeout is None:
            return super().select()
        if self.threads:
            return self._wait_for_threads(min(timeout, THREAD_TICK))
        ready = super().select(IN_FLIGHT) if timeout > LONG_JUMP else ready
        if not ready:
            self.now += timeout
        return ready

    def _wait_for_threads(self, tick: float) -> Events:
        began = monotonic()
        ready = super().select(tick)
        self.now += min(monotonic() - began, tick)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with the clock of its selector."""

    def __init__(self) -> None:
        self.clock = VirtualSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.clock.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self.clock.threads -= 1

    async def subprocess_exec(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("what a process does takes no virtual time: mark this test with real_time")


class SerialLoop(VirtualLoop):
    """An executor's work is done at once, in the thread of the loop, and takes no time: equal runs are nearly equal."""

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def virtual_clock() -> Iterator[None]:
    """The product, lab and tests read the clock of the running loop; outside of a virtual loop it is the real one."""
    named = [module for name, module in tuple(sys.modules.items()) if name.startswith(PACKAGES) and name != __name__]
    reading = [module for module in named if vars(module).get("monotonic") is monotonic]
    for module in reading:
        vars(module)["monotonic"] = _now
    try:
        yield
    finally:
        for module in reading:
            vars(module)["monotonic"] = monotonic


def _now() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # in a thread
        return monotonic()


def stall(seconds: float) -> None:
    """The loop does nothing else for so long, as in a call that blocks."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.clock.now += seconds
