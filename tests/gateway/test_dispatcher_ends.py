"""How dispatching ends: hedges, refusals, and callers that leave."""

from __future__ import annotations

import asyncio

import pytest

from backends.interface import Failure, FailureKind
from gateway.dispatcher import header_safe, refusal_of
from policies.facts import Ending
from tests.gateway.builders import (
    PREAMBLE,
)
from tests.gateway.dispatching import Fleet, failed
from tests.kit import upstream as kit
from tests.kit.simulated import eventually
from tests.kit.upstream import HANG, STREAM_HEAD, Script, chunk

# --------------------------------------------------------------------------- the caller leaves


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD, HANG], [STREAM_HEAD + chunk(PREAMBLE), HANG]])
async def test_a_caller_that_leaves_ends_every_attempt(script: Script) -> None:
    """At once, at the engine too; nothing is left in the books."""
    async with Fleet(script) as fleet:
        task = asyncio.create_task(fleet.open())
        await eventually(lambda: fleet.asked == [1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fleet.upstreams[0].until(lambda seen: seen.hangups == 1)
        assert fleet.lost == [("small/0", "primary", "cancelled")]
        assert (fleet.open_attempts, fleet.monitor.endings) == ([0], [Ending.CANCELLED])
        assert (fleet.retries.active, fleet.retries.retrying) == (0, 0)


async def test_a_caller_that_leaves_a_race_ends_both() -> None:
    """The hedge is as much an attempt as the other."""
    async with Fleet([STREAM_HEAD, HANG], [STREAM_HEAD, HANG]) as fleet:
        task = asyncio.create_task(fleet.open(within=0.8, hedge={"max_extra": 1.0}))
        await eventually(lambda: fleet.asked == [1, 1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for upstream in fleet.upstreams:
            await upstream.until(lambda seen: seen.hangups == 1)
        assert sorted(fleet.lost) == [("small/0", "primary", "cancelled"), ("small/1", "hedge", "cancelled")]


async def test_a_caller_may_leave_while_its_attempt_connects() -> None:
    """What is connected after that is closed again."""
    async with Fleet([HANG]) as fleet:
        task = asyncio.create_task(fleet.open())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fleet.upstreams[0].until(lambda seen: seen.hangups == 1)
        assert (fleet.lost, fleet.ways["small/0"].origin.active) == ([("small/0", "primary", "cancelled")], 0)


async def test_a_connection_that_fails_when_nobody_waits_for_it_is_no_failure() -> None:
    """The attempt had ended by then, as cancelled."""
    async with kit.Upstream([HANG]) as mute, Fleet(mute.url.replace("http:", "https:")) as fleet:
        task = asyncio.create_task(fleet.open())
        await eventually(lambda: mute.connections == 1)  # and its TLS handshake is never answered
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (fleet.open_attempts, fleet.monitor.endings) == ([0], [Ending.CANCELLED])
        await mute.until(lambda seen: seen.hangups == 1)
        await asyncio.sleep(0)
        assert (fleet.monitor.endings, fleet.lost) == ([Ending.CANCELLED], [("small/0", "primary", "cancelled")])


@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        (failed(FailureKind.CLIENT, status=422), 422, {}),
        (failed(FailureKind.SERVER), 502, {"x-should-retry": "false"}),
        (failed(FailureKind.TIMEOUT, status=504), 504, {"x-should-retry": "false"}),
        (failed(FailureKind.AUTH), 502, {"x-should-retry": "false"}),
        (
            failed(FailureKind.RATE_LIMITED, status=429, retry_after=2.5),
            429,
            {"retry-after": "3", "retry-after-ms": "2500"},
        ),
        (failed(FailureKind.RATE_LIMITED, status=429), 429, {"retry-after": "1", "retry-after-ms": "1000"}),
        (
            failed(FailureKind.OVERLOADED, status=503, retry_after=1e9),
            503,
            {"retry-after": "60", "retry-after-ms": "60000"},
        ),
        (
            failed(FailureKind.OVERLOADED, status=503, retry_after=0.0),
            503,
            {"retry-after": "1", "retry-after-ms": "1000"},
        ),
    ],
)
def test_the_last_failure_is_the_callers_error(failure: Failure, status: int, headers: dict[str, str]) -> None:
    """Overload says when to come back, within a minute; what was tried everywhere need not be tried again."""
    refusal = refusal_of(failure, "all 2 candidates have failed")
    assert (refusal.status, refusal.message, refusal.headers) == (status, "It failed.", headers)


def test_without_any_failure_it_was_silence() -> None:
    """504."""
    refusal = refusal_of(None, "no first token within 60 s")
    assert (refusal.status, refusal.type, refusal.code) == (504, "server_error", "timeout")


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("gpt-4.1-mini", "gpt-4.1-mini"),
        ("org/model:tag", "org/model:tag"),
        ("x" * 128, "x" * 128),
        ("x" * 129, "-"),
        ("a\r\nset-cookie: b", "-"),
        ("modèle", "-"),
        ("a\u2028b", "-"),
        ("", ""),
    ],
)
def test_a_callers_name_of_a_model_cannot_write_headers(model: str, shown: str) -> None:
    """What is not plain is not shown."""
    assert header_safe(model) == shown
