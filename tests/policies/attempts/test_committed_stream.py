"""A committed stream that is silent, complete, late, or paused by the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.attempts.attempt_machine import AttemptState
from policies.attempts.patience import SOON, idle_of, is_late, next_look
from policies.attempts.wire import AttemptLimits, Progress
from policies.blame.blame import BLAME
from policies.types import Candidate
from tests.support.attempt_script import API, A, B, GivenFacts, ScriptedRace, Step, begun, fails, machine, told

NOW = 100.0


def limits(**more: Any) -> AttemptLimits:
    return AttemptLimits(max_attempts=3, **{"idle": 30.0, "recovers": True, **more})


# --------------------------------------------------------------------------- the look


@pytest.mark.parametrize(
    ("quiet", "allowed", "progress", "found"),
    [
        (1.0, 2.0, {}, NOW + 1.0),
        (2.0, 2.0, {}, NOW),
        (2.0, 30.0, {}, NOW + 28.0),
        (30.0, 30.0, {}, NOW),
        (1.99, 2.0, {}, NOW + SOON),
        (2.0, 2.0, {"complete": True}, NOW),
        (1.0, 2.0, {"complete": True}, NOW + 1.0),
        (30.0, 30.0, {"complete": True}, NOW),
        (60.0, 2.0, {"paused": True}, NOW + SOON),
        (60.0, 2.0, {"paused": True, "complete": True}, NOW + SOON),
    ],
    ids=[
        "within its pace",
        "by pace",
        "idle without another",
        "idle is over, no other",
        "never sooner than SOON",
        "complete on an open connection",
        "complete, but the end may still come",
        "complete after idle",
        "the caller does not read",
        "complete, and the caller does not read",
    ],
)
def test_a_look_at_the_stream(quiet: float, allowed: float, progress: dict[str, Any], found: float) -> None:
    """After `quiet` seconds without a byte: the time of the next look, or now: it is left."""
    seen = Progress(heard_at=NOW - quiet, **progress)
    assert next_look(limits(), allowed, seen, NOW) == pytest.approx(found)
    assert not is_late(limits(), seen, NOW)


@pytest.mark.parametrize("more", [{}, {"paused": True}])
@pytest.mark.parametrize("quiet", [0.0, 60.0])
def test_a_stream_past_the_limit_of_the_whole_answer_is_late(quiet: float, more: dict[str, Any]) -> None:
    """Though it writes."""
    assert is_late(limits(limit_at=NOW), Progress(heard_at=NOW - quiet, **more), NOW)


def test_a_complete_stream_is_never_late() -> None:
    seen = Progress(heard_at=NOW - 60, complete=True)
    assert not is_late(limits(limit_at=NOW), seen, NOW)
    assert next_look(limits(limit_at=NOW), 2.0, seen, NOW) == NOW


def test_no_look_is_later_than_the_limit_of_the_whole_answer() -> None:
    assert next_look(limits(limit_at=NOW + 0.5), 2.0, Progress(heard_at=NOW), NOW) == NOW + 0.5


@pytest.mark.parametrize(("own", "idle"), [(None, 30.0), (120.0, 120.0), (5.0, 5.0)])
def test_an_endpoint_may_have_an_idle_time_of_its_own(own: float | None, idle: float) -> None:
    """An API may think unseen for longer than an engine."""
    endpoint = replace(A, endpoint=replace(A.endpoint, stream_idle=own))
    assert idle_of(limits(), endpoint) == idle
    race = begun(endpoint, facts=GivenFacts(heard_at=1.0), idle=30.0)
    assert race.first_token(1, 1.0).wake_at == 1.0 + idle
    assert told(race.look(1.0 + idle)) == ["leave 1"]


# --------------------------------------------------------------------------- the machine


def streaming(*ranked: Candidate, **more: Any) -> tuple[ScriptedRace, Step, GivenFacts]:
    """A stream committed at 1 s, with `idle` of 10 s, and left after 2 s for others."""
    facts = GivenFacts(heard_at=1.0, left_after=2.0)
    race = begun(*ranked, facts=facts, **{"idle": 10.0, "recovers": True, **more})
    return race, race.first_token(1, 1.0), facts


def test_the_first_look_is_after_the_patience() -> None:
    """For others, where there are any; else of `idle`; no later than the limit of the whole answer."""
    assert streaming(A, B)[1].wake_at == 3.0
    assert streaming(A)[1].wake_at == 11.0
    assert streaming(A, B, max_attempts=1)[1].wake_at == 11.0
    assert streaming(A, B, recovers=False)[1].wake_at == 11.0
    assert streaming(A, B, idle=1.0)[1].wake_at == 2.0
    assert streaming(A, limit_at=5.0)[1].wake_at == 5.0


def test_a_stream_is_not_left_for_an_endpoint_that_has_failed() -> None:
    """It might fail again."""
    race = machine(A, B, facts=GivenFacts(left_after=2.0), idle=10.0, recovers=True)
    race.begin(0.0)
    race.failed(fails(1), 0.1)
    assert race.first_token(2, 1.0).wake_at == 11.0


def test_a_stream_silent_for_its_pace_is_left_and_another_writes_the_rest() -> None:
    """The break is told by whoever stopped the stream."""
    race, _, _ = streaming(A, B)
    assert told(race.look(3.0)) == ["leave 1"]
    assert race.state is AttemptState.COMMITTED
    assert told(race.broken(BLAME["timeout"], race.others(), 3.0)) == ["open 2 rescue b"]


def test_a_stream_silent_for_idle_is_left_without_another() -> None:
    race, _, _ = streaming(A)
    assert told(race.look(11.0)) == ["leave 1"]
    assert told(race.broken(BLAME["timeout"], (), 11.0)) == ["not continued"]


def test_a_stream_that_writes_is_looked_at_again() -> None:
    race, _, facts = streaming(A, B)
    facts.seen.heard_at = 2.5
    assert race.look(3.0) == Step((), 4.5)


def test_a_paused_caller_is_waited_for() -> None:
    """Nothing is read from the server meanwhile, so its silence shows nothing."""
    race, _, facts = streaming(A, B)
    facts.seen.paused = True
    assert race.look(60.0) == Step((), 60.0 + SOON)
    facts.seen.paused = False
    assert told(race.look(60.0 + SOON)) == ["leave 1"]


def test_a_complete_stream_on_an_open_connection_is_left_as_complete() -> None:
    """Once, and without a further look."""
    race, _, facts = streaming(A, B)
    facts.seen.complete = True
    step = race.look(3.0)
    assert (told(step), step.wake_at) == (["leave 1"], None)
    assert race.look(4.0) == Step()


def test_a_late_stream_is_the_end() -> None:
    """No other is asked: the time for the whole answer is over."""
    race, _, facts = streaming(A, B, API, limit_at=5.0)
    facts.seen.heard_at = 4.9
    step = race.look(5.0)
    assert (told(step), step.wake_at, race.state) == (["cancel 1 cancelled", "give up"], None, AttemptState.OVER)
    assert race.broken(BLAME["timeout"], (), 5.1) == Step()


def test_an_early_timer_does_not_look() -> None:
    """Timers are not exact."""
    race, step, facts = streaming(A, B)
    facts.seen.heard_at = -100.0
    assert race.look(2.9) == Step((), step.wake_at)
