"""Both event loops: uvloop is what serves, asyncio's is what there is elsewhere."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


@pytest.fixture
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """asyncio's, unless a module asks for both by `pytestmark`."""
    return uvloop.EventLoopPolicy() if getattr(request, "param", "") == "uvloop" else asyncio.DefaultEventLoopPolicy()
