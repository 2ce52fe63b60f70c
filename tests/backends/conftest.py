"""Event loops of tests: asyncio's, and uvloop where a module asks for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
ASYNCIO: Mapping[str, LoopFactory] = {"asyncio": asyncio.SelectorEventLoop}
BOTH: Mapping[str, LoopFactory] = {**ASYNCIO, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """asyncio's, unless a module asks for both: `pytestmark = pytest.mark.asyncio(loop_factories=[...])`."""
    marker = item.get_closest_marker("asyncio")
    return BOTH if marker is not None and "loop_factories" in marker.kwargs else ASYNCIO
