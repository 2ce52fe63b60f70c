"""Requests leave no reference cycles: garbage collection would pause all requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.support.builders import CHAT, STREAMED, TOKEN, WHOLE, calling, post
from tests.support.gateways import pool, running
from tests.support.simulated import eventually
from tests.support.upstream import CLOSE, HANG, RESET, STREAM_HEAD, Script, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

OURS = ("gateway.", "policies.", "backends.")
STREAM = {**CHAT, "stream": True}


@contextmanager
def reference_cycles() -> Iterator[set[str]]:
    """Yields the names of product classes with objects left in cycles."""
    found: set[str] = set()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found |= {type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith(OURS)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


CASES: dict[str, tuple[list[Script], bytes]] = {
    "unstreamed": ([[reply(WHOLE)]], post(CHAT)),
    "a stream": ([[STREAMED]], post(STREAM)),
    "an engine's refusal": ([[reply(b"{}", "400 x")]], post(CHAT)),
    "a stream that breaks off": ([[STREAM_HEAD + chunk(TOKEN), CLOSE]], post(STREAM)),
    "a lost connection and a retry": ([[RESET], [STREAMED]], post(STREAM)),
    "an invalid body": ([], post(b"{")),
    "an unknown model": ([], post({**CHAT, "model": "nobody"})),
}


@pytest.mark.parametrize(("scripts", "request_"), CASES.values(), ids=CASES)
async def test_a_request_leaves_no_reference_cycle(scripts: list[Script], request_: bytes) -> None:
    """For each kind of end. Three requests each, since objects created once do not count."""
    async with Upstream(*(scripts * 3)) as upstream, running({"only": pool(upstream.url)}) as gateway:
        with reference_cycles() as left:
            for _ in range(3):
                async with calling(gateway.url) as caller:
                    await caller.ask(request_)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await caller.rest()
            await eventually(lambda: not gateway.recorder.live and len(gateway.recorder.recent) == 3)
    assert left == set()


async def test_a_disconnected_caller_leaves_no_reference_cycle() -> None:
    """The caller disconnects in the middle of the answer."""
    async with (
        Upstream([STREAM_HEAD + chunk(TOKEN), HANG]) as upstream,
        running({"only": pool(upstream.url)}) as gateway,
    ):
        with reference_cycles() as left:
            async with calling(gateway.url) as caller:
                await caller.ask(post(STREAM))
            await eventually(lambda: not gateway.recorder.live)
    assert left == set()
