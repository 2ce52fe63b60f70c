"""Settings of all tests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from hypothesis import settings

from lab.virtual_time import VirtualLoop, virtual_clock

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
ASYNCIO: Mapping[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop}
BOTH: Mapping[str, LoopFactory] = {**ASYNCIO, "uvloop": uvloop.new_event_loop}

settings.register_profile("firsttoken", deadline=None)  # how long an example takes depends on the test machine's load
settings.load_profile("firsttoken")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background with SIGINT ignored, which the processes of the tests would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Takes ten thousand collected tests, and all that is imported, out of every later garbage collection."""
    gc.freeze()


def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores, since some tests wait for processes; each costs the collection of all tests."""
    return (os.cpu_count() or 1) + 1


def is_virtual(item: pytest.Item) -> bool:
    """The closer of both marks counts, so a test can leave the virtual time of its module."""
    mark = next((mark for mark in item.iter_markers() if mark.name in ("virtual_time", "real_time")), None)
    return mark is not None and mark.name == "virtual_time"


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """asyncio's, unless a module asks for both: `pytestmark = pytest.mark.asyncio(loop_factories=[...])`."""
    marker = item.get_closest_marker("asyncio")
    if marker is not None and "loop_factories" in marker.kwargs:
        return BOTH
    return {"virtual": VirtualLoop} if is_virtual(item) else ASYNCIO


@pytest.fixture(autouse=True)
def clock(request: pytest.FixtureRequest) -> Iterator[None]:
    """Virtual time where a test, or its module, is marked with it."""
    if not is_virtual(request.node):
        yield
        return
    with virtual_clock():
        yield
