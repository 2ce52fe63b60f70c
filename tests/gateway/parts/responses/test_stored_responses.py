"""Places of large stored responses."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.api.api_error import ApiError
from gateway.parts.responses import stored_responses
from gateway.parts.responses.stored_responses import LARGE_PLACES, LargeReplies

pytestmark = pytest.mark.virtual_time


async def test_a_key_has_one_place_and_all_keys_have_a_few() -> None:
    """Those beyond wait in order."""
    places, first, entered = LargeReplies(), AsyncExitStack(), AsyncExitStack()
    await places.enter("0", first)
    waiting = asyncio.create_task(places.enter("0", AsyncExitStack()))
    for number in range(1, LARGE_PLACES):
        await places.enter(str(number), entered)
    late = asyncio.create_task(places.enter("late", AsyncExitStack()))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not late.done()
    await entered.aclose()
    await late
    assert not waiting.done()
    await first.aclose()
    await waiting


async def test_a_wait_for_a_place_ends_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "PLACE_WAIT", 0.0)
    places, first, second = LargeReplies(), AsyncExitStack(), AsyncExitStack()
    async with first:
        await places.enter("a", first)
        with pytest.raises(ApiError) as refused:
            await places.enter("a", second)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
    await second.aclose()
    await places.enter("a", AsyncExitStack())
