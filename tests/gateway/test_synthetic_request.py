"""A request of the gateway's own: sent once, read to its end, and dropped."""

from __future__ import annotations

import asyncio

import pytest

from backends.http.connection_pool import ConnectionPool
from backends.interface import FailureKind
from gateway.synthetic_request import send_synthetic
from gateway.upstream.attempt import WireAttempt, WireState
from gateway.upstream.routed_request import Upstream as Target
from policies.types import AttemptOutcome, PoolEstimate
from tests.support import upstream as kit
from tests.support.builders import ANSWER, ERROR, STREAMED, TOKEN, WHOLE, RecordingFleet, backend, candidate, forward
from tests.support.scripted_fleet import dead_url
from tests.support.upstream import CLOSE, GATE, HANG, LAST_CHUNK, RESET, STREAM_HEAD, Script, chunk, reply

pytestmark = pytest.mark.virtual_time


def target(url: str) -> Target:
    return Target(ConnectionPool(url, connect_timeout=1.0), backend(), "served")


async def send(fleet: RecordingFleet, upstream: Target, timeout: float, stream: bool = True) -> WireAttempt:
    endpoint = candidate().endpoint
    return await send_synthetic(fleet, endpoint, upstream, forward(stream), PoolEstimate(100), timeout)


async def sent_to(script: Script, *, stream: bool = True, timeout: float = 5.0) -> tuple[WireAttempt, RecordingFleet]:
    fleet = RecordingFleet()
    async with kit.Upstream(script) as upstream:
        wire = await send(fleet, target(upstream.url), timeout, stream)
        assert len(upstream.requests) == 1
        await wire.upstream.connections.close()
    return wire, fleet


@pytest.mark.parametrize(("stream", "script"), [(True, [STREAMED]), (False, [reply(WHOLE)]), (True, [reply(WHOLE)])])
async def test_an_answer_is_read_to_its_end_and_dropped(stream: bool, script: Script) -> None:
    """The fleet learns of it like of any other, also where the server does not stream."""
    wire, fleet = await sent_to(script, stream=stream)
    assert (wire.state, fleet.endings) == (WireState.OVER, [AttemptOutcome.COMPLETED])
    assert wire.answered
    assert [load.in_flight for load in fleet.loads().values()] == [0, 0]


async def test_a_second_request_uses_the_connection_again() -> None:
    fleet = RecordingFleet()
    async with kit.Upstream([STREAMED]) as upstream:
        own = target(upstream.url)
        for _ in range(2):
            await send(fleet, own, 5.0)
        assert (upstream.connections, len(upstream.requests)) == (1, 2)
        await own.connections.close()
    assert fleet.endings == [AttemptOutcome.COMPLETED] * 2


@pytest.mark.parametrize(
    ("script", "ending", "kind"),
    [
        ([RESET], AttemptOutcome.FAILED, FailureKind.RESET),
        ([reply(b"{}", "500 x")], AttemptOutcome.FAILED, FailureKind.SERVER),
        ([reply(b"{}", "400 x")], AttemptOutcome.REFUSED, FailureKind.CLIENT),
        ([STREAM_HEAD + chunk(ERROR) + LAST_CHUNK], AttemptOutcome.FAILED, FailureKind.SERVER),
        ([STREAM_HEAD + chunk(TOKEN), CLOSE], AttemptOutcome.BROKEN, FailureKind.RESET),
        ([STREAM_HEAD + chunk(TOKEN + ERROR) + LAST_CHUNK], AttemptOutcome.BROKEN, FailureKind.SERVER),
    ],
)
async def test_a_failure_ends_it_without_another_attempt(
    script: Script, ending: AttemptOutcome, kind: FailureKind
) -> None:
    """Before its first token and after: nobody waits for the answer."""
    wire, fleet = await sent_to(script)
    assert fleet.endings == [ending]
    assert wire.failure is not None
    assert wire.failure.kind is kind


async def test_a_refused_connection_is_a_failure() -> None:
    fleet = RecordingFleet()
    await send(fleet, target(dead_url()), 5.0)
    assert (fleet.endings, fleet.reports[0].connected) == ([AttemptOutcome.FAILED], False)


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD + chunk(TOKEN), HANG]])
async def test_silence_is_ended_after_the_timeout(script: Script) -> None:
    """The connection is closed, so the engine stops."""
    fleet = RecordingFleet()
    async with kit.Upstream(script) as upstream:
        wire = await send(fleet, target(upstream.url), 0.1)
        await upstream.until(lambda seen: seen.hangups == 1)
        assert wire.upstream.connections.active == 0
    assert fleet.endings == [AttemptOutcome.SILENT]


async def test_a_first_token_is_told_when_it_comes() -> None:
    """From there on the answer decodes: prompts sent beside it do not wait for its prefill."""
    fleet = RecordingFleet()
    async with kit.Upstream([STREAM_HEAD + chunk(TOKEN), GATE, chunk(ANSWER) + LAST_CHUNK]) as upstream:
        task = asyncio.create_task(send(fleet, target(upstream.url), 5.0))
        async with asyncio.timeout(5.0):
            while not fleet.view.answering():  # noqa: ASYNC110 - the fleet has no notification
                await asyncio.sleep(0.01)
        upstream.proceed()
        await task
    assert fleet.endings == [AttemptOutcome.COMPLETED]


async def test_a_cancelled_task_ends_the_attempt() -> None:
    """At the stop of the gateway."""
    fleet = RecordingFleet()
    async with kit.Upstream([STREAM_HEAD, HANG]) as upstream:
        task = asyncio.create_task(send(fleet, target(upstream.url), 5.0))
        await upstream.until(lambda seen: len(seen.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await upstream.until(lambda seen: seen.hangups == 1)
    assert fleet.endings == [AttemptOutcome.CANCELLED]


async def test_the_bytes_of_the_answer_are_not_kept() -> None:
    """A warming of many prompts holds no memory."""
    wire, _ = await sent_to([STREAM_HEAD + chunk(TOKEN), chunk(ANSWER) + LAST_CHUNK])
    assert wire.held.take() == b""
