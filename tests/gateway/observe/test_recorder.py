"""Exactly one Record per request, on every path."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from time import monotonic, time

import pytest

from gateway.api.api_error import bad_request
from gateway.observe import recorder
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.recorder import Recorder
from tests.gateway.builders import decided


def ended(raised: BaseException | None) -> list[Record]:
    """State of a recorder after a request that ended with the exception."""
    seen: list[Record] = []
    made = Recorder([seen.append])
    with suppress(BaseException), made.timeline(monotonic() - 0.25) as life:
        life.record.route = "chat"
        if raised is not None:
            raise raised
        life.finished(RequestOutcome.COMPLETED, monotonic())
    assert list(made.recent) == seen
    assert made.live == 0
    return seen


@pytest.mark.parametrize(
    ("raised", "end", "error"),
    [
        (None, RequestOutcome.COMPLETED, ""),
        (asyncio.CancelledError(), RequestOutcome.CLIENT_GONE, ""),
        (ConnectionResetError(), RequestOutcome.CLIENT_GONE, ""),
        (KeyError("route"), RequestOutcome.INTERNAL, "KeyError"),
        (bad_request("nobody caught it"), RequestOutcome.INTERNAL, "ApiError"),
        (SystemExit(), RequestOutcome.INTERNAL, "SystemExit"),
    ],
)
def test_every_path_out_leaves_exactly_one_record(
    raised: BaseException | None, end: RequestOutcome, error: str
) -> None:
    """A caller that left is no error; an uncaught exception is the gateway's. Its text may hold data: not kept."""
    (found,) = ended(raised)
    assert (found.route, found.end, found.error) == ("chat", end, error)
    assert found.total >= 0.25


def test_an_exception_after_the_noted_end_does_not_change_it() -> None:
    """The relay knows the end of a stream better than an exception in flight."""
    seen: list[Record] = []
    with suppress(asyncio.CancelledError), Recorder([seen.append]).timeline(monotonic() - 1) as life:
        life.finished(RequestOutcome.UPSTREAM_BROKE, monotonic(), "it broke")
        raise asyncio.CancelledError
    assert [(found.end, found.error) for found in seen] == [(RequestOutcome.UPSTREAM_BROKE, "it broke")]


def test_the_exception_itself_goes_on() -> None:
    """A Record hides no bug, and a cancelled task stays cancelled."""
    with pytest.raises(asyncio.CancelledError), Recorder().timeline(monotonic()):
        raise asyncio.CancelledError


async def test_a_request_cancelled_in_the_middle_of_an_await_is_recorded() -> None:
    """The usual way to leave."""
    made = Recorder()

    async def request() -> None:
        with made.timeline(monotonic()):
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert (made.live, list(made.recent)) == (1, [])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (made.live, [found.end for found in made.recent]) == (0, [RequestOutcome.CLIENT_GONE])


def test_a_sink_that_fails_loses_its_own_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Later sinks, the next Record and the caller's answer are unaffected; the bug is logged."""
    seen: list[Record] = []

    def broken(record: Record) -> None:
        raise RuntimeError("full")

    made = Recorder([broken, seen.append])
    with caplog.at_level(logging.ERROR, "firsttoken"):
        for _ in range(2):
            with made.timeline(monotonic()) as life:
                life.finished(RequestOutcome.COMPLETED, monotonic())
    assert (len(seen), len(made.recent)) == (2, 2)
    assert [entry.message for entry in caplog.records] == ["record sink failed"] * 2


def test_a_record_carries_the_wall_clock_of_its_arrival() -> None:
    """Arrival lies before now: logs of several machines are compared by wall-clock time."""
    made = Recorder()
    with made.timeline(monotonic() - 5.0) as life:
        pass
    assert life.record.wall == pytest.approx(time() - 5.0, abs=1.0)


def test_a_decision_is_kept_no_longer_than_its_request() -> None:
    """Hundreds of candidates in hundreds of Records would fill the memory."""
    made = Recorder()
    with made.timeline(monotonic()) as life:
        life.decided(decided())
        assert life.record.decision is not None
    (found,) = made.recent
    assert (found.decision, found.pool) == (None, "small")


def test_the_most_recent_records_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory is bounded."""
    monkeypatch.setattr(recorder, "RECENT", 3)
    made = Recorder()
    for i in range(5):
        with made.timeline(monotonic()) as life:
            life.record.request_id = str(i)
    assert [found.request_id for found in made.recent] == ["2", "3", "4"]
