"""Settings of all tests."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

from gateway.observe.record_columns import RECORD
from gateway.part_list import COLUMNS
from lab.virtual_time import VirtualLoop, virtual_clock

TESTS = Path(__file__).parent
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
ASYNCIO: Mapping[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop}
BOTH: Mapping[str, LoopFactory] = {**ASYNCIO, "uvloop": uvloop.new_event_loop}

# Every TLS client, and every process that imports one, would read the system's 140 authorities, 30 to 50 ms each time.
os.environ.setdefault("SSL_CERT_FILE", str(TESTS / "support" / "no_authority.pem"))

settings.register_profile("firsttoken", deadline=None)  # how long an example takes depends on the test machine's load
settings.load_profile("firsttoken")
RECORD.add(COLUMNS)  # as in a gateway


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background with SIGINT ignored, which the processes of the tests would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    """Each worker of a whole run imports the test modules from another place on.

    pytest rewrites every `assert` of a module that has no cached bytecode yet: 20 s for all. Workers in step would each
    do so; workers apart find what the others have written. An error shows again in the collection.
    """
    gc.disable()  # until all is collected: what is imported stays
    workers = getattr(session.config, "workerinput", None)
    if workers is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root = session.config.rootpath
    ignored = [root / path for path in session.config.getoption("ignore")]
    found = (path for folder in session.config.args for path in sorted((root / folder).rglob("test_*.py")))
    modules = [path for path in found if not any(map(path.is_relative_to, ignored))]
    first = int(workers["workerid"].removeprefix("gw")) * len(modules) // workers["workercount"]
    for path in modules[first:] + modules[:first]:
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Takes ten thousand collected tests, and all that is imported, out of every later garbage collection."""
    gc.freeze()
    gc.enable()


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
