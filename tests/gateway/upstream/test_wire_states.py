"""Every state of an attempt, and where each event leads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backends.failures import PAGE
from backends.interface import Failure
from gateway.upstream.attempt import BrokenOff, Milestone, WireEvent, WireState
from policies.types import AttemptOutcome
from tests.support.attempt_stage import REFUSED, RESET, Stage
from tests.support.builders import ANSWER, ERROR, FINISH, PREAMBLE, TOKEN, WHOLE, RecordingExchange

pytestmark = pytest.mark.virtual_time

CONNECTING, SENT, HELD, COMMITTED, OVER = WireState
EVENTS, HTML = {"content-type": "text/event-stream"}, {"content-type": "text/html"}
Event = Callable[[Stage], WireEvent]


def stage_in(state: WireState, stream: bool = True) -> Stage:
    """An attempt in `state`. Committed: after one token; over: cancelled."""
    stage = Stage(stream=stream, status=0)
    if state in (SENT, HELD, COMMITTED):
        stage.wire.on_sent(RecordingExchange())
    if state in (HELD, COMMITTED):
        stage.wire.on_head(200, EVENTS)
    if state is COMMITTED:
        stage.wire.on_body(TOKEN)
        join(stage)
    if state is OVER:
        stage.wire.stop(AttemptOutcome.CANCELLED)
    assert stage.wire.state is state
    return stage


def head(stage: Stage) -> WireEvent:
    return stage.wire.on_head(200, EVENTS)


def html(stage: Stage) -> WireEvent:
    return stage.wire.on_head(200, HTML)


def error_head(stage: Stage) -> WireEvent:
    return stage.wire.on_head(500, {})


def read(stage: Stage, data: bytes) -> WireEvent:
    """Before the commit by the attempt; then by the sink of the answer, which tells the race."""
    if stage.sink.joined is None:
        return stage.wire.on_body(data)
    stage.sink.on_body(data)
    return stage.sink.events.pop() if stage.sink.events else None


def preamble(stage: Stage) -> WireEvent:
    return read(stage, PREAMBLE)


def token(stage: Stage) -> WireEvent:
    return read(stage, TOKEN)


def finish(stage: Stage) -> WireEvent:
    return read(stage, FINISH)


def error(stage: Stage) -> WireEvent:
    return read(stage, ERROR)


def end(stage: Stage) -> WireEvent:
    return stage.wire.on_end()


def complete(stage: Stage) -> WireEvent:
    read(stage, ANSWER)
    return stage.wire.on_end()


def lost(stage: Stage) -> WireEvent:
    return stage.wire.on_failure(RESET)


def lost_after_its_end(stage: Stage) -> WireEvent:
    read(stage, FINISH)
    return stage.wire.on_failure(RESET)


def join(stage: Stage) -> WireEvent:
    return stage.sink.join()


def stop(stage: Stage) -> WireEvent:
    stage.wire.stop(AttemptOutcome.SILENT)
    return None


def sent(stage: Stage) -> WireEvent:
    stage.wire.on_sent(RecordingExchange())
    return None


def not_connected(stage: Stage) -> WireEvent:
    return stage.wire.fail(REFUSED)


TABLE: list[tuple[WireState, Event, WireState, object]] = [
    (CONNECTING, sent, SENT, None),
    (CONNECTING, not_connected, OVER, Failure),
    (CONNECTING, lost, OVER, Failure),
    (CONNECTING, stop, OVER, None),
    (SENT, head, HELD, None),
    (SENT, error_head, HELD, None),
    (SENT, html, OVER, Failure),
    (SENT, lost, OVER, Failure),
    (SENT, stop, OVER, None),
    (HELD, preamble, HELD, None),
    (HELD, token, HELD, Milestone.FIRST_TOKEN),
    (HELD, join, COMMITTED, None),
    (HELD, error, OVER, Failure),
    (HELD, end, OVER, Failure),
    (HELD, complete, OVER, Milestone.FIRST_TOKEN),
    (HELD, lost, OVER, Failure),
    (HELD, stop, OVER, None),
    (COMMITTED, token, COMMITTED, None),
    (COMMITTED, finish, COMMITTED, None),
    (COMMITTED, error, OVER, BrokenOff),
    (COMMITTED, end, OVER, BrokenOff),
    (COMMITTED, complete, OVER, Milestone.ENDED),
    (COMMITTED, lost, OVER, BrokenOff),
    (COMMITTED, lost_after_its_end, OVER, Milestone.ENDED),
    (COMMITTED, stop, OVER, None),
    (OVER, stop, OVER, None),
    (OVER, join, OVER, Milestone.ENDED),
]


@pytest.mark.parametrize(
    ("before", "event", "after", "told"), TABLE, ids=[f"{s.value}-{e.__name__}" for s, e, _, _ in TABLE]
)
def test_each_event_leads_to_the_next_state(before: WireState, event: Event, after: WireState, told: object) -> None:
    """And tells the race what it means."""
    stage = stage_in(before)
    found = event(stage)
    assert stage.wire.state is after
    assert isinstance(found, told) if isinstance(told, type) else found is told
    assert (stage.wire.outcome is not None) == (after is OVER)
    assert len(stage.fleet.endings) == (after is OVER)


@pytest.mark.parametrize("state", WireState)
def test_every_state_ends_by_a_stop_with_the_exchange_closed(state: WireState) -> None:
    """The engine is told at once; a second stop does nothing."""
    stage = stage_in(state)
    exchange = stage.wire._exchange
    assert (exchange is None) == (state in (CONNECTING, OVER))
    stage.wire.stop(AttemptOutcome.SILENT)
    stage.wire.stop(AttemptOutcome.BROKEN, RESET)
    assert stage.wire.outcome is (AttemptOutcome.CANCELLED if state is OVER else AttemptOutcome.SILENT)
    assert (stage.wire._exchange, stage.wire.failure) == (None, None)
    assert exchange is None or getattr(exchange, "steps", []) == ["cancel"]


def test_every_state_is_in_the_table() -> None:
    """As the beginning and as the end of a transition."""
    assert {before for before, _, _, _ in TABLE} == set(WireState)
    assert {after for _, _, after, _ in TABLE} == set(WireState) - {CONNECTING}


def test_a_whole_answer_is_held_until_the_race_has_rewritten_it() -> None:
    """It may still fail: what cannot be rewritten for the caller is no answer."""
    stage = stage_in(HELD, stream=False)
    assert stage.wire.on_body(WHOLE) is None
    assert stage.wire.on_end() is Milestone.WHOLE
    assert (stage.wire.state, stage.fleet.endings) == (HELD, [])
    stage.wire.stop(AttemptOutcome.COMPLETED)
    assert (stage.wire.state, stage.fleet.endings) == (OVER, [AttemptOutcome.COMPLETED])


@pytest.mark.parametrize("state", [SENT, HELD, COMMITTED])
def test_pause_and_resume_reach_the_exchange(state: WireState) -> None:
    stage = stage_in(state)
    exchange = stage.wire._exchange
    assert isinstance(exchange, RecordingExchange)
    stage.wire.pause()
    stage.wire.resume()
    assert exchange.steps == ["pause", "resume"]


def test_a_resumed_attempt_was_heard_now() -> None:
    """Nothing was read from the server, so its silence shows nothing."""
    stage = stage_in(COMMITTED)
    stage.wire.times.last_byte = 0.0
    stage.wire.resume()
    assert stage.wire.times.last_byte >= stage.wire.times.opened


def test_a_page_of_html_is_told_as_a_page() -> None:
    assert html(stage_in(SENT)) is PAGE
