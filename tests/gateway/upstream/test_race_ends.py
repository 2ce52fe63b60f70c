"""Ends of a race when the caller leaves."""

from __future__ import annotations

import asyncio

import pytest

from policies.types import AttemptOutcome
from tests.support import upstream as kit
from tests.support.builders import PREAMBLE
from tests.support.scripted_fleet import Fleet
from tests.support.simulated import eventually
from tests.support.upstream import HANG, STREAM_HEAD, Script, chunk

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD, HANG], [STREAM_HEAD + chunk(PREAMBLE), HANG]])
async def test_a_caller_that_leaves_cancels_every_attempt(script: Script) -> None:
    """At once, at the engine too; no load remains."""
    async with Fleet(script) as fleet:
        task = asyncio.create_task(fleet.open())
        await eventually(lambda: fleet.asked == [1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fleet.upstreams[0].until(lambda seen: seen.hangups == 1)
        assert fleet.lost == [("small/0", "primary", "cancelled")]
        assert (fleet.open_attempts, fleet.fleet.endings) == ([0], [AttemptOutcome.CANCELLED])
        assert (fleet.retries.active, fleet.retries.retrying) == (0, 0)


async def test_a_caller_that_leaves_cancels_attempt_and_hedge() -> None:
    """Both connections are closed."""
    async with Fleet([STREAM_HEAD, HANG], [STREAM_HEAD, HANG]) as fleet:
        task = asyncio.create_task(fleet.open(within=0.8, hedge={"max_extra": 1.0}))
        await eventually(lambda: fleet.asked == [1, 1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for upstream in fleet.upstreams:
            await upstream.until(lambda seen: seen.hangups == 1)
        assert sorted(fleet.lost) == [("small/0", "primary", "cancelled"), ("small/1", "hedge", "cancelled")]


async def test_a_caller_that_leaves_during_connecting_closes_the_connection() -> None:
    """As soon as the connection is established."""
    async with Fleet([HANG]) as fleet:
        task = asyncio.create_task(fleet.open())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fleet.upstreams[0].until(lambda seen: seen.hangups == 1)
        assert (fleet.lost, fleet.ways["small/0"].connections.active) == ([("small/0", "primary", "cancelled")], 0)


async def test_a_connection_that_fails_after_cancellation_is_no_failure() -> None:
    """The attempt has ended as cancelled."""
    async with kit.Upstream([HANG]) as mute, Fleet(mute.url.replace("http:", "https:")) as fleet:
        task = asyncio.create_task(fleet.open())
        await eventually(lambda: mute.connections == 1)  # the TLS handshake is never answered
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (fleet.open_attempts, fleet.fleet.endings) == ([0], [AttemptOutcome.CANCELLED])
        await mute.until(lambda seen: seen.hangups == 1)
        await asyncio.sleep(0)
        assert (fleet.fleet.endings, fleet.lost) == (
            [AttemptOutcome.CANCELLED],
            [("small/0", "primary", "cancelled")],
        )
