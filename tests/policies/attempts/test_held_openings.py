"""Streams whose opening is held back and judged: the race, the silence and the kept answer."""

from __future__ import annotations

import pytest

from policies.attempts.attempt_events import Answered, Begun, ClientGone, EndpointDown, Event, FirstToken, TimerFired
from policies.attempts.attempt_states import AttemptState
from policies.types import FOREVER
from tests.support.attempt_script import API, A, B, begun, fails, hedged, told

POOR = Answered(1, "refusal_text")


def test_the_first_token_of_a_held_stream_ends_the_race() -> None:
    """Like any first token; the commit follows when the opening was judged."""
    race, now = hedged(A, B)
    assert told(race.on(Begun(2), now + 0.1)) == ["cancel 1 cancelled"]
    assert race.state is AttemptState.RACING
    assert told(race.on(FirstToken(2), now + 1.0)) == ["commit 2"]


def test_a_held_stream_is_neither_hedged_nor_abandoned_for_its_deadline() -> None:
    """Its first token was in time: no timer but that of silence is left."""
    race = begun(A, B, deadline=1.0, idle=30.0)
    assert race.on(Begun(1), 0.2).wake_at == pytest.approx(30.2)


def test_a_held_stream_that_falls_silent_is_left_for_the_next_candidate() -> None:
    """After the time without a byte that ends any stream: nothing of it was written."""
    race = begun(A, B, idle=5.0)
    race.on(Begun(1), 0.2)
    assert told(race.on(TimerFired(), 5.2)) == ["cancel 1 silent", "open 2 fallback b"]


def test_a_held_stream_is_left_at_the_limit_of_the_whole_answer() -> None:
    race = begun(A, B, limit_at=4.0)
    race.on(Begun(1), 0.2)
    assert told(race.on(TimerFired(), 4.0)) == ["cancel 1 silent", "give up"]


def test_a_failure_of_a_held_stream_is_hidden() -> None:
    race = begun(A, B)
    race.on(Begun(1), 0.2)
    assert told(race.on(fails(1, "reset", accepted=True), 0.5)) == ["open 2 fallback b"]


def test_a_poor_opening_asks_another_pool_whose_first_token_is_the_callers() -> None:
    race = begun(A, B, API)
    race.on(Begun(1), 0.2)
    assert told(race.on(POOR, 0.9)) == ["keep 1 refusal_text", "open 2 fallback api"]
    assert told(race.on(FirstToken(2), 1.4)) == ["cancel 1 completed", "commit 2"]


def test_a_rival_in_the_pool_of_a_poor_opening_is_cancelled() -> None:
    """Where the opening has come in one read, nothing has ended the race before."""
    race, now = hedged(A, B, API)
    actions = told(race.on(Answered(2, "refusal_text"), now + 0.1))
    assert actions == ["keep 2 refusal_text", "cancel 1 cancelled", "open 3 fallback api"]


@pytest.mark.parametrize(
    ("event", "actions"),
    [
        (fails(2, "auth"), ["commit 1"]),
        (fails(2, "client"), ["commit 1"]),
        (TimerFired(), ["cancel 2 silent", "commit 1"]),
        (EndpointDown(2), []),
        (ClientGone(), ["cancel 1 completed", "cancel 2 cancelled"]),
    ],
)
def test_a_kept_stream_is_the_callers_if_no_other_comes(event: Event, actions: list[str]) -> None:
    race = begun(A, API, deadline=FOREVER)
    race.on(POOR, 1.0)
    assert told(race.on(event, 31.0)) == actions


def test_the_silence_of_a_kept_stream_counts_again_after_its_commit() -> None:
    """A timer is set, which a whole answer does not need."""
    race = begun(A, API, idle=5.0)
    race.on(POOR, 1.0)
    assert race.on(fails(2, "auth"), 2.0).wake_at is not None


@pytest.mark.parametrize("ranked", [(A,), (A, B)])
def test_without_another_pool_a_poor_opening_is_accepted(ranked: tuple[object, ...]) -> None:
    race = begun(*ranked)  # type: ignore[arg-type]
    race.on(Begun(1), 0.2)
    assert told(race.on(POOR, 0.9)) == ["commit 1"]


def test_events_about_an_attempt_that_has_ended_change_nothing() -> None:
    race, now = hedged(A, B)
    race.on(Begun(1), now + 0.1)
    assert told(race.on(Begun(2), now + 0.2)) == []
