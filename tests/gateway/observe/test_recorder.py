"""The Recorder: exactly one Record for a request, at once to the sinks that learn, and in batches to all others."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from time import monotonic, time

import pytest
from prometheus_client import CollectorRegistry

from backends.interface import Operation
from gateway.api.api_error import bad_request
from gateway.api.inference_request import parse
from gateway.observe import recorder
from gateway.observe.metrics.request_metrics import RequestMetrics
from gateway.observe.part_notes import DIAGNOSIS
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.recorder import BATCH, LINGER, Recorder
from gateway.observe.timeline import RequestTimeline
from tests.support.builders import decided, route

pytestmark = pytest.mark.virtual_time


async def ended(raised: BaseException | None) -> list[Record]:
    """State of a recorder after a request ended by the exception."""
    seen: list[Record] = []
    made = Recorder([seen.append])
    with suppress(BaseException), made.timeline(monotonic() - 0.25) as life:
        life.record.route = route()
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
async def test_every_path_out_leaves_exactly_one_record(
    raised: BaseException | None, end: RequestOutcome, error: str
) -> None:
    """A disconnection is no error; an uncaught exception is the gateway's fault, recorded without its message."""
    (found,) = await ended(raised)
    assert (found.route.name, found.end, found.error) == ("chat", end, error)
    assert found.total >= 0.25


async def test_an_exception_after_the_noted_end_does_not_change_it() -> None:
    """The relay knows the end of a stream better than an exception in flight."""
    seen: list[Record] = []
    with suppress(asyncio.CancelledError), Recorder([seen.append]).timeline(monotonic() - 1) as life:
        life.finished(RequestOutcome.UPSTREAM_BROKE, monotonic(), "it broke")
        raise asyncio.CancelledError
    assert [(found.end, found.error) for found in seen] == [(RequestOutcome.UPSTREAM_BROKE, "it broke")]


async def test_exceptions_are_reraised() -> None:
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


async def test_a_sink_that_fails_loses_its_own_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_record_carries_the_wall_clock_of_its_arrival() -> None:
    """Arrival lies before now: logs of several machines are compared by wall-clock time."""
    made = Recorder()
    with made.timeline(monotonic() - 5.0) as life:
        pass
    assert life.record.wall == pytest.approx(time() - 5.0, abs=1.0)


async def test_a_decision_is_kept_no_longer_than_its_batch() -> None:
    """Hundreds of candidates in hundreds of Records would fill the memory."""
    made = Recorder()
    with made.timeline(monotonic()) as life:
        life.decided(decided())
        assert life.record.decision is not None
    await asyncio.sleep(LINGER)
    (found,) = made.recent
    assert (found.decision, found.endpoint.pool) == (None, "small")


async def test_the_most_recent_records_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory is bounded."""
    monkeypatch.setattr(recorder, "RECENT", 3)
    made = Recorder()
    for i in range(5):
        with made.timeline(monotonic()) as life:
            life.record.request_id = str(i)
    assert [found.request_id for found in made.recent] == ["2", "3", "4"]


# --------------------------------------------------------------------------- batches


def end(made: Recorder, life: RequestTimeline | None = None) -> Record:
    """One more request of a route, which ends."""
    with made.timeline(monotonic()) as own:
        own.record.route = route()
        if life is not None:
            own.request, own.prompt = life.request, life.prompt
        own.first_token_out(monotonic(), 200)
        own.finished(RequestOutcome.COMPLETED, monotonic())
    return own.record


async def test_sinks_that_learn_have_a_record_at_once_and_batch_sinks_with_the_batch() -> None:
    """The next decision uses what the last answer taught; the access log can wait."""
    now, later = list[Record](), list[Record]()
    made = Recorder([now.append], [later.append])
    for number in range(BATCH):
        assert (len(now), len(later)) == (number, 0)
        end(made)
    assert now == later == list(made.recent)


async def test_a_batch_that_does_not_fill_ends_after_its_time() -> None:
    """A quiet gateway writes its log too. The next batch has its own time."""
    later = list[Record]()
    made = Recorder([], [later.append])
    for number in (1, 2):
        end(made)
        await asyncio.sleep(LINGER * 0.9)
        assert len(later) == number - 1
        await asyncio.sleep(LINGER * 0.2)
        assert len(later) == number


@pytest.mark.parametrize(("messages", "size"), [(recorder.MESSAGES, 0), (1, recorder.BYTES)])
async def test_prompts_of_many_messages_or_bytes_end_a_batch(messages: int, size: int) -> None:
    """The loop stands still for a bounded time, and the memory of a batch is bounded."""
    later = list[Record]()
    made = Recorder([], [later.append])
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}] * messages}
    asked = parse(Operation.CHAT, json.dumps(body).encode(), {}, 0.0, "req-1")
    asked.size = max(asked.size, size)
    life = RequestTimeline(Record())
    life.request = asked
    end(made)
    assert not later
    end(made, life)
    assert len(later) == 2
    end(made)
    assert len(later) == 2


@pytest.mark.parametrize("count", [1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH])
async def test_a_scrape_includes_every_request_that_has_ended(count: int) -> None:
    """Requests are counted in batches; a scrape counts the waiting ones, once."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, ())
    made = Recorder([], [metrics])
    metrics.flush = made.flush
    for _ in range(count):
        end(made)
    for _ in range(2):
        found = registry.get_sample_value(
            "firsttoken_requests_total", {"route": "chat", "pool": "-", "outcome": "completed"}
        )
        assert found == count


async def test_a_record_that_cannot_be_counted_loses_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    """A bug of the gateway is logged; Records before and after are counted."""
    metrics = RequestMetrics(CollectorRegistry(), ())
    made = Recorder([], [metrics])
    with caplog.at_level(logging.ERROR, "firsttoken"):
        for attempts in ([], [None], []):
            end(made).attempts = attempts  # type: ignore[assignment]
        made.flush()
    assert sum(metrics.ttft.of["chat", "-"].counts) == 2
    assert [entry.message for entry in caplog.records] == ["record sink failed"]


async def test_a_slow_request_is_diagnosed_at_its_end_beside_all_that_ended_before() -> None:
    """Its cause is known when it leaves, and the usual of its route includes the requests of the same batch."""
    made = Recorder()
    for _ in range(10):
        end(made)
    with made.timeline(monotonic()) as life:
        life.record.route = route()
        life.finished(RequestOutcome.FAILED, monotonic())
    (found,) = made.missed
    assert found is life.record
    assert DIAGNOSIS.of(found) is not None
    assert DIAGNOSIS.of(found).usual.requests == 10
